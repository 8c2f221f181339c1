"""One run in the foreground of a terminal: waits for the device, shows progress, is cancelled by Ctrl-C."""

import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import typer
from filelock import Timeout

from app import paths
from app.runs import transitions
from app.runs.job import Execute, Performed, perform
from app.runs.processes import device_lock, this_process
from app.runs.progress import Tracker
from app.runs.queue import discard_partial, mark_lost
from app.runs.spec import RunSpec
from app.runs.store import WORKING, Run, RunState, Store
from app.runs.transitions import Position
from app.runs.worker import real_execute, resolve_device
from app.wording import duration
from pruning.errors import CancelledError, RunError

CANCELLED_EXIT = 130
POLL_SECONDS = 0.2
LINE_SECONDS = 10.0


@dataclass(frozen=True)
class Ended:
    """How a run in the foreground ended.

    ``refused`` when it turned out that what was asked cannot be done; ``stuck`` when it was cancelled inside a call
    that does not return, so that only ending the process ends the work.
    """

    run: Run
    refused: bool = False
    stuck: bool = False


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set; the second time ends the process at once."""
    cancel = threading.Event()

    def stop(number: int, frame: object) -> None:
        if cancel.is_set():
            os._exit(CANCELLED_EXIT)
        cancel.set()
        typer.echo("\nCancelling…", err=True)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield cancel
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_here(
    store: Store,
    spec: RunSpec,
    cancel: threading.Event,
    *,
    again: bool = False,
    siblings: Sequence[RunSpec] = (),
    execute: Execute | None = None,
    resolve: Callable[[str], str] = resolve_device,
) -> Ended:
    """Make and measure ``spec`` in this process, or find it finished.

    ``siblings`` will be asked for after it and share its statistics. Takes the lock that workers take and says so while
    it waits. Raises InputError for a device that is not here, CancelledError when cancelled before the run began.
    """
    found = _finished(store, spec, again)
    if found is not None:
        return Ended(found)
    device = resolve(spec.device)
    with _held(device, cancel):
        run = _taken(store, spec, cancel, again)
        if run.state is not RunState.RUNNING:
            return Ended(run)
        return _perform(store, run, execute or real_execute(), cancel, siblings)


def _perform(store: Store, run: Run, execute: Execute, cancel: threading.Event, siblings: Sequence[RunSpec]) -> Ended:
    """The work goes on in a thread of its own, so that this one hears Ctrl-C during a long native call."""
    details = paths.logs() / "terminal.log"
    handler = logging.FileHandler(details, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("poda")
    logger.addHandler(handler)
    logger.propagate = False
    trackers: list[Tracker] = []
    ended: list[Performed] = []
    stuck = threading.Event()

    def work() -> None:
        ended.append(
            perform(
                store,
                run,
                execute,
                siblings=siblings,
                details=str(details),
                give_up=stuck.set,
                cancel=cancel,
                watcher=trackers.append,
            )
        )

    thread = threading.Thread(target=work, name="job", daemon=True)
    thread.start()
    display = Display()
    while thread.is_alive() and not stuck.is_set():
        thread.join(POLL_SECONDS)
        if trackers:
            display.show(trackers[0].position())
    display.close()
    logger.removeHandler(handler)
    handler.close()
    if ended:
        return Ended(ended[0].run, refused=ended[0].refused)
    if stuck.is_set():
        transitions.end(store, run.key, RunState.CANCELLED)
        discard_partial(run)
        return Ended(store.run(run.key), stuck=True)
    raise RunError(f"the run ended without a record: details in {details}")


def _finished(store: Store, spec: RunSpec, again: bool) -> Run | None:
    found = None if again else store.find(spec.run_id, [RunState.DONE])
    if found is not None and found.finished_at is not None:
        when = found.finished_at.astimezone().strftime("%Y-%m-%d %H:%M")
        typer.echo(f"This was made and measured on {when}; --again makes it anew.", err=True)
    return found


@contextmanager
def _held(device: str, cancel: threading.Event) -> Iterator[None]:
    lock = device_lock(device)
    told = False
    while True:
        if cancel.is_set():
            raise CancelledError("cancelled while waiting")
        try:
            lock.acquire(timeout=0 if not told else POLL_SECONDS)
            break
        except Timeout:
            if not told:
                typer.echo(f"Another run is using {device}: waiting for it to end (Ctrl-C gives up).", err=True)
            told = True
    try:
        yield
    finally:
        lock.release()


def _taken(store: Store, spec: RunSpec, cancel: threading.Event, again: bool) -> Run:
    """The run in our hands, or ended by somebody else who had begun it on another device."""
    while not cancel.is_set():
        mark_lost(store)
        run, there = transitions.add(store, spec, this_process(), anew=again)
        if not there:
            return run
        if run.state is RunState.QUEUED:
            if transitions.take(store, run.key, this_process()):
                return store.run(run.key)
        elif run.state is RunState.DONE:
            return run
        else:
            while store.run(run.key).state in WORKING and not cancel.is_set():
                time.sleep(POLL_SECONDS)
                mark_lost(store)
            again = False
    raise CancelledError("cancelled while waiting")


class Display:
    """Progress on standard error: one line that is written over in a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._phase: str | None = None
        self._shown = 0.0

    def show(self, position: Position | None) -> None:
        """Say where the run is."""
        if position is None:
            return
        line = describe(position)
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            typer.echo("\r" + line[:width].ljust(width), nl=False, err=True)
        elif position.phase != self._phase or time.monotonic() - self._shown > LINE_SECONDS:
            typer.echo(line, err=True)
            self._shown = time.monotonic()
        self._phase = position.phase

    def close(self) -> None:
        """Leave the line."""
        if self._live and self._phase is not None:
            typer.echo("", err=True)


def describe(position: Position) -> str:
    """``"[2/5] compressing: 12 of 30 blocks, about 42 s left"``."""
    text = (
        f"[{position.step}/{position.steps}] {position.phase}: {position.done:,} of {position.total:,} {position.unit}"
    )
    return text if position.remaining_s is None else f"{text}, about {duration(position.remaining_s)} left"
