"""The process that owns a device: takes one waiting run after another, makes and measures it, and goes when idle."""

import logging
import os
import time
from collections.abc import Callable

from filelock import Timeout

from app.runs import transitions
from app.runs.job import Execute, failure_message, perform
from app.runs.processes import device_lock, start_worker, this_process, worker_lock, worker_log
from app.runs.queue import discard_partial, mark_lost
from app.runs.siblings import shares_statistics, siblings_of
from app.runs.store import Run, RunState, Store

IDLE_SECONDS = 60.0
POLL_SECONDS = 0.5
# Between two runs the device is free for a moment, or somebody waiting in a terminal would wait for the whole sweep.
COURTESY_SECONDS = 0.3

log = logging.getLogger("poda")


def resolve_device(name: str) -> str:
    """The device that ``name`` ("auto", "cuda") stands for here ("cuda:0"). Raises InputError; imports torch."""
    from pruning.device import choose_device

    return str(choose_device(name))


def real_execute() -> Execute:
    """The job itself, imported only by who runs it."""
    from app.runs.execute import execute

    return execute


def work(
    device: str,
    *,
    execute: Execute | None = None,
    resolve: Callable[[str], str] = resolve_device,
    idle: float = IDLE_SECONDS,
) -> None:
    """Serve runs that were asked for ``device`` until none has come for ``idle`` seconds.

    Returns at once when another worker serves them. Runs of a device that is not here fail with the reason.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    lock = worker_lock(device)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return
    store = Store()
    try:
        mark_lost(store)
        try:
            resolved = resolve(device)
        except Exception as cause:
            log.exception("device %s cannot be used", device)
            _fail_all(store, device, failure_message(cause, str(worker_log(device))))
            return
        log.info("worker for %s on %s", device, resolved)
        _serve(store, device, resolved, execute or real_execute(), idle, lock.release)
        log.info("idle, going")
    finally:
        lock.release(force=True)
        store.close()


def _serve(store: Store, device: str, resolved: str, execute: Execute, idle: float, let_go: Callable[[], None]) -> None:
    last = time.monotonic()
    while True:
        if device not in transitions.waiting_devices(store):
            if time.monotonic() - last > idle:
                return
            time.sleep(min(POLL_SECONDS, idle))
            continue
        last = time.monotonic()
        try:
            with device_lock(resolved).acquire(timeout=POLL_SECONDS):
                run = transitions.claim(store, device, this_process())
                if run is not None:
                    _perform(store, run, execute, device, let_go)
        except Timeout:
            continue
        last = time.monotonic()
        time.sleep(COURTESY_SECONDS)


def _perform(store: Store, run: Run, execute: Execute, device: str, let_go: Callable[[], None]) -> None:
    def give_up() -> None:
        log.warning("run %s did not stop when asked: ending this worker", run.run_id)
        transitions.end(store, run.key, RunState.CANCELLED)
        discard_partial(run)
        let_go()
        if device in transitions.waiting_devices(store):
            start_worker(device)
        os._exit(0)

    siblings = siblings_of(run.spec, transitions.waiting(store, device)) if shares_statistics(run.spec) else []
    log.info("run %s attempt %d: %s", run.run_id, run.attempt, run.label)
    performed = perform(store, run, execute, siblings=siblings, details=str(worker_log(device)), give_up=give_up)
    log.info("run %s is %s", run.run_id, performed.run.state)


def _fail_all(store: Store, device: str, error: str) -> None:
    while (run := transitions.claim(store, device, this_process())) is not None:
        transitions.end(store, run.key, RunState.FAILED, error)
