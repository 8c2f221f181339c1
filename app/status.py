"""A run in words: its state, how far it is, and what became of it."""

from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from app.runs.checkpoints import Unfinished
from app.runs.store import Run, RunState
from app.wording import duration, figures, shortened, size
from pruning.sources import BUNDLED

_PHASES = {
    "downloading": "Downloading the model",
    "converting": "Unpacking the model, once",
    "loading": "Loading the model",
    "compressing": "Compressing",
    "saving": "Saving",
    "scoring": "Reading test text",
    "timing": "Timing",
}


@dataclass(frozen=True)
class StateLook:
    """How a state is written and badged; ``again`` when a person may want another attempt."""

    title: str
    icon: str
    colour: Literal["gray", "green", "orange", "red"]
    again: bool = False


LOOKS = {
    RunState.QUEUED: StateLook("waiting", ":material/schedule:", "gray"),
    RunState.RUNNING: StateLook("running", ":material/play_arrow:", "green"),
    RunState.CANCELLING: StateLook("stopping", ":material/stop_circle:", "orange"),
    RunState.CANCELLED: StateLook("cancelled", ":material/block:", "gray", again=True),
    RunState.FAILED: StateLook("failed", ":material/error:", "red", again=True),
    RunState.DONE: StateLook("done", ":material/check:", "green"),
    RunState.LOST: StateLook("lost", ":material/link_off:", "red", again=True),
}


def share_done(run: Run) -> float:
    """From 0 to 1 over all phases, each counted alike; never goes back."""
    place, phases = run.step
    if run.state is RunState.QUEUED or phases <= 0:
        return 0.0
    inside = run.done / run.total if run.total > 0 else 0.0
    return min(1.0, max(0.0, (place - 1 + min(inside, 1.0)) / phases))


def progress_words(run: Run) -> str:
    """The phase in plain words, how far it is, and the time left: "Compressing, block 12 of 30, about 42 s left"."""
    if run.state is RunState.QUEUED:
        return "Waiting for its turn"
    if run.state is RunState.CANCELLING:
        return "Stopping at the next step"
    if run.phase is None:
        return "Starting"
    parts = [_PHASES.get(run.phase, run.phase.capitalize())]
    if run.total > 1:
        if run.unit == "blocks":
            parts.append(f"block {min(run.done + 1, run.total)} of {run.total}")
        elif run.unit == "bytes":
            parts.append(f"{size(run.done)} of {size(run.total)}")
        elif run.unit == "weights":
            parts.append(f"{run.done / 1e6:,.0f} of {run.total / 1e6:,.0f} million weights")
        else:
            parts.append(f"{run.done:,} of {run.total:,} {run.unit}")
    if run.remaining_s is not None:
        parts.append(f"about {duration(run.remaining_s)} left")
    return ", ".join(parts)


def outcome_words(run: Run, results: pd.DataFrame, left: Unfinished | None = None) -> str:
    """What became of a run that ended: its figures, or why there are none and what to do.

    ``left`` is what an attempt that was stopped left to go on from.
    """
    if run.state is RunState.DONE:
        found = results[results["key"] == run.key]
        return _figures(found.iloc[0]) if not found.empty else "Measured again since"
    if run.state is RunState.LOST:
        killed = "The worker was killed before this was finished."
        return f"{killed} {going_on(left)}" if left is not None else f"{killed} Nothing else was lost: run it again."
    if run.state is RunState.CANCELLED:
        stopped = "Stopped before it was finished, as asked."
        return f"{stopped} {going_on(left)}" if left is not None else stopped
    return run.error or "It stopped without saying why. The log of the worker may tell."


def going_on(left: Unfinished) -> str:
    """Where another attempt goes on: "Start again: it goes on at block 13 of 30." """
    if left.total and left.done >= left.total:
        return f"Start again: all {left.total} blocks are made, and it goes on with saving."
    if not left.done:
        return "Start again: it goes on with what was found out so far."
    return f"Start again: it goes on at block {left.done + 1}{f' of {left.total}' if left.total else ''}."


def _figures(row: "pd.Series[Any]") -> str:
    perplexity, stored = row.get("perplexity"), row.get("size_on_disk")
    parts = []
    if row["collapsed"]:
        parts.append("collapsed: it no longer predicts text")
    elif pd.notna(perplexity):
        parts.append(f"perplexity {figures(perplexity)}")
    if pd.notna(stored):
        parts.append(f"{size(stored)} on disk")
    return ", ".join(parts)


def names(runs: list[Run]) -> dict[int, str]:
    """What to call each run, by key: its recipe, with the model where there are several among them."""
    several = len({run.spec.model for run in runs}) > 1
    return {run.key: f"{run.label}, {_model(run)}" if several else run.label for run in runs}


def _model(run: Run) -> str:
    if run.spec.model == BUNDLED:
        return "the bundled model"
    # The end of a path or of a hub id is what tells models apart.
    return shortened(run.spec.model.replace("\\", "/").rstrip("/").rpartition("/")[2], 32)


def latest_attempts(runs: list[Run]) -> list[Run]:
    """Without the ended attempts that a later attempt of the same run has replaced; the order stays."""
    newest: dict[str, int] = {}
    for run in runs:
        newest[run.run_id] = max(run.attempt, newest.get(run.run_id, 0))
    return [run for run in runs if run.attempt == newest[run.run_id]]
