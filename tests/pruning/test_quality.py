"""Quality on the bundled model is that of the published methods, and beyond."""

import pytest

from tests.bench.quality import LIMITS, measure


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["magnitude@0.5", "wanda@0.5", "sparsegpt@0.5", "sparsegpt@2:4", "admm@0.5", "admm@0.6@sensitivity", "admm@2:4"],
)
def test_perplexity_is_within_its_limit(name: str) -> None:
    assert 27.7 < measure(name) <= LIMITS[name]
