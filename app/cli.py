"""The terminal: makes and measures one variant as the pages do, lists results, exports a variant."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from app.runs.plain import plainly
from app.runs.queue import mark_lost
from app.runs.report import summary, table
from app.runs.spec import BUNDLED_ARTICLES, CalibrationSpec, EvaluationSpec, RunSpec
from app.runs.store import RunState, Store
from app.runs.sweep import NOTHING, identified
from app.runs.terminal import CANCELLED_EXIT, interruptible, run_here
from pruning.errors import CancelledError, InputError, RunError
from pruning.methods import METHODS
from pruning.quantize import SCHEMES
from pruning.recipe import Pattern, PruneStep, QuantizeStep, Recipe

app = typer.Typer(
    help="How small and fast can this model get before it stops being good enough?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
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
    method: Annotated[str, typer.Option(help=f"{NOTHING}, {', '.join(METHODS)}.")],
    sparsity: Annotated[float | None, typer.Option(help="Share of weights to remove, 0 to 0.95.")] = None,
    pattern: Annotated[str | None, typer.Option(metavar="N:M", help="Keep N of each M inputs: 2:4, 4:8.")] = None,
    quantize: Annotated[str, typer.Option(help=f"{NOTHING}, {', '.join(SCHEMES)}.")] = NOTHING,
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
    seed: Annotated[int, typer.Option(help="Where the calibration windows are taken.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    again: Annotated[bool, typer.Option("--again", help="Make it anew although it is finished.")] = False,
    json_file: Json = None,
) -> None:
    """Make one variant of a model and measure it."""
    try:
        asked = {
            "model": model,
            "recipe": _recipe(method, sparsity, pattern, quantize),
            "calibration": CalibrationSpec(source=calibration, windows=windows, length=window_length, seed=seed),
            "evaluation": EvaluationSpec(source=eval_text, windows=eval_windows, length=eval_length),
            "device": device.strip().lower(),
            "dtype": dtype.strip().lower(),
        }
        spec = RunSpec.model_validate(asked)
    except ValidationError as error:
        raise plainly(error) from error
    except ValueError as error:
        raise InputError(str(error)) from error
    _check_writable(json_file)
    spec = identified(spec)
    store = Store()
    mark_lost(store)
    with interruptible() as cancel:
        ended = run_here(store, spec, cancel, again=again)
    record = store.record(ended.run.key)
    _write(json_file, record)
    if ended.stuck:
        os._exit(CANCELLED_EXIT)
    if ended.run.state is RunState.CANCELLED:
        _fail("Cancelled.", CANCELLED_EXIT)
    if ended.run.state is not RunState.DONE:
        _fail(ended.run.error or f"The run is {ended.run.state}.", 2 if ended.refused else 1)
    typer.echo(summary(record))


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
) -> None:
    """Write a variant as a plain transformers folder."""
    store = Store()
    found = store.matching(run_id)
    if found.artifact is None or not found.artifact.is_dir():
        reason = "its files were removed" if found.state is RunState.DONE else f"it is {found.state}"
        raise InputError(f"Run {found.run_id} ({found.label}) has no files to export, as {reason}: run it again.")

    from pruning.artifact import export_transformers

    export_transformers(found.artifact, folder)
    typer.echo(f"{found.label} is in {folder}")


@app.command(hidden=True)
def worker(device: Annotated[str, typer.Option()] = "auto") -> None:
    """Serve the runs that were asked for in the pages."""
    from app.runs.worker import work

    work(device)


def _recipe(method: str, sparsity: float | None, pattern: str | None, quantize: str) -> Recipe:
    scheme = QuantizeStep(scheme=quantize) if quantize != NOTHING else None
    if method == NOTHING:
        if pattern is not None or sparsity not in (None, 0):
            raise InputError("method none removes nothing: leave out --sparsity and --pattern, or choose a method")
        return Recipe(quantize=scheme)
    parsed = Pattern.parse(pattern) if pattern is not None else None
    if sparsity is None:
        if parsed is None:
            raise InputError(f"say how much {method} should remove: --sparsity 0.5, or --pattern 2:4")
        sparsity = parsed.sparsity
    return Recipe(prune=PruneStep(method=method, sparsity=sparsity, pattern=parsed), quantize=scheme)


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
