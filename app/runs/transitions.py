"""Every change of a run's state, each one guarded so that two processes cannot both make it."""

import json
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from app.runs import tables
from app.runs.history import work_of
from app.runs.outcome import Outcome, flat_row
from app.runs.spec import RunSpec
from app.runs.store import ACTIVE, WORKING, Run, RunState, Store

JOINED = (RunState.QUEUED, RunState.RUNNING)


@dataclass(frozen=True)
class Holder:
    """The process that works on a run: ``started`` (seconds since the epoch) tells it from a later one of its pid."""

    host: str
    pid: int
    started: float


@dataclass(frozen=True)
class Position:
    """How far a run is; see :class:`app.runs.store.Run`."""

    phase: str
    done: int
    total: int
    unit: str
    step: int
    steps: int
    remaining_s: float | None


@dataclass(frozen=True)
class Held:
    """A run in the hands of a process, which last gave a sign of life at ``heartbeat`` (seconds since the epoch)."""

    key: int
    holder: Holder
    heartbeat: float


def add(store: Store, spec: RunSpec, holder: Holder | None = None, *, anew: bool = False) -> tuple[Run, bool]:
    """Write down a run to be made, unless it is there already.

    Returns the run and whether it was there: finished (not with ``anew``), waiting or being worked on. With
    ``holder`` a new run is not queued but begins in the hands of that process. Two callers at the same moment
    get the same run.
    """
    known = JOINED if anew else (*JOINED, RunState.DONE)
    while True:
        existing = store.find(spec.run_id, known)
        if existing is not None:
            return existing, True
        try:
            with store.writer.begin() as connection:
                key = _insert(connection, store, spec, holder, known)
        except IntegrityError:
            continue  # somebody added the same attempt between the look and the insert
        if key is not None:
            return store.run(key), False


def claim(store: Store, device: str, holder: Holder) -> Run | None:
    """Take the run that has waited longest for ``device`` on this machine; None when none waits."""
    runs = tables.runs
    waiting = (
        select(runs.c.key)
        .where(runs.c.state == "queued", runs.c.device == device, runs.c.home == store.home)
        .order_by(runs.c.key)
        .limit(1)
    )
    while True:
        with store.engine.connect() as connection:
            key = connection.execute(waiting).scalar_one_or_none()
        if key is None:
            return None
        if take(store, key, holder):
            return store.run(key)


def take(store: Store, key: int, holder: Holder) -> bool:
    """Take one waiting run; False when somebody else was first."""
    values = {"state": "running", "started_at": time.time(), **_held_by(holder)}
    return _change(store, key, values, only_from=(RunState.QUEUED,))


def beat(store: Store, key: int, position: Position | None) -> RunState:
    """Say that the run is being worked on and, where given, how far it is; returns its state."""
    values: dict[str, Any] = {"heartbeat": time.time()}
    if position is not None:
        values |= vars(position)
    _change(store, key, values, only_from=WORKING, shown=position is not None)
    with store.engine.connect() as connection:
        state = connection.execute(select(tables.runs.c.state).where(tables.runs.c.key == key)).scalar_one()
    return RunState(state)


def ask_to_cancel(store: Store, key: int) -> RunState:
    """A waiting run is cancelled, a running one is asked to stop; others stay as they are."""
    cancelled = {"state": "cancelled", "finished_at": time.time()}
    if not _change(store, key, cancelled, only_from=(RunState.QUEUED,)):
        _change(store, key, {"state": "cancelling"}, only_from=(RunState.RUNNING,))
    return store.run(key).state


def end(store: Store, key: int, state: RunState, error: str | None = None) -> bool:
    """The run ended without a result; False when it had ended already."""
    values = {"state": str(state), "finished_at": time.time(), "error": error, "remaining_s": None}
    return _change(store, key, values, only_from=ACTIVE)


def finish(store: Store, key: int, outcome: Outcome, artifact: Path) -> bool:
    """Record what came of a run; False when it was cancelled or given up in the meantime."""
    spec = store.run(key).spec
    values = {
        "state": "done",
        "finished_at": time.time(),
        "collapsed": outcome.collapsed,
        "artifact": artifact.name,
        "artifact_bytes": outcome.artifact_bytes,
        "remaining_s": None,
    }
    record = outcome.record()
    figures = [{"run_key": key, "name": name, **_flat(figure)} for name, figure in record["figures"].items()]
    phases = [
        {"run_key": key, "phase": phase, "work": work_of(phase, spec), "seconds": time_.seconds, "total": time_.total}
        for phase, time_ in outcome.phases.items()
    ]
    with store.writer.begin() as connection:
        runs = tables.runs
        done = connection.execute(update(runs).where(runs.c.key == key, runs.c.state == "running").values(**values))
        if done.rowcount != 1:
            return False
        connection.execute(insert(tables.results).values(run_key=key, **flat_row(spec, outcome)))
        connection.execute(insert(tables.records).values(run_key=key, record=json.dumps(record)))
        if figures:
            connection.execute(insert(tables.figures), figures)
        if phases:
            connection.execute(insert(tables.phases), phases)
        tables.bump(connection, "changes", "results")
    return True


def forget_artifact(store: Store, key: int) -> None:
    """The files of this run are gone; its figures stay."""
    with store.writer.begin() as connection:
        runs = tables.runs
        connection.execute(update(runs).where(runs.c.key == key).values(artifact=None, artifact_bytes=None))
        tables.bump(connection, "changes", "results")


def held(store: Store) -> list[Held]:
    """Runs that some process works on, or worked on when it died."""
    runs = tables.runs
    query = select(runs.c.key, runs.c.worker_host, runs.c.worker_pid, runs.c.worker_started, runs.c.heartbeat).where(
        runs.c.state.in_([str(state) for state in WORKING])
    )
    with store.engine.connect() as connection:
        rows = connection.execute(query).all()
    return [Held(key, Holder(host, pid, started), heartbeat) for key, host, pid, started, heartbeat in rows]


def waiting(store: Store, device: str) -> list[RunSpec]:
    """What runs of this machine that wait for ``device`` were asked for, in the order they will be made."""
    runs = tables.runs
    query = (
        select(runs.c.spec)
        .where(runs.c.state == "queued", runs.c.device == device, runs.c.home == store.home)
        .order_by(runs.c.key)
    )
    with store.engine.connect() as connection:
        return [RunSpec.model_validate_json(spec) for spec in connection.execute(query).scalars()]


def waiting_devices(store: Store) -> list[str]:
    """Devices, as asked for, that runs of this machine wait for."""
    runs = tables.runs
    query = select(runs.c.device).where(runs.c.state == "queued", runs.c.home == store.home).distinct()
    with store.engine.connect() as connection:
        return list(connection.execute(query).scalars())


def _insert(
    connection: Connection, store: Store, spec: RunSpec, holder: Holder | None, known: Collection[RunState]
) -> int | None:
    runs = tables.runs
    same = runs.c.run_id == spec.run_id
    there = select(runs.c.key).where(same, runs.c.state.in_([str(state) for state in known]))
    if connection.execute(there).first() is not None:
        return None
    latest = connection.execute(select(func.max(runs.c.attempt)).where(same)).scalar_one() or 0
    now = time.time()
    begun = {"started_at": now, **_held_by(holder)} if holder is not None else {}
    inserted = connection.execute(
        insert(runs).values(
            run_id=spec.run_id,
            attempt=latest + 1,
            label=str(spec.recipe),
            state="running" if holder is not None else "queued",
            spec=spec.model_dump_json(),
            home=store.home,
            device=spec.device,
            created_at=now,
            **begun,
        )
    )
    tables.bump(connection, "changes")
    key = inserted.inserted_primary_key
    assert key is not None
    return int(key[0])


def _change(
    store: Store, key: int, values: dict[str, Any], *, only_from: Collection[RunState], shown: bool = True
) -> bool:
    runs = tables.runs
    states = [str(state) for state in only_from]
    with store.writer.begin() as connection:
        changed = connection.execute(update(runs).where(runs.c.key == key, runs.c.state.in_(states)).values(**values))
        if changed.rowcount == 1 and shown:
            tables.bump(connection, "changes")
    return changed.rowcount == 1


def _held_by(holder: Holder) -> dict[str, Any]:
    return {
        "worker_host": holder.host,
        "worker_pid": holder.pid,
        "worker_started": holder.started,
        "heartbeat": time.time(),
    }


def _flat(figure: dict[str, Any]) -> dict[str, Any]:
    return {name: figure.get(name) for name in ("value", "unit", "low", "high", "p50", "p95")}
