"""Figures and their percentiles, against NumPy."""

import json
import math

import numpy as np
import pytest

from eval.figures import Figure, percentile


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("percent", [0, 5, 50, 95, 99, 100])
def test_percentile_is_that_of_numpy(count: int, percent: float) -> None:
    samples = np.random.default_rng(count).exponential(size=count)
    assert percentile(samples.tolist(), percent) == pytest.approx(np.percentile(samples, percent), rel=1e-12)


def test_figure_from_samples_is_their_median_with_percentiles() -> None:
    figure = Figure.from_samples([0.3, 0.1, 0.2, 0.9], "s")
    assert figure.value == figure.p50 == 0.25
    assert figure.p95 == pytest.approx(0.81, rel=1e-12)  # rank 2.85 of 0..3: 0.3 + 0.85 × (0.9 - 0.3)
    assert figure.samples == (0.3, 0.1, 0.2, 0.9)
    assert (figure.low, figure.high) == (None, None)


def test_figure_needs_samples() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        Figure.from_samples([], "s")


def test_record_leaves_out_what_does_not_exist() -> None:
    assert Figure(value=12, unit="bytes").as_dict() == {"value": 12, "unit": "bytes"}
    assert Figure(value=0.0, unit="fraction", low=0.0).as_dict() == {"value": 0.0, "unit": "fraction", "low": 0.0}


def test_record_of_a_collapsed_figure_is_strict_json_and_keeps_its_samples_in_place() -> None:
    record = Figure(value=math.nan, unit="perplexity", high=math.inf, samples=(3.0, math.inf, 5.0)).as_dict()
    assert record == {"value": None, "unit": "perplexity", "samples": [3.0, None, 5.0]}
    assert json.loads(json.dumps(record, allow_nan=False)) == record
