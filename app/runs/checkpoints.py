"""What is left of runs that were stopped: finished blocks, from which another attempt goes on. No torch."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from app import paths
from app.runs.store import ACTIVE, WORKING, RunState, Store

BLOCKS_NOTE = "blocks"
"""The note in a checkpoint that says how many blocks the model has."""


# What a checkpoint has before any work is done.
_FROM_THE_START = {"key", f"{BLOCKS_NOTE}.json"}


@dataclass(frozen=True)
class Unfinished:
    """A variant of which ``done`` of ``total`` blocks are made; ``total`` is 0 where it is not known.

    None may be made where something else was found out that need not be again, such as which blocks go.
    """

    done: int
    total: int


def checkpoint_folder(run_id: str) -> Path:
    """Where the finished blocks of a run are kept until it is done."""
    return paths.checkpoints() / run_id


def unfinished(run_id: str) -> Unfinished | None:
    """How far a run is that was stopped; None where nothing of its work is left."""
    folder = checkpoint_folder(run_id)
    try:
        names = {file.name for file in folder.iterdir()}
    except FileNotFoundError:  # or it went away a moment ago, as its run is done
        names = set()
    if not names - _FROM_THE_START:
        return None
    done = sum(name.startswith("block-") and name.endswith(".safetensors") for name in names)
    try:
        total = int(json.loads((folder / f"{BLOCKS_NOTE}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        total = 0
    return Unfinished(min(done, total) if total else done, total)


def discard(run_id: str) -> None:
    """Remove what is left of a run."""
    shutil.rmtree(checkpoint_folder(run_id), ignore_errors=True)


def discard_if_empty(run_id: str) -> None:
    """Remove the checkpoint of a run that did not get as far as any work worth keeping."""
    if unfinished(run_id) is None:
        discard(run_id)


def start_from_nothing(store: Store, run_id: str) -> None:
    """Before a finished run is made anew on purpose: nothing that may be left of it counts. Others go on."""
    latest = store.find(run_id)
    if latest is not None and latest.state is RunState.DONE:
        discard(run_id)


def bytes_of_checkpoints() -> dict[str, int]:
    """Bytes on disk of the work that is left, by run id."""
    return {folder.name: _bytes(folder) for folder in _folders() if unfinished(folder.name) is not None}


def removable(store: Store) -> dict[str, int]:
    """Bytes of what is left of runs that nobody works on or waits for, by run id.

    A run that is made with shared statistics writes blocks of others, which may not have been asked for one by one:
    what has changed since the work under way began stays.
    """
    began = [run.started_at.timestamp() for run in store.runs(WORKING) if run.started_at is not None]
    wanted = {run.run_id for run in store.runs(ACTIVE)}
    return {
        folder.name: _bytes(folder)
        for folder in _folders()
        if folder.name not in wanted and not (began and _changed(folder) >= min(began))
    }


def remove_unfinished(store: Store) -> int:
    """Remove what :func:`removable` lists; returns the bytes freed."""
    found = removable(store)
    for run_id in found:
        discard(run_id)
    store.touch()
    return sum(found.values())


def _folders() -> list[Path]:
    folder = paths.checkpoints()
    return sorted(entry for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


def _changed(folder: Path) -> float:
    """When a folder was changed, in seconds since 1970; infinity for one that went away a moment ago."""
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _bytes(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:
            continue  # a block that was written a moment ago has its last name now
    return total
