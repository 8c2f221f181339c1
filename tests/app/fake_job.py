"""A job that loads no model, and a worker and a terminal that run it, for tests that need real processes.

``python -m tests.app.fake_job worker BEHAVIOUR`` serves device "auto" for a second after the last run;
``python -m tests.app.fake_job terminal BEHAVIOUR ARGUMENTS`` is ``python -m app ARGUMENTS``.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from app import cli
from app.runs import job, terminal, worker
from app.runs.checkpoints import BLOCKS_NOTE, checkpoint_folder
from app.runs.job import Execute
from app.runs.outcome import Outcome
from app.runs.spec import RunSpec
from pruning.errors import InputError, RunError
from pruning.progress import Progress
from tests.app.factories import make_outcome

BLOCKS = 400
STEPS = 4


def quick(spec: RunSpec, folder: Path, progress: Progress, siblings: Sequence[RunSpec] = ()) -> Outcome:
    """Writes a small artifact and reports every phase."""
    for phase, total, unit in (("loading", 1, "models"), ("compressing", 3, "blocks"), ("saving", 1, "variants")):
        for done in range(total + 1):
            progress(phase, done, total, unit)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(1000))
    progress("scoring", 8192, 8192, "tokens")
    progress("timing", 10, 10, "iterations")
    return replace(make_outcome(spec), phases={})


def slow(spec: RunSpec, folder: Path, progress: Progress, siblings: Sequence[RunSpec] = ()) -> Outcome:
    """Compresses for 20 seconds, reporting twenty times a second, with half an artifact on disk."""
    partial = folder.parent / f".{folder.name}.1-0.partial"
    partial.mkdir(parents=True)
    for done in range(BLOCKS):
        progress("compressing", done, BLOCKS, "blocks")
        time.sleep(0.05)
    return quick(spec, folder, progress)


def deaf(spec: RunSpec, folder: Path, progress: Progress, siblings: Sequence[RunSpec] = ()) -> Outcome:
    """Reports once, then computes for a minute without looking up, unless it is the dense model."""
    progress("compressing", 1, BLOCKS, "blocks")
    if spec.recipe.prune is not None:
        time.sleep(60)
    return quick(spec, folder, progress)


def failing(spec: RunSpec, folder: Path, progress: Progress, siblings: Sequence[RunSpec] = ()) -> Outcome:
    """Fails in another way for each method."""
    progress("loading", 0, 1, "models")
    method = spec.recipe.prune.method if spec.recipe.prune is not None else "none"
    if method == "magnitude":
        raise RunError("the weights are not finite: try --dtype float32")
    if method == "wanda":
        raise InputError("the text has 10 tokens, fewer than one window of 256: give a longer text")
    if method == "sparsegpt":
        raise ZeroDivisionError("division by zero")
    return quick(spec, folder, progress)


def stepping(spec: RunSpec, folder: Path, progress: Progress, siblings: Sequence[RunSpec] = ()) -> Outcome:
    """Makes four blocks and keeps each, a fifth of a second apart, those of siblings too; goes on where it was."""
    folders = {one.run_id: checkpoint_folder(one.run_id) for one in (spec, *siblings)}
    for place in folders.values():
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{BLOCKS_NOTE}.json").write_text(str(STEPS))
    for index in range(STEPS):
        blocks = [place / f"block-{index:05d}.safetensors" for place in folders.values()]
        missing = [block for block in blocks if not block.is_file()]
        progress("compressing", index, STEPS, "blocks")
        time.sleep(0.2 if missing else 0)
        for block in missing:
            block.write_bytes(b"made by " + str(os.getpid()).encode())
    with (folders[spec.run_id].parent.parent / "makers.txt").open("a") as makers:
        made_by = [block.read_text() for block in sorted(folders[spec.run_id].glob("block-*"))]
        makers.write(f"{spec.recipe}: {len(set(made_by))} processes\n")
    return quick(spec, folder, progress)


BEHAVIOURS: dict[str, Execute] = {"quick": quick, "slow": slow, "deaf": deaf, "failing": failing, "stepping": stepping}


def main() -> None:
    """See the module."""
    role, behaviour, *arguments = sys.argv[1:]
    execute = BEHAVIOURS[behaviour]
    job.PATIENCE_SECONDS = 1.0
    if role == "worker":
        worker.work("auto", execute=execute, resolve=lambda name: "cpu", idle=1.0)
        return
    terminal.real_execute = lambda: execute
    terminal.run_here.__kwdefaults__["resolve"] = lambda name: "cpu"
    sys.argv = ["app", *arguments]
    cli.main()


if __name__ == "__main__":
    main()
