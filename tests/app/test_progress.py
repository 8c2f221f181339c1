"""How far a run is: phases, times and an estimate that is about the whole run or absent."""

import threading

import pytest

from app.runs.history import expected_seconds, phases_of, work_of
from app.runs.outcome import PhaseTime
from app.runs.progress import Tracker
from app.runs.spec import EvaluationSpec
from app.runs.store import Store
from pruning.errors import CancelledError
from tests.app.factories import make_outcome, make_run, make_spec


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def tracker(clock: Clock, cancel: threading.Event | None = None, **expected: float | None) -> Tracker:
    return Tracker(expected, cancel or threading.Event(), clock)


def remaining(one: Tracker) -> float | None:
    position = one.position()
    assert position is not None
    return position.remaining_s


def test_nothing_is_known_before_the_first_report() -> None:
    assert tracker(Clock(), loading=1.0).position() is None


def test_the_estimate_is_the_rest_of_the_phase_at_its_rate_and_the_coming_phases_as_expected() -> None:
    clock = Clock()
    one = tracker(clock, loading=2.0, compressing=None, scoring=16.0, timing=6.0)
    one("loading", 0, 1, "models")
    assert remaining(one) is None
    clock.now += 3
    one("loading", 1, 1, "models")
    one("compressing", 0, 30, "blocks")
    assert remaining(one) is None
    clock.now += 10
    one("compressing", 5, 30, "blocks")
    # 5 blocks took 10 s: the other 25 take 50 s, then 16 s and 6 s.
    assert remaining(one) == pytest.approx(50 + 16 + 6)
    clock.now += 4
    one("compressing", 5, 30, "blocks")
    assert remaining(one) == pytest.approx(46 + 16 + 6)
    clock.now += 100
    assert remaining(one) == pytest.approx(0 + 16 + 6)
    position = one.position()
    assert position is not None
    assert (position.phase, position.done, position.total, position.unit) == ("compressing", 5, 30, "blocks")
    assert (position.step, position.steps) == (2, 4)


def test_a_phase_that_has_not_moved_is_expected_to_take_what_it_took_before() -> None:
    clock = Clock()
    one = tracker(clock, loading=5.0, scoring=20.0)
    one("loading", 0, 1, "models")
    clock.now += 2
    assert remaining(one) == pytest.approx(3 + 20)
    clock.now += 9
    assert remaining(one) == pytest.approx(20)


def test_a_phase_nobody_announced_keeps_the_place_and_leaves_the_rest_open() -> None:
    clock = Clock()
    one = tracker(clock, loading=5.0, scoring=20.0)
    one("downloading", 0, 100, "bytes")
    position = one.position()
    assert position is not None
    assert (position.phase, position.step, position.steps, position.remaining_s) == ("downloading", 1, 2, None)


def test_times_are_those_between_the_first_reports_of_phases() -> None:
    clock = Clock()
    one = tracker(clock, loading=None, scoring=None)
    one("loading", 0, 1, "models")
    clock.now += 4
    one("loading", 1, 1, "models")
    clock.now += 1
    one("scoring", 0, 4096, "tokens")
    clock.now += 7
    one("scoring", 4096, 4096, "tokens")
    clock.now += 2
    assert one.times() == {"loading": PhaseTime(5.0, 1), "scoring": PhaseTime(9.0, 4096)}


def test_a_cancelled_run_stops_at_its_next_report() -> None:
    cancel = threading.Event()
    one = tracker(Clock(), cancel, loading=None)
    one("loading", 0, 1, "models")
    cancel.set()
    with pytest.raises(CancelledError):
        one("loading", 1, 1, "models")


def test_the_dense_run_has_nothing_to_compress() -> None:
    assert phases_of(make_spec(None)) == ("loading", "saving", "scoring", "timing")
    assert phases_of(make_spec("wanda")) == ("loading", "compressing", "saving", "scoring", "timing")
    assert phases_of(make_spec(None, quantize="int8")) == phases_of(make_spec("wanda"))


def test_expected_seconds_come_from_runs_of_the_same_work(store: Store) -> None:
    spec = make_spec("wanda", 0.5)
    assert set(expected_seconds(store, spec).values()) == {None}
    make_run(store, make_spec(None))
    # The dense run took 1 s to load, 2 s to save, 0.002 s a token to score, 6 s to time.
    dense = {"loading": 1.0, "saving": 2.0, "scoring": 0.002 * 8192, "timing": 6.0}
    assert expected_seconds(store, spec) == pytest.approx({**dense, "compressing": None})
    make_run(store, make_spec("wanda", 0.3))
    assert expected_seconds(store, spec)["compressing"] == 30.0
    assert expected_seconds(store, make_spec("sparsegpt", 0.5))["compressing"] is None
    assert expected_seconds(store, make_spec("wanda", 0.5, quantize="int8"))["scoring"] is None
    longer = spec.model_copy(update={"evaluation": EvaluationSpec(windows=32)})
    assert expected_seconds(store, longer)["scoring"] == pytest.approx(0.002 * 2 * 8192)


def test_the_latest_run_is_the_one_that_counts(store: Store) -> None:
    spec = make_spec("wanda", 0.5)
    outcome = make_outcome(spec)
    make_run(store, spec)
    slower = {**outcome.phases, "compressing": PhaseTime(90.0, 30)}
    object.__setattr__(outcome, "phases", slower)
    make_run(store, spec, outcome=outcome)
    assert expected_seconds(store, spec)["compressing"] == 90.0


def test_work_differs_where_the_time_would() -> None:
    spec = make_spec("wanda", 0.5)
    assert work_of("compressing", spec) == work_of("compressing", make_spec("wanda", 0.7, seed=5))
    assert work_of("compressing", spec) != work_of("compressing", make_spec("wanda", 0.5, device="cpu"))
    assert work_of("scoring", spec) == work_of("scoring", make_spec(None))
    assert work_of("timing", spec) != work_of("timing", make_spec("wanda", 0.5, quantize="int8"))
