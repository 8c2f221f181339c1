"""The worker: takes runs one after another, is cancelled, is killed, and leaves a database that works."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from app.runs import job, processes, queue, transitions
from app.runs.checkpoints import Unfinished, bytes_of_checkpoints, unfinished
from app.runs.job import failure_message, perform
from app.runs.outcome import Outcome
from app.runs.processes import device_lock, start_worker, this_process, worker_lives, worker_log
from app.runs.spec import RunSpec
from app.runs.store import Run, RunState, Store
from app.runs.worker import work
from pruning.errors import CancelledError, InputError, RunError
from pruning.methods import METHODS
from pruning.progress import Progress
from tests.app.factories import leave_blocks, make_spec, sharing
from tests.app.fake_job import failing, quick

ROOT = Path(__file__).parents[2]
Start = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a worker process with a fake job that behaves as named; it is ended with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(behaviour: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "tests.app.fake_job", "worker", behaviour]
        started.append(subprocess.Popen(command, cwd=ROOT))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def wait_for(store: Store, key: int, *states: RunState, seconds: float = 20) -> Run:
    """The run once it is in one of ``states``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        run = store.run(key)
        if run.state in states:
            return run
        time.sleep(0.05)
    raise AssertionError(f"run {key} is still {store.run(key).state}")


def serve(execute: job.Execute) -> None:
    """A worker in this process that goes as soon as nothing waits."""
    work("auto", execute=execute, resolve=lambda name: "cpu", idle=0.1)


def test_a_worker_makes_what_waits_in_order_and_goes(store: Store) -> None:
    made: list[str] = []

    def execute(spec: RunSpec, folder: Path, progress: Progress, siblings: Sequence[RunSpec] = ()) -> Outcome:
        made.append(str(spec.recipe))
        return quick(spec, folder, progress)

    queue.submit(store, [make_spec("wanda", 0.5), make_spec("magnitude", 0.5)])
    serve(execute)
    assert made == ["Dense", "Wanda 50%", "Magnitude 50%"]
    runs = store.runs()
    assert {run.state for run in runs} == {RunState.DONE}
    for run in runs:
        assert run.artifact is not None
        assert (run.artifact / "model.safetensors").is_file()
        assert run.started_at is not None
        assert run.finished_at is not None
        assert run.started_at <= run.finished_at
    assert store.results().shape[0] == 3
    assert not worker_lives("auto")


def test_a_result_stays_where_what_it_replaces_cannot_be_removed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(store: Store, key: int) -> None:
        raise OperationalError("update", {}, Exception("database is locked"))

    spec = make_spec("wanda", 0.5)
    for ask in (lambda: queue.submit(store, [spec]), lambda: queue.again(store, store.find(spec.run_id).key)):
        ask()
        serve(quick)
        monkeypatch.setattr(transitions, "forget_artifact", fails)
    attempts = [run for run in store.runs() if run.run_id == spec.run_id]
    assert [run.state for run in attempts] == [RunState.DONE] * 2
    newest = max(attempts, key=lambda run: run.attempt)
    assert newest.artifact is not None
    assert (newest.artifact / "model.safetensors").is_file()


def test_one_failed_run_does_not_stop_the_rest(store: Store) -> None:
    queue.submit(store, [make_spec(method, 0.5) for method in ("magnitude", "wanda", "sparsegpt")])
    serve(failing)
    ended = {run.label: run for run in store.runs()}
    assert ended["Dense"].state is RunState.DONE
    assert {ended[f"{name} 50%"].state for name in ("Magnitude", "Wanda", "SparseGPT")} == {RunState.FAILED}
    assert ended["Magnitude 50%"].error == "the weights are not finite: try --dtype float32"
    assert ended["Wanda 50%"].error == "the text has 10 tokens, fewer than one window of 256: give a longer text"
    unforeseen = ended["SparseGPT 50%"].error
    assert unforeseen == (
        f"The run stopped on an error Poda did not foresee (division by zero): details in {worker_log('auto')}"
    )


def test_runs_that_wait_and_share_statistics_are_handed_over_together(store: Store) -> None:
    seen: dict[str, list[str]] = {}

    def execute(spec: RunSpec, folder: Path, progress: Progress, siblings: Sequence[RunSpec] = ()) -> Outcome:
        seen[str(spec.recipe)] = [str(one.recipe) for one in siblings]
        return quick(spec, folder, progress)

    asked = [sharing("wanda", 0.3), make_spec("wanda", 0.6), sharing("sparsegpt", 0.3), sharing("wanda", 0.5)]
    queue.submit(store, [*asked, sharing("wanda", 0.4, device="cpu")])
    serve(execute)
    assert seen == {
        "Dense": [],
        "Wanda 30% (shared)": ["SparseGPT 30% (shared)", "Wanda 50% (shared)"],
        "Wanda 60%": [],
        "SparseGPT 30% (shared)": ["Wanda 50% (shared)"],
        "Wanda 50% (shared)": [],
    }


def test_what_was_finished_of_a_run_is_kept_until_it_is_done(store: Store, start: Start, home: Path) -> None:
    """Killed in the middle, started again: the next process goes on with the blocks of the first."""
    (run,) = [one.run for one in queue.submit(store, [make_spec("wanda", 0.5)]) if one.run.label != "Dense"]
    worker = start("stepping")
    wait_for(store, run.key, RunState.RUNNING)
    end = time.monotonic() + 20
    while (unfinished(run.run_id) or Unfinished(0, 0)).done < 2 and time.monotonic() < end:
        time.sleep(0.02)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    queue.mark_lost(store)
    left = unfinished(run.run_id)
    assert left is not None
    assert (left.done in (2, 3), left.total) == (True, 4)
    again = queue.again(store, run.key)
    start("stepping")
    wait_for(store, again.key, RunState.DONE)
    assert "Wanda 50%: 2 processes" in (home / "makers.txt").read_text().splitlines()
    end = time.monotonic() + 20
    while unfinished(run.run_id) is not None and time.monotonic() < end:  # it goes after the result is recorded
        time.sleep(0.02)
    assert unfinished(run.run_id) is None


def test_a_cancelled_run_keeps_its_blocks_and_one_that_never_had_any_leaves_nothing(store: Store) -> None:
    def cancelled(spec: RunSpec, folder: Path, progress: Progress, siblings: Sequence[RunSpec] = ()) -> Outcome:
        leave_blocks(spec.run_id, 0 if spec.recipe.prune is None else 2, 4)
        raise CancelledError("stop")

    queue.submit(store, [make_spec("wanda", 0.5)])
    serve(cancelled)
    assert {run.state for run in store.runs()} == {RunState.CANCELLED}
    assert list(bytes_of_checkpoints()) == [make_spec("wanda", 0.5).run_id]


@pytest.mark.parametrize(
    ("spec", "lever"),
    [
        (sharing("wanda", 0.5), "use sequential statistics"),
        (make_spec("wanda", 0.5), "use fewer calibration windows"),
        (None, "use fewer calibration windows"),
    ],
    ids=str,
)
def test_too_little_memory_names_the_lever_of_what_was_asked(spec: RunSpec | None, lever: str) -> None:
    assert lever in failure_message(MemoryError(), "LOG", spec)


def test_too_little_memory_for_a_smaller_model_offers_single_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "narrow", replace(METHODS["wanda"], name="narrow", kind="width"))
    lever = "a method that removes single weights"
    assert lever in failure_message(MemoryError(), "LOG", make_spec("narrow", 0.25))
    assert lever not in failure_message(MemoryError(), "LOG", make_spec("wanda", 0.5))


@pytest.mark.parametrize(
    ("cause", "lever"),
    [
        (MemoryError(), "fewer calibration windows"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
            "shorter length",
        ),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate"), "another device"),
        (OSError(28, "No space left on device"), "remove variants"),
        (InputError("as it is"), "as it is"),
        (RunError("as it is"), "as it is"),
        (KeyError("x"), "details in LOG"),
    ],
)
def test_a_failure_names_the_lever_and_shows_no_traceback(cause: BaseException, lever: str) -> None:
    message = failure_message(cause, "LOG")
    assert lever in message
    assert "Traceback" not in message
    assert "\n" not in message


def test_runs_of_a_device_that_is_not_here_fail_with_the_reason(store: Store) -> None:
    queue.submit(store, [make_spec("wanda", 0.5, device="cuda:9")])

    def resolve(name: str) -> str:
        raise InputError(f"{name} is not here")

    work("cuda:9", execute=quick, resolve=resolve, idle=0.1)
    assert [(run.state, run.error) for run in store.runs()] == [(RunState.FAILED, "cuda:9 is not here")] * 2


def test_the_phases_of_a_finished_run_are_remembered(store: Store) -> None:
    from app.runs.history import expected_seconds

    queue.submit(store, [make_spec("wanda", 0.5)])
    serve(quick)
    expected = expected_seconds(store, make_spec("wanda", 0.6))
    assert list(expected) == ["loading", "compressing", "saving", "scoring", "timing"]
    assert all(seconds is not None and 0 <= seconds < 5 for seconds in expected.values())


def test_a_new_attempt_replaces_the_files_of_the_old_one_once_it_is_done(store: Store) -> None:
    spec = make_spec(None)
    queue.submit(store, [spec])
    serve(quick)
    old = store.runs()[0]
    queue.again(store, old.key)

    def broken(spec: RunSpec, folder: Path, progress: Progress, siblings: Sequence[RunSpec] = ()) -> Outcome:
        folder.mkdir()
        raise RunError("broken")

    serve(broken)
    failed = store.runs()[0]
    assert failed.state is RunState.FAILED
    assert not queue.artifact_folder(failed).exists()
    assert old.artifact is not None
    assert old.artifact.is_dir()
    queue.again(store, old.key)
    serve(quick)
    new = store.runs()[0]
    assert (new.state, new.attempt) == (RunState.DONE, 3)
    assert new.artifact is not None
    assert new.artifact.is_dir()
    assert not old.artifact.exists()
    assert store.run(old.key).artifact is None
    assert store.results()["has_artifact"].tolist() == [True]


def test_a_sign_of_life_after_the_result_cancels_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(job, "_drop_older", lambda store, run: time.sleep(0.3))
    cancel = threading.Event()
    for method in ("wanda", "sparsegpt"):  # runs of one sweep in a terminal share the event
        run, _ = transitions.add(store, make_spec(method, 0.5), this_process())
        performed = perform(store, run, quick, details="LOG", give_up=lambda: None, cancel=cancel)
        assert performed.run.state is RunState.DONE
    assert not cancel.is_set()


def test_cancel_wins_over_a_result_that_came_at_the_same_moment(store: Store) -> None:
    def execute(spec: RunSpec, folder: Path, progress: Progress, siblings: Sequence[RunSpec] = ()) -> Outcome:
        outcome = quick(spec, folder, progress)
        queue.cancel(store, run.key)
        return outcome

    run, _ = transitions.add(store, make_spec(None), this_process())
    performed = perform(store, run, execute, details="LOG", give_up=lambda: None)
    assert performed.run.state is RunState.CANCELLED
    assert not queue.artifact_folder(run).exists()
    assert store.results().empty


def test_progress_is_written_while_the_run_goes_on(store: Store, start: Start) -> None:
    submitted = queue.submit(store, [make_spec(None)])
    start("slow")
    run = wait_for(store, submitted[0].run.key, RunState.RUNNING)
    seen = set()
    for _ in range(40):
        run = store.run(run.key)
        seen.add(run.done)
        time.sleep(0.05)
    assert run.phase == "compressing"
    assert run.total == 400
    # At most three a second in two seconds, and it moves.
    assert 2 <= len(seen) <= 8


def test_a_running_run_is_cancelled_within_seconds_and_the_worker_goes_on(store: Store, start: Start) -> None:
    submitted = queue.submit(store, [make_spec(None)])
    start("slow")
    wait_for(store, submitted[0].run.key, RunState.RUNNING)
    time.sleep(0.5)
    asked = time.monotonic()
    assert queue.cancel(store, submitted[0].run.key) is RunState.CANCELLING
    run = wait_for(store, submitted[0].run.key, RunState.CANCELLED)
    assert time.monotonic() - asked < 3
    assert run.error is None
    assert list((queue.artifact_folder(run).parent).iterdir()) == []
    assert worker_lives("auto")
    second = queue.submit(store, [make_spec(None)])[0]
    wait_for(store, second.run.key, RunState.RUNNING)


def test_a_run_that_does_not_listen_is_cancelled_by_ending_its_worker(store: Store, start: Start) -> None:
    specs = [make_spec("wanda", 0.5), make_spec("wanda", 0.6)]
    dense, stubborn, waiting = queue.submit(store, specs)
    worker = start("deaf")
    wait_for(store, dense.run.key, RunState.DONE)
    wait_for(store, stubborn.run.key, RunState.RUNNING)
    queue.cancel(store, waiting.run.key)
    queue.cancel(store, stubborn.run.key)
    wait_for(store, stubborn.run.key, RunState.CANCELLED)
    assert worker.wait(timeout=10) == 0
    assert not worker_lives("auto")
    with device_lock("cpu").acquire(timeout=1):
        pass


def test_a_killed_worker_leaves_a_usable_database_and_the_run_can_be_started_again(store: Store, start: Start) -> None:
    dense = queue.submit(store, [make_spec(None)])[0].run
    worker = start("slow")
    wait_for(store, dense.key, RunState.RUNNING)
    time.sleep(0.6)
    os.kill(worker.pid, signal.SIGKILL)
    assert queue.mark_lost(store) in ([], [dense.key])  # the process may still be on its way out
    worker.wait()
    queue.mark_lost(store)
    store.close()
    opened = Store()
    lost = opened.run(dense.key)
    assert (lost.state, lost.error) == (RunState.LOST, queue.LOST_MESSAGE)
    assert not list(queue.artifact_folder(lost).parent.iterdir())
    again = queue.again(opened, dense.key)
    assert (again.run_id, again.attempt) == (dense.run_id, 2)
    start("quick")
    done = wait_for(opened, again.key, RunState.DONE)
    assert done.artifact is not None
    assert done.artifact.is_dir()
    assert opened.results()["key"].tolist() == [again.key]
    opened.close()


def test_two_workers_never_make_the_same_run_and_never_at_once(store: Store, start: Start) -> None:
    """Two devices by name, one in fact: the second waits for the lock of the first."""
    running = 0
    at_once: list[int] = []
    guard = threading.Lock()

    def execute(spec: RunSpec, folder: Path, progress: Progress, siblings: Sequence[RunSpec] = ()) -> Outcome:
        nonlocal running
        with guard:
            running += 1
            at_once.append(running)
        time.sleep(0.2)
        with guard:
            running -= 1
        return quick(spec, folder, progress)

    specs = [make_spec("wanda", share, device=device) for share in (0.3, 0.5) for device in ("auto", "cpu")]
    queue.submit(store, specs)
    threads = [
        threading.Thread(
            target=work, args=(device,), kwargs={"execute": execute, "resolve": lambda name: "cpu", "idle": 1.0}
        )
        for device in ("auto", "cpu", "auto")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {run.state for run in store.runs()} == {RunState.DONE}
    assert len(at_once) == len(store.runs()) == 6
    assert set(at_once) == {1}


def test_a_worker_is_started_once_and_outlives_nothing_it_should_not(store: Store) -> None:
    code = "from tests.app.fake_job import main; import sys; sys.argv = ['x', 'worker', 'quick']; main()"
    command = (sys.executable, "-c", code)
    submitted = queue.submit(store, [make_spec("wanda", 0.5)])
    assert start_worker("auto", command)
    assert not start_worker("auto", command)
    for one in submitted:
        wait_for(store, one.run.key, RunState.DONE)
    process = processes._started[str(worker_log("auto"))][0]
    assert os.getsid(process.pid) == process.pid  # it has a session of its own: Ctrl-C of the page does not reach it
    assert process.wait(timeout=20) == 0
    assert "is done" in worker_log("auto").read_text()


def test_ensure_workers_starts_one_for_each_device_that_is_waited_for(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(queue, "start_worker", asked.append)
    queue.ensure_workers(store)
    assert asked == []
    queue.submit(store, [make_spec("wanda", 0.5, device="cpu"), make_spec("wanda", 0.5)])
    queue.ensure_workers(store)
    assert sorted(asked) == ["auto", "cpu"]
