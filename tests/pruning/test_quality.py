"""Quality on the bundled model is that of the published methods, and beyond."""

from pathlib import Path

import pytest

from tests.bench.quality import LIMITS, measure
from tests.bench.quantized import Row, broken, make, measured, never_rounded


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["magnitude@0.5", "wanda@0.5", "sparsegpt@0.5", "sparsegpt@2:4", "admm@0.5", "admm@0.6@sensitivity", "admm@2:4"],
)
def test_perplexity_is_within_its_limit(name: str) -> None:
    assert 27.7 < measure(name) <= LIMITS[name]


@pytest.mark.slow
def test_what_makes_up_for_rounding_is_better_on_weights_that_were_never_rounded(tmp_path: Path) -> None:
    """GPTQ is nearer to the dense model than rounding to nearest, and joint than pruning, then rounding to nearest."""
    setting = never_rounded()
    dense = setting.model(setting.dtype)
    rows: dict[str, Row] = {}
    for method, schemes in {
        "none": ("none", "int8", "int4", "gptq-int4"),
        "wanda": ("int4", "gptq-int4"),
        "sparsegpt": ("none", "int4", "gptq-int4", "joint-int4"),
        "admm": ("none", "int4", "gptq-int4", "joint-int4"),
    }.items():
        for scheme in schemes:
            name = f"{method}+{scheme}"
            make(name, tmp_path / name, setting)
            rows[name] = measured(tmp_path / name, dense, setting.evaluation)
    assert broken(rows) == []
    loss = {name: row.divergence for name, row in rows.items()}
    assert loss["none+none"] == pytest.approx(0, abs=1e-6)
    assert loss["none+int8"] < 0.1 * loss["none+gptq-int4"] < 0.1 * loss["none+int4"]
    for method in ("sparsegpt", "admm"):
        assert loss[f"{method}+none"] < loss[f"{method}+joint-int4"] <= loss[f"{method}+int4"]
    # A mask of 1 bit, half the codes of 4, and a scale of 32 bits for 64 weights.
    assert rows["sparsegpt+joint-int4"].ratio == pytest.approx((1 + 4 * 0.5 + 32 / 64) / 16, abs=0.01)
