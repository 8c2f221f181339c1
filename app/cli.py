"""The terminal: makes and measures one variant as the pages do, lists results, exports a variant."""

import json
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from app.runs.checkpoints import start_from_nothing, unfinished
from app.runs.plain import plainly
from app.runs.queue import mark_lost
from app.runs.report import summary, table
from app.runs.spec import BUNDLED_ARTICLES, CalibrationSpec, EvaluationSpec, RunSpec
from app.runs.store import RunState, Store
from app.runs.sweep import NOTHING
from app.runs.terminal import CANCELLED_EXIT, interruptible, run_here
from app.runs.terminal_request import asked_for
from app.runs.terminal_sweep import failures_of, sweep_here
from app.status import going_on
from pruning.allocation import ALLOCATIONS, UNIFORM
from pruning.errors import CancelledError, InputError, RunError
from pruning.export import DEFAULT, FORMATS, export_variant
from pruning.methods import METHODS
from pruning.quantize import SCHEMES
from pruning.recipe import MAXIMUM_SPARSITY

app = typer.Typer(
    help="How small and fast can this model get before it stops being good enough?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Statistics(StrEnum):
    """What can be asked for by name; without it the form of the command decides."""

    SEQUENTIAL = "sequential"
    SHARED = "shared"


def _named(which: list[str]) -> str:
    return ", ".join(which[:-1]) + " and " + which[-1] if len(which) > 1 else "".join(which)


_STRUCTURED = [name for name, method in METHODS.items() if method.kind != "weights"]
_SEEDED = [name for name, method in METHODS.items() if method.seeded]
_OF_BLOCKS = f"; with {_named(_STRUCTURED)} of all weights in the blocks" if _STRUCTURED else ""
_DRAWN = f", and what {_named(_SEEDED)} draws" if _SEEDED else ""
_ALLOCATIONS = "; ".join(f"{name}: {allocation.summary}" for name, allocation in ALLOCATIONS.items())

_SIZES = "; ".join(
    f"{_named([name for name, scheme in SCHEMES.items() if scheme.groups == groups])}: "
    f"{', '.join(map(str, sorted(groups)))}, usually {groups[0]}"
    for groups in dict.fromkeys(scheme.groups for scheme in SCHEMES.values() if scheme.groups)
)

Json = Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the record as JSON to this file.")]


def main() -> None:
    """Run the command line; 2 for a request that cannot be met, 1 for a failed run, 130 for a cancelled one."""
    try:
        app()
    except InputError as error:
        _fail(str(error), 2)
    except RunError as error:
        _fail(str(error), 1)
    except SQLAlchemyError as error:
        _fail(f"The database did not answer ({error.args[0] if error.args else error}): try once more.", 1)
    except CancelledError:
        _fail("Cancelled.", CANCELLED_EXIT)


@app.command()
def run(
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="bundled, a folder, a .gguf file, or a hub id[@revision].")
    ],
    method: Annotated[str, typer.Option(metavar="METHOD,…", help=f"{NOTHING}, {', '.join(METHODS)}.")],
    sparsity: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE,…",
            help=f"Share of weights to remove, 0 to {MAXIMUM_SPARSITY:g}{_OF_BLOCKS}.",
        ),
    ] = None,
    pattern: Annotated[
        str | None, typer.Option(metavar="N:M,…", help="Keep N of each M inputs: 2:4, 4:8; fixes the sparsity.")
    ] = None,
    quantize: Annotated[str, typer.Option(metavar="SCHEME,…", help=f"{NOTHING}, {', '.join(SCHEMES)}.")] = NOTHING,
    group_size: Annotated[
        str | None,
        typer.Option(
            metavar="N,…", help=f"How many weights share a scale: {_SIZES}. It must divide the layers' widths."
        ),
    ] = None,
    allocation: Annotated[
        str, typer.Option(metavar="ALLOCATION,…", help=f"How the sparsity is spread: {_ALLOCATIONS}.")
    ] = UNIFORM,
    statistics: Annotated[
        Statistics | None,
        typer.Option(
            help="What methods that look at text know of it: sequential follows the model as it is pruned (a single "
            "run's default), shared is the dense model's, one pass for all variants of a sweep. A sweep shares "
            "where that was measured to cost nothing.",
            show_default=False,
        ),
    ] = None,
    windows: Annotated[int, typer.Option(help="Windows of text to calibrate on.")] = 8,
    window_length: Annotated[int, typer.Option(help="Tokens in each calibration window.")] = 256,
    calibration: Annotated[
        str, typer.Option(metavar="FILE|NAME", help=f"{BUNDLED_ARTICLES}, a text file, or a dataset.")
    ] = BUNDLED_ARTICLES,
    eval_text: Annotated[
        str, typer.Option(metavar="FILE|NAME", help=f"{BUNDLED_ARTICLES}, a text file, or a dataset.")
    ] = BUNDLED_ARTICLES,
    eval_windows: Annotated[int, typer.Option(help="Windows of text to measure on.")] = 16,
    eval_length: Annotated[int, typer.Option(help="Tokens in each of them.")] = 512,
    seed: Annotated[int, typer.Option(help=f"Where the calibration windows are taken{_DRAWN}.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    again: Annotated[bool, typer.Option("--again", help="Make it anew although it is finished.")] = False,
    json_file: Json = None,
) -> None:
    """Make a variant of a model and measure it; several, where an option lists several values with commas."""
    try:
        texts = {
            "calibration": CalibrationSpec(source=calibration, windows=windows, length=window_length, seed=seed),
            "evaluation": EvaluationSpec(source=eval_text, windows=eval_windows, length=eval_length),
        }
    except ValidationError as error:
        raise plainly(error) from error
    asked = asked_for(
        method=method,
        sparsity=sparsity,
        pattern=pattern,
        quantize=quantize,
        group_size=group_size,
        allocation=allocation,
        statistics=statistics.value if statistics is not None else None,
        model=model,
        device=device.strip().lower(),
        dtype=dtype.strip().lower(),
        **texts,
    )
    _check_writable(json_file)
    store = Store()
    mark_lost(store)
    for spec in asked.specs if again else ():
        start_from_nothing(store, spec.run_id)
    if asked.left_out:
        typer.echo(f"Left out, as there is no such combination: {', '.join(asked.left_out)}.", err=True)
    if asked.sweep:
        _sweep(store, asked.specs, again, json_file)
    else:
        _run(store, asked.specs[0], again, json_file)


def _run(store: Store, spec: RunSpec, again: bool, json_file: Path | None) -> None:
    with interruptible() as cancel:
        ended = run_here(store, spec, cancel, again=again)
    record = store.record(ended.run.key)
    _write(json_file, record)
    if ended.stuck:
        os._exit(CANCELLED_EXIT)
    if ended.run.state is RunState.CANCELLED:
        left = unfinished(spec.run_id)
        _fail(f"Cancelled. {going_on(left)}" if left is not None else "Cancelled.", CANCELLED_EXIT)
    if ended.run.state is not RunState.DONE:
        _fail(ended.run.error or f"The run is {ended.run.state}.", 2 if ended.refused else 1)
    typer.echo(summary(record))


def _sweep(store: Store, specs: Sequence[RunSpec], again: bool, json_file: Path | None) -> None:
    with interruptible() as cancel:
        swept = sweep_here(store, specs, cancel, again=again)
    records = [store.record(run.key) for run in swept.runs]
    _write(json_file, records)
    if records:
        typer.echo(table(records))
    if swept.stuck:
        sys.stdout.flush()
        os._exit(CANCELLED_EXIT)
    if swept.cancelled:
        left = unfinished(swept.runs[-1].run_id) if swept.runs else None
        _fail(f"Cancelled. {going_on(left)}" if left is not None else "Cancelled.", CANCELLED_EXIT)
    if swept.failed:
        _fail(failures_of(swept, len(specs)), 1)


@app.command()
def results(json_file: Json = None) -> None:
    """List all runs."""
    store = Store()
    mark_lost(store)
    records = [store.record(one.key) for one in store.runs()]
    if json_file is not None:
        _check_writable(json_file)
        _write(json_file, records)
    typer.echo(table(records) if records else "No runs yet: python -m app run --help tells how to make one.")


@app.command()
def export(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run's id, or the beginning of it.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new or empty folder.")],
    form: Annotated[
        str, typer.Option("--format", help="; ".join(f"{name}: {form.summary}" for name, form in FORMATS.items()) + ".")
    ] = DEFAULT,
) -> None:
    """Write a variant in a format that other programs read."""
    store = Store()
    found = store.matching(run_id)
    if found.artifact is None or not found.artifact.is_dir():
        reason = "its files were removed" if found.state is RunState.DONE else f"it is {found.state}"
        raise InputError(f"Run {found.run_id} ({found.label}) has no files to export, as {reason}: run it again.")

    export_variant(found.artifact, folder, form, store.record(found.key))
    typer.echo(f"{found.label} is in {folder}")


@app.command(hidden=True)
def worker(device: Annotated[str, typer.Option()] = "auto") -> None:
    """Serve the runs that were asked for in the pages."""
    from app.runs.worker import work

    work(device)


def _check_writable(file: Path | None) -> None:
    """Raise InputError now rather than after an hour's work."""
    if file is None:
        return
    if file.is_dir():
        raise InputError(f"{file} is a folder: name a file for --json")
    try:
        existed = file.exists()
        with file.open("a"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise InputError(f"{file} cannot be written ({error.strerror}): name another file for --json") from error


def _write(file: Path | None, content: Any) -> None:
    if file is not None:
        file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _fail(message: str, code: int) -> None:
    typer.echo(message, err=True)
    raise SystemExit(code)
