"""Intervals of a mean, against SciPy."""

import math

import numpy as np
import pytest
from scipy import stats

from eval.intervals import mean_interval, student_t


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 15, 20, 99, 1000])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_student_t_is_that_of_scipy(freedom: int, confidence: float) -> None:
    expected = stats.t.ppf((1 + confidence) / 2, freedom)
    assert student_t(freedom, confidence) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("count", [2, 3, 16])
def test_interval_of_the_mean_is_that_of_scipy(count: int) -> None:
    samples = np.random.default_rng(count).normal(3.0, 0.5, count)
    expected = stats.t.interval(0.95, count - 1, loc=samples.mean(), scale=stats.sem(samples))
    assert mean_interval(samples.tolist()) == pytest.approx(expected, rel=1e-9)


def test_equal_samples_have_an_interval_of_no_width() -> None:
    assert mean_interval([2.5, 2.5, 2.5]) == (2.5, 2.5)


@pytest.mark.parametrize("samples", [[], [3.0], [3.0, math.nan], [3.0, math.inf, 4.0]])
def test_no_interval_where_there_is_none(samples: list[float]) -> None:
    assert mean_interval(samples) is None
