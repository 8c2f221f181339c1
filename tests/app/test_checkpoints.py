"""What is left of stopped runs: how far they are, what may be removed, and what starts from nothing."""

import os
from pathlib import Path

import pytest

from app.runs import queue
from app.runs.checkpoints import (
    Unfinished,
    bytes_of_checkpoints,
    checkpoint_folder,
    discard_if_empty,
    removable,
    remove_unfinished,
    unfinished,
)
from app.runs.store import RunState, Store
from app.status import going_on
from tests.app.factories import leave_blocks, make_run, make_spec, sharing


def test_blocks_are_counted_without_the_engine(home: Path) -> None:
    assert unfinished("0" * 12) is None
    leave_blocks("a" * 12, 3, 30)
    leave_blocks("b" * 12, 3, None)
    leave_blocks("c" * 12, 0, 30)
    assert unfinished("a" * 12) == Unfinished(3, 30)
    assert unfinished("b" * 12) == Unfinished(3, 0)
    assert unfinished("c" * 12) is None
    assert bytes_of_checkpoints() == {"a" * 12: 302, "b" * 12: 300}  # nothing was made of the third


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (Unfinished(12, 30), "Start again: it goes on at block 13 of 30."),
        (Unfinished(12, 0), "Start again: it goes on at block 13."),
        (Unfinished(0, 30), "Start again: it goes on with what was found out so far."),
        (Unfinished(30, 30), "Start again: all 30 blocks are made, and it goes on with saving."),
    ],
)
def test_where_it_goes_on_in_words(left: Unfinished, said: str) -> None:
    assert going_on(left) == said


def test_a_run_without_a_block_leaves_nothing(home: Path) -> None:
    leave_blocks("a" * 12, 0, 30)
    leave_blocks("b" * 12, 1, 30)
    discard_if_empty("a" * 12)
    discard_if_empty("b" * 12)
    assert not checkpoint_folder("a" * 12).exists()
    assert unfinished("b" * 12) == Unfinished(1, 30)


def test_what_was_found_out_before_the_first_block_is_kept(home: Path) -> None:
    """Which blocks go, or how a share is spread, can be most of the work."""
    leave_blocks("a" * 12, 0, 30)
    (checkpoint_folder("a" * 12) / "removed.json").write_text("[3]")
    discard_if_empty("a" * 12)
    assert unfinished("a" * 12) == Unfinished(0, 30)


def test_a_finished_run_starts_from_nothing_and_a_stopped_one_goes_on(store: Store) -> None:
    done, stopped = make_run(store, make_spec("wanda", 0.5)), make_run(store, make_spec(None), state=RunState.LOST)
    for run in (done, stopped):
        leave_blocks(run.run_id, 3, 30)
        queue.again(store, run.key)
    assert unfinished(done.run_id) is None
    assert unfinished(stopped.run_id) == Unfinished(3, 30)


def test_an_attempt_that_was_stopped_goes_on_although_an_older_one_is_done(store: Store) -> None:
    done = make_run(store, make_spec("wanda", 0.5))
    make_run(store, make_spec("wanda", 0.5), state=RunState.CANCELLED)
    leave_blocks(done.run_id, 3, 30)
    queue.again(store, done.key)
    assert unfinished(done.run_id) == Unfinished(3, 30)


def test_only_what_nobody_waits_for_may_be_removed(store: Store) -> None:
    waiting = make_run(store, make_spec("wanda", 0.4), state=RunState.QUEUED)
    stopped = make_run(store, make_spec("wanda", 0.6), state=RunState.CANCELLED)
    leave_blocks(stopped.run_id, 2, 30)
    leave_blocks(waiting.run_id, 2, 30)
    os.utime(checkpoint_folder(stopped.run_id), (1e9, 1e9))
    working = make_run(store, sharing("wanda", 0.5), state=RunState.RUNNING)
    leave_blocks(working.run_id, 2, 30)
    # A sibling in a terminal's sweep, which is in no queue yet: its blocks are being written now.
    leave_blocks("f" * 12, 2, 30)
    assert removable(store) == {stopped.run_id: 202}
    before = store.version()
    assert remove_unfinished(store) == 202
    assert store.version() > before
    assert set(bytes_of_checkpoints()) == {waiting.run_id, working.run_id, "f" * 12}


def test_disk_use_counts_unfinished_work(store: Store) -> None:
    leave_blocks("a" * 12, 3, 30)
    use = queue.disk_use(store)
    assert (use.checkpoints, use.total) == ({"a" * 12: 302}, 302)
