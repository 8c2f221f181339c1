"""A run in words."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from app.runs.checkpoints import Unfinished
from app.runs.store import Run, RunState
from app.status import LOOKS, latest_attempts, names, outcome_words, progress_words, share_done
from tests.app.factories import make_spec
from tests.app.frames import frame, pruned

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def a_run(state: RunState = RunState.RUNNING, **changes: object) -> Run:
    run = Run(
        key=1,
        run_id="a" * 12,
        attempt=1,
        label="Wanda 50%",
        state=state,
        spec=make_spec(),
        created_at=NOW,
        started_at=NOW,
        finished_at=None,
        phase="compressing",
        done=11,
        total=30,
        unit="blocks",
        step=(2, 5),
        remaining_s=42.0,
        error=None,
        artifact=None,
        artifact_bytes=0,
        collapsed=False,
    )
    return replace(run, **changes)


def test_every_state_has_a_look() -> None:
    assert set(LOOKS) == set(RunState)
    assert {state for state, look in LOOKS.items() if look.again} == {
        RunState.CANCELLED,
        RunState.FAILED,
        RunState.LOST,
    }


SCORING = a_run(phase="scoring", done=4096, total=8192, unit="tokens", remaining_s=None)
DOWNLOADING = a_run(phase="downloading", done=2_000_000, total=9_000_000, unit="bytes", remaining_s=None)

CONVERTING = a_run(phase="converting", done=67_000_000, total=134_515_008, unit="weights", remaining_s=None)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (a_run(), "Compressing, block 12 of 30, about 42 s left"),
        (a_run(done=30), "Compressing, block 30 of 30, about 42 s left"),
        (SCORING, "Reading test text, 4,096 of 8,192 tokens"),
        (DOWNLOADING, "Downloading the model, 2.00 MB of 9.00 MB"),
        (CONVERTING, "Unpacking the model, once, 67 of 135 million weights"),
        (a_run(phase="saving", done=0, total=1, remaining_s=None), "Saving"),
        (a_run(phase=None), "Starting"),
        (a_run(RunState.QUEUED), "Waiting for its turn"),
        (a_run(RunState.CANCELLING), "Stopping at the next step"),
    ],
)
def test_progress_in_plain_words(run: Run, said: str) -> None:
    assert progress_words(run) == said


def test_the_bar_counts_every_phase_alike_and_never_goes_back() -> None:
    positions = [(1, 0, 1), (1, 1, 1), (2, 0, 30), (2, 15, 30), (2, 30, 30), (3, 0, 0), (5, 10, 10)]
    shares = [share_done(a_run(step=(step, 5), done=done, total=total)) for step, done, total in positions]
    assert shares == pytest.approx([0, 0.2, 0.2, 0.3, 0.4, 0.4, 1.0])
    assert share_done(a_run(step=(0, 0))) == 0
    assert share_done(a_run(RunState.QUEUED, step=(1, 5))) == 0


def test_what_became_of_a_run() -> None:
    results = frame(pruned("wanda", 0.5, 61.7), pruned("magnitude", 0.9, None))
    assert outcome_words(a_run(RunState.DONE, key=1), results) == "perplexity 61.7, 170 MB on disk"
    assert outcome_words(a_run(RunState.DONE, key=2), results).startswith("collapsed")
    assert outcome_words(a_run(RunState.FAILED, error="The disk is full."), results) == "The disk is full."
    assert "worker was killed" in outcome_words(a_run(RunState.LOST), results)
    assert "asked" in outcome_words(a_run(RunState.CANCELLED), results)


def test_a_stopped_run_says_where_it_goes_on() -> None:
    left = Unfinished(12, 30)
    for state in (RunState.LOST, RunState.CANCELLED):
        assert outcome_words(a_run(state), frame(), left).endswith("Start again: it goes on at block 13 of 30.")
    assert outcome_words(a_run(RunState.FAILED, error="The disk is full."), frame(), left) == "The disk is full."


def test_an_attempt_that_was_made_again_is_no_longer_listed() -> None:
    lost, again = a_run(RunState.LOST, attempt=1, key=1), a_run(attempt=2, key=2)
    other = a_run(run_id="b" * 12, key=3)
    assert latest_attempts([again, other, lost]) == [again, other]


def test_the_model_is_named_where_there_are_several() -> None:
    mine, other = a_run(key=1), a_run(key=2, spec=make_spec(model="/home/me/models/tiny-llama/"))
    assert names([mine]) == {1: "Wanda 50%"}
    assert names([mine, other]) == {1: "Wanda 50%, the bundled model", 2: "Wanda 50%, tiny-llama"}
