"""What may be asked for is validated with sentences a person can act on."""

import pytest
from pydantic import ValidationError

from pruning.recipe import Pattern, PruneStep, QuantizeStep, Recipe


def test_a_pattern_keeps_n_of_each_m() -> None:
    pattern = Pattern.parse("2:4")
    assert (pattern.kept, pattern.group, pattern.sparsity) == (2, 4, 0.5)
    assert str(pattern) == "2:4"
    assert Pattern.parse("1:4").sparsity == 0.75


@pytest.mark.parametrize("text", ["3:2", "2:2", "0:4", "2-4", "a:b", "", "2:4:8", "-2:4"])
def test_a_pattern_that_removes_nothing_or_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"N:M|greater than"):
        Pattern.parse(text)


@pytest.mark.parametrize("sparsity", [-0.01, 0.951, 1.5, float("nan")])
def test_sparsity_stays_between_0_and_95_percent(sparsity: float) -> None:
    with pytest.raises(ValidationError):
        PruneStep(method="wanda", sparsity=sparsity)


def test_a_pattern_fixes_the_sparsity() -> None:
    pattern = Pattern.parse("2:4")
    assert PruneStep(method="wanda", sparsity=0.5, pattern=pattern).sparsity == 0.5
    with pytest.raises(ValidationError, match="fixes the sparsity at"):
        PruneStep(method="wanda", sparsity=0.6, pattern=pattern)


def test_a_pattern_that_the_method_does_not_offer_names_those_it_does() -> None:
    with pytest.raises(ValidationError, match="choose 2:4 or 4:8"):
        PruneStep(method="wanda", sparsity=0.25, pattern=Pattern.parse("3:4"))


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValidationError, match=r"choose one of magnitude, .*wanda, sparsegpt, admm"):
        PruneStep(method="wander", sparsity=0.5)
    with pytest.raises(ValidationError, match="int8"):
        QuantizeStep(scheme="int9")


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ValidationError, match="forbidden"):
        PruneStep.model_validate({"method": "wanda", "sparsity": 0.5, "sparcity": 0.6})


@pytest.mark.parametrize(
    ("prune", "quantize", "label"),
    [
        (None, None, "Dense"),
        (PruneStep(method="wanda", sparsity=0.5), None, "Wanda 50%"),
        (PruneStep(method="sparsegpt", sparsity=0.333), None, "SparseGPT 33.3%"),
        (None, QuantizeStep(scheme="int8"), "int8"),
        (
            PruneStep(method="magnitude", sparsity=0.5, pattern=Pattern.parse("2:4")),
            QuantizeStep(scheme="int8"),
            "Magnitude 2:4 + int8",
        ),
    ],
)
def test_a_recipe_names_itself(prune: PruneStep | None, quantize: QuantizeStep | None, label: str) -> None:
    assert str(Recipe(prune=prune, quantize=quantize)) == label


def test_only_methods_that_look_at_text_need_calibration() -> None:
    def recipe(method: str) -> Recipe:
        return Recipe(prune=PruneStep(method=method, sparsity=0.5))

    assert not Recipe().needs_calibration
    assert not recipe("magnitude").needs_calibration
    assert recipe("wanda").needs_calibration
    assert recipe("sparsegpt").needs_calibration
