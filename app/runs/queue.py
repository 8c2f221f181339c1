"""What a person does with runs: ask for some, watch, cancel, ask again, remove what they left."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app import paths
from app.runs import transitions
from app.runs.checkpoints import bytes_of_checkpoints, discard_if_empty, start_from_nothing
from app.runs.processes import is_gone, start_worker
from app.runs.spec import RunSpec
from app.runs.store import ENDED, WORKING, Run, RunState, Store
from pruning.errors import InputError

RECENT = 30
LOST_MESSAGE = "The process that worked on this run is gone (killed, or out of memory): start the run again."


@dataclass(frozen=True)
class Submitted:
    """A run that was asked for; ``reused`` when it was finished or on its way before."""

    run: Run
    reused: bool


@dataclass(frozen=True)
class DiskUse:
    """Bytes on disk: of the variants by run id, of unfinished ones by run id, of converted models, and what is free."""

    variants: dict[str, int]
    checkpoints: dict[str, int]
    model_cache: int
    free: int

    @property
    def total(self) -> int:
        """Bytes that Poda's files take."""
        return sum(self.variants.values()) + sum(self.checkpoints.values()) + self.model_cache


def submit(store: Store, specs: Sequence[RunSpec]) -> list[Submitted]:
    """Ask for runs, in this order, each model's dense run first where it is neither finished nor on its way.

    One entry for each run asked for, and one for each dense run that was added. Starts no worker:
    see :func:`ensure_workers`.
    """
    wanted = {spec.run_id: spec for spec in specs}
    ordered: dict[str, RunSpec] = {}
    for run_id, spec in wanted.items():
        dense = spec.dense()
        ordered.setdefault(dense.run_id, dense)
        ordered.setdefault(run_id, spec)
    submitted = [Submitted(*transitions.add(store, spec)) for spec in ordered.values()]
    return [one for one in submitted if one.run.run_id in wanted or not one.reused]


def again(store: Store, key: int) -> Run:
    """Another attempt at a run, under the same id; the one that waits or runs already where there is one.

    A run that was stopped goes on where it was, a finished one starts from nothing.
    """
    spec = store.run(key).spec
    start_from_nothing(store, spec.run_id)
    run, _ = transitions.add(store, spec, anew=True)
    return run


def cancel(store: Store, key: int) -> RunState:
    """A waiting run is cancelled at once, a running one within seconds; returns the state after asking."""
    return transitions.ask_to_cancel(store, key)


def ensure_workers(store: Store) -> None:
    """Mark runs of dead workers lost, and start a worker for each device that runs wait for. Cheap; call it often."""
    mark_lost(store)
    for device in transitions.waiting_devices(store):
        start_worker(device)


def mark_lost(store: Store) -> list[int]:
    """Runs whose worker is gone become lost, or cancelled where that was asked; returns their keys."""
    lost = []
    for held in transitions.held(store):
        if not is_gone(held.holder, held.heartbeat):
            continue
        run = store.run(held.key)
        cancelled = run.state is RunState.CANCELLING
        state = RunState.CANCELLED if cancelled else RunState.LOST
        if transitions.end(store, held.key, state, None if cancelled else LOST_MESSAGE):
            discard_partial(run)
            discard_if_empty(run.run_id)
            lost.append(held.key)
    return lost


def queue_view(store: Store) -> list[Run]:
    """What is worked on, then what waits in the order it will be made, then what ended, the most recent first."""
    working = store.runs(WORKING)
    waiting = store.runs([RunState.QUEUED])
    ended = store.runs(ENDED, limit=RECENT)
    ended.sort(key=lambda run: run.finished_at or run.created_at, reverse=True)
    return [*reversed(working), *reversed(waiting), *ended]


def remove_artifact(store: Store, run_id: str) -> int:
    """Remove the files of a variant; its figures stay. Returns the bytes freed.

    Raises InputError when there is no such run.
    """
    attempts = store.attempts(run_id)
    if not attempts:
        raise InputError(f"There is no run {run_id}.")
    freed = 0
    for run in attempts:
        if run.artifact is not None:
            freed += folder_bytes(run.artifact)
            transitions.forget_artifact(store, run.key)
            shutil.rmtree(run.artifact, ignore_errors=True)
    return freed


def disk_use(store: Store) -> DiskUse:
    """What Poda's files take on disk. Variants as they were recorded, so that this stays cheap with a thousand."""
    return DiskUse(
        variants=store.artifact_bytes(),
        checkpoints=bytes_of_checkpoints(),
        model_cache=folder_bytes(paths.model_cache()),
        free=shutil.disk_usage(paths.home()).free,
    )


def artifact_folder(run: Run) -> Path:
    """Where the variant of this attempt is kept."""
    name = run.run_id if run.attempt == 1 else f"{run.run_id}-{run.attempt}"
    return paths.artifacts() / name


def discard_partial(run: Run) -> None:
    """Remove what an attempt that came to nothing left in the artifacts folder."""
    folder = artifact_folder(run)
    for leftover in (folder, *folder.parent.glob(f".{folder.name}.*")):
        shutil.rmtree(leftover, ignore_errors=True)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below ``folder``; 0 when there is none."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
