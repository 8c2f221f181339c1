"""Several runs in the foreground of a terminal, one after the other, the failed ones left behind."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import typer

from app.runs.siblings import siblings_of
from app.runs.spec import RunSpec
from app.runs.store import Run, RunState, Store
from app.runs.terminal import run_here
from app.wording import counted
from pruning.errors import CancelledError, RunError


@dataclass
class Swept:
    """How far a sweep came: its runs in order, and whether it was cancelled or is ``stuck`` as a run can be."""

    runs: list[Run] = field(default_factory=list)
    cancelled: bool = False
    stuck: bool = False

    @property
    def failed(self) -> list[Run]:
        """Those that came to nothing by themselves."""
        return [run for run in self.runs if run.state not in (RunState.DONE, RunState.CANCELLED)]


def sweep_here(store: Store, specs: Sequence[RunSpec], cancel: threading.Event, *, again: bool = False) -> Swept:
    """Make and measure ``specs`` in order in this process, saying which of how many, until all are or one is cancelled.

    A failed run does not stop the others. Raises InputError for a device that is not here.
    """
    swept = Swept()
    for place, spec in enumerate(specs):
        typer.echo(f"Run {place + 1} of {len(specs)}: {spec.recipe}", err=True)
        rest = [other for other in specs[place + 1 :] if again or store.find(other.run_id, [RunState.DONE]) is None]
        try:
            ended = run_here(store, spec, cancel, again=again, siblings=siblings_of(spec, rest))
        except CancelledError:
            swept.cancelled = True
            return swept
        except RunError as error:
            typer.echo(str(error), err=True)
            found = store.find(spec.run_id)
            swept.runs += [found] if found is not None else []
            continue
        swept.runs.append(ended.run)
        if ended.stuck or ended.run.state is RunState.CANCELLED:
            swept.cancelled, swept.stuck = True, ended.stuck
            return swept
        if ended.run.state is not RunState.DONE:
            typer.echo(ended.run.error or f"The run is {ended.run.state}.", err=True)
    return swept


def failures_of(swept: Swept, asked: int) -> str:
    """How many of the ``asked`` runs failed, and which."""
    names = ", ".join(run.label for run in swept.failed)
    return f"{len(swept.failed)} of {counted(asked, 'run')} failed: {names}."
