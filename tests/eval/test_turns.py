"""Models timed in turns, and what may be said of the times."""

import random
from statistics import median
from types import SimpleNamespace

import pytest

from eval.turns import NOT_FASTER, speed, token_times
from tests.pruning.tiny import tiny_ids, tiny_model


def test_every_model_is_timed_once_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[object] = []
    first, second = tiny_model("llama"), tiny_model("llama", seed=1)

    def generate(model: object, ids: object, protocol: object, progress: object) -> object:
        order.append("first" if model is first else "second")

        figure = SimpleNamespace(samples=[1.0, float(len(order)), 100.0])
        return SimpleNamespace(figures={"time_per_output_token": figure})

    monkeypatch.setattr("eval.turns.time_generation", generate)
    times = token_times({"first": first, "second": second}, tiny_ids(), rounds=3)
    assert order == ["first", "second"] * 4
    # The round that warms up is not counted, and a figure is the median of its tokens.
    assert times == {"first": [3.0, 5.0, 7.0], "second": [4.0, 6.0, 8.0]}


def test_real_generations_are_timed() -> None:
    model = tiny_model("llama")
    times = token_times({"one": model, "other": model}, tiny_ids(length=32), rounds=2, prompt_tokens=8, output_tokens=4)
    assert times.keys() == {"one", "other"}
    assert all(len(values) == 2 and min(values) > 0 for values in times.values())


def test_the_ratio_is_that_of_the_medians() -> None:
    told = speed([1.0, 2.0, 9.0], [4.0, 3.0, 5.0])
    assert told.ratio == median([4.0, 3.0, 5.0]) / median([1.0, 2.0, 9.0]) == 2.0


def test_what_is_certain_has_no_width() -> None:
    told = speed([2.0] * 5, [3.0] * 5)
    assert (told.low, told.ratio, told.high) == (1.5, 1.5, 1.5)
    assert str(told) == "1.50× as fast"


@pytest.mark.parametrize(("times", "than"), [([2.0] * 5, [2.0] * 5), ([3.0] * 5, [2.0] * 5)])
def test_equal_and_slower_are_not_faster(times: list[float], than: list[float]) -> None:
    assert str(speed(times, than)) == NOT_FASTER


def test_overlapping_intervals_are_not_faster_and_a_fifth_is_found() -> None:
    """Times with 5% of noise, 15 rounds: of equal models few are said to be faster, of 1.2 times as fast all are."""
    draw = random.Random(0)
    told = {1.0: 0, 1.2: 0}
    for factor in told:
        for _ in range(100):
            times = [draw.gauss(1, 0.05) for _ in range(15)]
            than = [factor * draw.gauss(1, 0.05) for _ in range(15)]
            told[factor] += str(speed(times, than)) != NOT_FASTER
    assert told[1.0] <= 8
    assert told[1.2] == 100


def test_drift_of_the_machine_does_not_decide() -> None:
    """Both become twice as slow in the middle of the run; rounds are drawn in pairs."""
    drift = [1.0] * 8 + [2.0] * 7
    told = speed(drift, [1.1 * value for value in drift])
    assert told.ratio == pytest.approx(1.1)
    assert told.low > 1


def test_rounds_must_be_the_same() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        speed([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no rounds"):
        speed([], [])
