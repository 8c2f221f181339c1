"""What a person does with runs: ask, cancel, ask again, remove; and what happens to runs whose worker died."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from sqlalchemy import update

from app.runs import processes, queue, tables, transitions
from app.runs.processes import this_process
from app.runs.store import RunState, Store
from app.runs.transitions import Holder, Position
from pruning.errors import InputError
from tests.app.factories import fill, make_run, make_spec


def gone() -> Holder:
    """A process of this machine that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    started = psutil.Process(process.pid).create_time()
    process.wait()
    return Holder(this_process().host, process.pid, started)


def test_dense_is_put_first_once_for_a_protocol(store: Store) -> None:
    specs = [make_spec("wanda", 0.5), make_spec("magnitude", 0.5), make_spec("wanda", 0.5, device="cpu")]
    submitted = queue.submit(store, specs)
    assert [(one.run.label, one.run.spec.device, one.reused) for one in submitted] == [
        ("Dense", "auto", False),
        ("Wanda 50%", "auto", False),
        ("Magnitude 50%", "auto", False),
        ("Dense", "cpu", False),
        ("Wanda 50%", "cpu", False),
    ]
    assert [one.run.key for one in submitted] == [1, 2, 3, 4, 5]


def test_a_finished_or_waiting_dense_is_reused_silently(store: Store) -> None:
    make_run(store, make_spec(None))
    submitted = queue.submit(store, [make_spec("wanda", 0.5)])
    assert [one.run.label for one in submitted] == ["Wanda 50%"]
    submitted = queue.submit(store, [make_spec(None), make_spec("wanda", 0.6)])
    assert [(one.run.label, one.reused) for one in submitted] == [("Dense", True), ("Wanda 60%", False)]


def test_asking_twice_finds_the_same_run(store: Store) -> None:
    first = queue.submit(store, [make_spec("wanda", 0.5), make_spec("wanda", 0.5)])
    second = queue.submit(store, [make_spec("wanda", 0.5)])
    assert [one.run.label for one in first] == ["Dense", "Wanda 50%"]
    assert second[0].run == first[1].run
    assert second[0].reused


@pytest.mark.parametrize("state", [RunState.FAILED, RunState.CANCELLED, RunState.LOST, RunState.CANCELLING])
def test_what_came_to_nothing_is_asked_for_anew(store: Store, state: RunState) -> None:
    spec = make_spec(None)
    before = make_run(store, spec, state=state)
    (one,) = queue.submit(store, [spec])
    assert (one.reused, one.run.attempt, one.run.state) == (False, before.attempt + 1, RunState.QUEUED)


def test_two_browsers_asking_at_the_same_moment_get_one_run(store: Store) -> None:
    """Without the write lock taken as a transaction begins, some of them would be refused at once."""
    spec = make_spec("wanda", 0.5)
    barrier = threading.Barrier(6)
    keys: list[int] = []

    def ask() -> None:
        barrier.wait()
        keys.append(queue.submit(store, [spec])[-1].run.key)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 6
    assert len(set(keys)) == 1
    assert len(store.runs()) == 2


def test_again_is_another_attempt_under_the_same_id(store: Store) -> None:
    done = make_run(store, make_spec("wanda", 0.5))
    once = queue.again(store, done.key)
    assert (once.run_id, once.attempt, once.state) == (done.run_id, 2, RunState.QUEUED)
    assert queue.again(store, done.key).key == once.key


def test_cancelling_depends_on_where_the_run_is(store: Store) -> None:
    states = {}
    for seed, state in enumerate(RunState):
        run = make_run(store, make_spec("wanda", 0.5, seed=seed), state=state)
        states[state] = queue.cancel(store, run.key)
    assert states == {
        RunState.QUEUED: RunState.CANCELLED,
        RunState.RUNNING: RunState.CANCELLING,
        RunState.CANCELLING: RunState.CANCELLING,
        RunState.CANCELLED: RunState.CANCELLED,
        RunState.FAILED: RunState.FAILED,
        RunState.DONE: RunState.DONE,
        RunState.LOST: RunState.LOST,
    }


def test_the_queue_shows_work_then_what_waits_then_what_ended_last(store: Store) -> None:
    old = make_run(store, make_spec("wanda", 0.1))
    first = make_run(store, make_spec("wanda", 0.2), state=RunState.QUEUED)
    working = make_run(store, make_spec("wanda", 0.3), state=RunState.RUNNING)
    second = make_run(store, make_spec("wanda", 0.4), state=RunState.QUEUED)
    new = make_run(store, make_spec("wanda", 0.5), state=RunState.FAILED)
    assert [run.key for run in queue.queue_view(store)] == [working.key, first.key, second.key, new.key, old.key]
    shown = queue.queue_view(store)[0]
    assert (shown.phase, shown.done, shown.total, shown.unit, shown.step) == ("compressing", 12, 30, "blocks", (2, 5))
    assert shown.remaining_s == 42.0


def test_only_one_of_many_takes_a_run(store: Store) -> None:
    run = make_run(store, state=RunState.QUEUED)
    barrier = threading.Barrier(5)
    taken: list[bool] = []

    def take() -> None:
        barrier.wait()
        taken.append(transitions.take(store, run.key, this_process()))

    threads = [threading.Thread(target=take) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == [False, False, False, False, True]


def test_runs_are_claimed_in_order_for_the_device_and_by_the_machine_they_were_asked_for(store: Store) -> None:
    first = make_run(store, make_spec("wanda", 0.1), state=RunState.QUEUED)
    other = make_run(store, make_spec("wanda", 0.2, device="cpu"), state=RunState.QUEUED)
    second = make_run(store, make_spec("wanda", 0.3), state=RunState.QUEUED)
    foreign = make_run(store, make_spec("wanda", 0.4), state=RunState.QUEUED)
    with store.writer.begin() as connection:
        connection.execute(update(tables.runs).where(tables.runs.c.key == foreign.key).values(home="elsewhere"))
    assert sorted(transitions.waiting_devices(store)) == ["auto", "cpu"]
    claimed = [transitions.claim(store, "auto", this_process()) for _ in range(3)]
    assert [run.key if run is not None else None for run in claimed] == [first.key, second.key, None]
    assert store.run(other.key).state is RunState.QUEUED


def test_a_run_whose_process_is_gone_becomes_lost_and_can_be_started_again(store: Store, home: Path) -> None:
    spec = make_spec("wanda", 0.5)
    run, _ = transitions.add(store, spec, gone())
    partial = home / "artifacts" / f".{run.run_id}.1-0.partial"
    partial.mkdir(parents=True)
    assert queue.mark_lost(store) == [run.key]
    lost = store.run(run.key)
    assert (lost.state, lost.error) == (RunState.LOST, queue.LOST_MESSAGE)
    assert not partial.exists()
    assert queue.mark_lost(store) == []
    assert queue.again(store, run.key).state is RunState.QUEUED


def test_a_run_that_was_being_cancelled_when_its_process_went_is_cancelled(store: Store) -> None:
    run, _ = transitions.add(store, make_spec(), gone())
    queue.cancel(store, run.key)
    queue.mark_lost(store)
    assert (store.run(run.key).state, store.run(run.key).error) == (RunState.CANCELLED, None)


def test_a_process_number_that_was_given_to_another_process_does_not_count(store: Store) -> None:
    mine = this_process()
    run, _ = transitions.add(store, make_spec(), Holder(mine.host, mine.pid, mine.started - 100))
    assert queue.mark_lost(store) == [run.key]


def test_of_another_machine_only_a_long_silence_tells(store: Store) -> None:
    run, _ = transitions.add(store, make_spec(), Holder("another-host", os.getpid(), 0.0))
    assert queue.mark_lost(store) == []
    with store.writer.begin() as connection:
        silent = time.time() - processes.SILENCE_SECONDS - 1
        connection.execute(update(tables.runs).values(heartbeat=silent))
    assert queue.mark_lost(store) == [run.key]


def test_a_late_report_does_not_wake_a_run_that_ended(store: Store) -> None:
    run = make_run(store, state=RunState.RUNNING)
    transitions.end(store, run.key, RunState.LOST, "gone")
    state = transitions.beat(store, run.key, Position("scoring", 1, 2, "tokens", 4, 5, None))
    assert state is RunState.LOST
    assert store.run(run.key).phase == "compressing"
    assert not transitions.end(store, run.key, RunState.FAILED, "later")


def test_removing_an_artifact_frees_its_bytes_and_keeps_its_figures(store: Store) -> None:
    run = make_run(store, artifact=True)
    assert run.artifact is not None
    assert queue.disk_use(store).variants == {run.run_id: run.artifact_bytes}
    before = store.results()
    assert queue.remove_artifact(store, run.run_id) == 1000
    assert not run.artifact.exists()
    after = store.results()
    assert before["has_artifact"].tolist() == [True]
    assert after["has_artifact"].tolist() == [False]
    assert after["perplexity"].tolist() == before["perplexity"].tolist()
    assert queue.remove_artifact(store, run.run_id) == 0
    assert queue.disk_use(store).variants == {}
    with pytest.raises(InputError, match="no run zz"):
        queue.remove_artifact(store, "zz")


def test_disk_use_counts_converted_models(store: Store, home: Path) -> None:
    folder = home / "cache" / "models" / "x"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(500))
    use = queue.disk_use(store)
    assert (use.model_cache, use.total) == (500, 500)
    assert use.free > 0


def test_a_full_store_has_runs_in_every_state(store: Store) -> None:
    made = fill(store, 40)
    states = {run.state for run in made}
    assert states == {*RunState} - {RunState.CANCELLING}
    assert store.results()["collapsed"].sum() > 0
    assert store.results().shape[0] == 40
    assert queue.mark_lost(store) == []
