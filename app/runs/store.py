"""The record of every run: what was asked, how far it is, what came of it."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import pandas as pd
from sqlalchemy import Row, func, select

from app import paths
from app.runs import tables
from app.runs.results import results_frame
from app.runs.spec import RunSpec
from pruning.errors import InputError


class RunState(StrEnum):
    """Where a run is. Cancelled is not failed; lost means that the process working on it is gone."""

    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    FAILED = "failed"
    DONE = "done"
    LOST = "lost"


WORKING = (RunState.RUNNING, RunState.CANCELLING)
ACTIVE = (RunState.QUEUED, *WORKING)
ENDED = (RunState.CANCELLED, RunState.FAILED, RunState.DONE, RunState.LOST)


@dataclass(frozen=True)
class Run:
    """One attempt at making and measuring a variant.

    ``done`` of ``total`` ``unit`` of ``phase`` are finished; ``step`` is the phase's place among the phases, from 1.
    ``remaining_s`` is the estimate for the whole run, absent while it is not known.
    """

    key: int
    run_id: str
    attempt: int
    label: str
    state: RunState
    spec: RunSpec
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    phase: str | None
    done: int
    total: int
    unit: str
    step: tuple[int, int]
    remaining_s: float | None
    error: str | None
    artifact: Path | None
    artifact_bytes: int
    collapsed: bool


class Store:
    """The database of runs. Raises InputError when it cannot be opened."""

    def __init__(self, url: str | None = None) -> None:
        self.engine = tables.open_database(url or paths.database_url())
        self.writer = tables.writing(self.engine)
        self.home = tables.machine_token()

    def close(self) -> None:
        """Let go of the database."""
        self.engine.dispose()

    def runs(self, states: Collection[RunState] | None = None, limit: int | None = None) -> list[Run]:
        """Newest first."""
        query = select(tables.runs).order_by(tables.runs.c.key.desc()).limit(limit)
        if states is not None:
            query = query.where(tables.runs.c.state.in_([str(state) for state in states]))
        with self.engine.connect() as connection:
            return [_run(row) for row in connection.execute(query)]

    def run(self, key: int) -> Run:
        """Raises InputError when there is no such run."""
        with self.engine.connect() as connection:
            row = connection.execute(select(tables.runs).where(tables.runs.c.key == key)).first()
        if row is None:
            raise InputError(f"There is no run {key}.")
        return _run(row)

    def find(self, run_id: str, states: Collection[RunState] | None = None) -> Run | None:
        """The latest attempt of ``run_id``, of those in ``states`` where given."""
        return next(iter(self.attempts(run_id, states)), None)

    def attempts(self, run_id: str, states: Collection[RunState] | None = None) -> list[Run]:
        """All attempts of ``run_id``, the latest first."""
        query = select(tables.runs).where(tables.runs.c.run_id == run_id).order_by(tables.runs.c.attempt.desc())
        if states is not None:
            query = query.where(tables.runs.c.state.in_([str(state) for state in states]))
        with self.engine.connect() as connection:
            return [_run(row) for row in connection.execute(query)]

    def matching(self, prefix: str) -> Run:
        """The latest attempt of the one run whose id begins with ``prefix``; a finished one where there is one.

        Raises InputError when no run or more than one fits.
        """
        column = tables.runs.c.run_id
        with self.engine.connect() as connection:
            query = select(column).where(func.substr(column, 1, len(prefix)) == prefix).distinct()
            found = list(connection.execute(query).scalars())
        if len(found) != 1:
            cause = "No run has" if not found else f"{len(found)} runs have"
            raise InputError(f"{cause} an id that begins with {prefix!r}: python -m app results lists the ids.")
        attempts = self.attempts(found[0])
        return next((run for run in attempts if run.state is RunState.DONE), attempts[0])

    def record(self, key: int) -> dict[str, Any]:
        """The record of one run as JSON-ready values: what was asked, and what was found where it is finished."""
        run = self.run(key)
        with self.engine.connect() as connection:
            query = select(tables.records.c.record).where(tables.records.c.run_key == key)
            found = connection.execute(query).scalar_one_or_none()
        record: dict[str, Any] = {
            "run": run.run_id,
            "status": str(run.state),
            "recipe": run.label,
            "spec": run.spec.model_dump(mode="json"),
            "figures": {},
            "provenance": {},
        }
        if found is not None:
            record |= json.loads(found)
        if run.error is not None:
            record["error"] = run.error
        record["attempt"] = run.attempt
        for name in ("created_at", "started_at", "finished_at"):
            moment: datetime | None = getattr(run, name)
            record[name] = moment.isoformat(timespec="seconds") if moment is not None else None
        return record

    def artifact_bytes(self) -> dict[str, int]:
        """Bytes on disk of each variant whose files are here, by run id."""
        runs = tables.runs
        query = (
            select(runs.c.run_id, func.sum(runs.c.artifact_bytes))
            .where(runs.c.artifact.is_not(None))
            .group_by(runs.c.run_id)
        )
        with self.engine.connect() as connection:
            return {run_id: int(total) for run_id, total in connection.execute(query)}

    def touch(self) -> None:
        """Say that something a page shows changed outside of the database."""
        with self.writer.begin() as connection:
            tables.bump(connection, "changes")

    def version(self) -> int:
        """A count that grows whenever anything a page shows changed."""
        return self._counter("changes")

    def results_version(self) -> int:
        """A count that grows whenever :meth:`results` changed: far less often than :meth:`version`."""
        return self._counter("results")

    def results(self) -> pd.DataFrame:
        """One row for each run id: its latest finished attempt. See :func:`app.runs.results.results_frame`."""
        with self.engine.connect() as connection:
            return results_frame(connection, self.home)

    def _counter(self, name: str) -> int:
        with self.engine.connect() as connection:
            query = select(tables.counters.c.value).where(tables.counters.c.name == name)
            return int(connection.execute(query).scalar_one())


def _run(row: Row[Any]) -> Run:
    values = row._mapping
    return Run(
        key=values["key"],
        run_id=values["run_id"],
        attempt=values["attempt"],
        label=values["label"],
        state=RunState(values["state"]),
        spec=RunSpec.model_validate_json(values["spec"]),
        created_at=datetime.fromtimestamp(values["created_at"], UTC),
        started_at=_moment(values["started_at"]),
        finished_at=_moment(values["finished_at"]),
        phase=values["phase"],
        done=values["done"],
        total=values["total"],
        unit=values["unit"],
        step=(values["step"], values["steps"]),
        remaining_s=values["remaining_s"],
        error=values["error"],
        artifact=paths.artifacts() / values["artifact"] if values["artifact"] is not None else None,
        artifact_bytes=values["artifact_bytes"] or 0,
        collapsed=values["collapsed"],
    )


def _moment(seconds: float | None) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds is not None else None
