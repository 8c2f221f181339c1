"""Quality on the bundled model is that of the published methods."""

import pytest

from tests.bench.quality import limit, measure


@pytest.mark.slow
@pytest.mark.parametrize("name", ["magnitude@0.5", "wanda@0.5", "sparsegpt@0.5", "sparsegpt@2:4"])
def test_perplexity_is_that_of_the_published_method_or_lower(name: str) -> None:
    assert 28.0 < measure(name) <= limit(name)
