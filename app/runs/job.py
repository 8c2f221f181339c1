"""One run from the moment it is taken until its end is recorded, for the worker and the terminal alike."""

import errno
import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from sqlalchemy.exc import SQLAlchemyError

from app.runs import transitions
from app.runs.checkpoints import discard, discard_if_empty
from app.runs.combinations import is_structured
from app.runs.history import expected_seconds
from app.runs.outcome import Outcome
from app.runs.progress import Tracker
from app.runs.queue import artifact_folder, discard_partial
from app.runs.siblings import shares_statistics
from app.runs.spec import RunSpec
from app.runs.store import Run, RunState, Store
from app.runs.transitions import Position
from pruning.errors import CancelledError, InputError, RunError
from pruning.progress import Progress

BEAT_SECONDS = 0.4
PATIENCE_SECONDS = 8.0

log = logging.getLogger("poda")


class Execute(Protocol):
    """Makes the variant of a spec in ``folder`` and measures it; :func:`app.runs.execute.execute`.

    ``siblings`` will be made after it from the same statistics: their blocks may be made on the way.
    """

    def __call__(self, spec: RunSpec, folder: Path, progress: Progress, siblings: Sequence[RunSpec]) -> Outcome: ...


@dataclass(frozen=True)
class Performed:
    """A run whose end is recorded; ``refused`` when it turned out that what was asked cannot be done."""

    run: Run
    refused: bool = False


class Watch(threading.Thread):
    """Says twice a second that a run is being worked on and how far it is, and looks whether it should stop.

    ``give_up`` is called, once, when the work has not stopped within ``patience`` seconds of being told to, as in a
    long native call; it records the end and ends the process.
    """

    def __init__(
        self, store: Store, key: int, tracker: Tracker, cancel: threading.Event, give_up: Callable[[], None]
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self.patience = PATIENCE_SECONDS
        self._store, self._key, self._tracker = store, key, tracker
        self._cancel, self._give_up = cancel, give_up
        self._over = threading.Event()

    def run(self) -> None:
        """Beat until :meth:`stop`."""
        shown: Position | None = None
        told: float | None = None
        while not self._over.wait(BEAT_SECONDS):
            position = self._tracker.position()
            try:
                state = transitions.beat(self._store, self._key, position if position != shown else None)
                shown = position
                # A result that is recorded is no cancel: the event may be that of several runs, one after the other.
                if state not in (RunState.RUNNING, RunState.DONE):
                    self._cancel.set()
            except SQLAlchemyError:
                log.warning("the database did not answer a sign of life", exc_info=True)
            if self._cancel.is_set():
                told = told if told is not None else time.monotonic()
                if time.monotonic() - told > self.patience and not self._over.is_set():
                    self._give_up()
                    return

    def stop(self) -> None:
        """The work is over."""
        self._over.set()
        self.join()


def perform(
    store: Store,
    run: Run,
    execute: Execute,
    *,
    siblings: Sequence[RunSpec] = (),
    details: str,
    give_up: Callable[[], None],
    cancel: threading.Event | None = None,
    watcher: Callable[[Tracker], None] | None = None,
) -> Performed:
    """Execute a run that this process has taken, and record its end, whatever it is.

    ``siblings`` are waiting or asked for beside it and share its statistics. ``details`` is the log that a failure's
    message points to; ``watcher`` is given the tracker before work begins. What was finished of a run that comes to
    nothing is kept, for the next attempt to go on from.
    """
    cancel = cancel or threading.Event()
    tracker = Tracker(expected_seconds(store, run.spec), cancel)
    if watcher is not None:
        watcher(tracker)
    watch = Watch(store, run.key, tracker, cancel, give_up)
    watch.start()
    refused = False
    try:
        outcome = execute(run.spec, artifact_folder(run), tracker, siblings)
        outcome = replace(outcome, phases={**tracker.times(), **outcome.phases})
        state, error = _finished(store, run, outcome), None
    except CancelledError:
        state, error = RunState.CANCELLED, None
    except Exception as cause:
        log.exception("run %s (%s) failed", run.run_id, run.label)
        state, error, refused = (
            RunState.FAILED,
            failure_message(cause, details, run.spec),
            isinstance(cause, InputError),
        )
    finally:
        watch.stop()
    if state is not RunState.DONE:
        discard_partial(run)
        discard_if_empty(run.run_id)
        transitions.end(store, run.key, state, error)
    return Performed(store.run(run.key), refused)


def failure_message(cause: BaseException, details: str, spec: RunSpec | None = None) -> str:
    """What happened and what to do, in one or two sentences; the traceback is in the log only."""
    if isinstance(cause, InputError | RunError):
        return str(cause)
    words = (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
    out_of_memory = type(cause).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in words
    if isinstance(cause, MemoryError) or out_of_memory:
        return f"There was not enough memory: use {_memory_levers(spec)}."
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return "The disk is full: remove variants that are not needed, or move PODA_HOME to a larger disk."
    return f"The run stopped on an error Poda did not foresee ({words}): details in {details}"


def _memory_levers(spec: RunSpec | None) -> str:
    levers = ["fewer calibration windows", "a shorter length", "a 16-bit dtype"]
    if spec is not None and shares_statistics(spec):
        levers.insert(0, "sequential statistics, which hold what one variant needs and not what all of them do")
    if spec is not None and is_structured(spec.recipe):
        levers.append("a method that removes single weights")
    return f"{', '.join(levers)}, or another device"


def _finished(store: Store, run: Run, outcome: Outcome) -> RunState:
    """Record the result and drop the files of older attempts, which the new ones replace."""
    if not transitions.finish(store, run.key, outcome, artifact_folder(run)):
        return RunState.CANCELLED
    try:
        _drop_older(store, run)
    except (OSError, SQLAlchemyError):
        log.warning("what run %s leaves behind could not be removed", run.run_id, exc_info=True)
    return RunState.DONE


def _drop_older(store: Store, run: Run) -> None:
    discard(run.run_id)
    for older in store.attempts(run.run_id, [RunState.DONE]):
        if older.attempt < run.attempt and older.artifact is not None:
            transitions.forget_artifact(store, older.key)
            shutil.rmtree(older.artifact, ignore_errors=True)
