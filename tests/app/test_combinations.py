"""Combinations there are, those there are not, and which statistics a sweep is made from by itself."""

import pytest

from app.runs.combinations import can_share, combine, is_structured, with_statistics
from pruning.errors import InputError
from pruning.methods import METHODS, Method
from pruning.recipe import Recipe
from tests.app.factories import recipe

ABOUT = {"summary": "", "paper": "", "cost": ""}
NARROW = Method("narrow", "Narrow", "gram", (), kind="width", allocations=("uniform",), **ABOUT)
DICE = Method("dice", "Dice", "none", ("2:4",), seeded=True, **ABOUT)
KNOWN = Method("known", "Known", "norms", ("2:4",), shared_up_to=0.5, **ABOUT)
UNKNOWN = Method("unknown", "Unknown", "gram", ("2:4",), **ABOUT)


@pytest.fixture(autouse=True)
def _methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """One method of each kind, whatever else is registered."""
    for method in (NARROW, DICE, KNOWN, UNKNOWN):
        monkeypatch.setitem(METHODS, method.name, method)


def said(
    methods: list[str],
    sparsities: list[float],
    patterns: list[str] | None = None,
    allocations: list[str] | None = None,
    seed: int = 0,
) -> tuple[list[str], list[str]]:
    combined = combine(methods, sparsities, patterns or [], allocations or ["uniform"], seed)
    return [str(step) for step in combined.steps], combined.left_out


def test_every_combination_is_made_in_the_order_asked_for() -> None:
    assert said(["known", "dice"], [0.3], ["2:4"], ["uniform", "owl"]) == (
        ["Known 30%", "Known 30% (OWL)", "Known 2:4", "Dice 30%", "Dice 30% (OWL)", "Dice 2:4"],
        ["2:4 with OWL"],
    )


def test_what_one_method_lacks_is_left_out_and_said_while_others_have_it() -> None:
    steps, left_out = said(["narrow", "known"], [0.25], ["2:4"], ["uniform", "owl"])
    assert steps == ["Narrow 25%", "Known 25%", "Known 25% (OWL)", "Known 2:4"]
    assert left_out == ["Narrow with OWL", "Narrow 2:4", "2:4 with OWL"]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ((["narrow"], [0.25], None, ["owl"]), "Narrow has no owl allocation: choose uniform"),
        ((["known", "narrow"], [], ["2:4"]), "pattern 2:4 is not offered by Narrow: choose a sparsity without one"),
        ((["known"], [], ["2:4"], ["owl"]), "it takes no owl allocation: choose uniform"),
        ((["known"], [0.5], ["half"]), "'half' is not a pattern"),
        ((["known"], [0.5, 1.5]), "sparsity 1.5 is out of range"),
        ((["known"], [0.5], None, ["uniform", "fair"]), "unknown allocation 'fair'"),
        ((["knwn"], [0.5]), "unknown method 'knwn'"),
    ],
)
def test_a_method_left_with_nothing_is_refused_in_one_sentence(asked: tuple[list[str], ...], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        said(*asked)  # type: ignore[arg-type]  # as listed
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_seed_is_that_of_methods_that_draw() -> None:
    steps = combine(["known", "dice"], [0.5], [], ["uniform"], 7).steps
    assert [step.seed for step in steps] == [0, 7]


def test_only_what_looks_at_text_and_removes_single_weights_can_share() -> None:
    assert [can_share(recipe(name, 0.5)) for name in ("narrow", "dice", "known", "unknown")] == [
        False,
        False,
        True,
        True,
    ]
    assert not can_share(recipe("known", 0.0))
    assert not can_share(Recipe())
    assert [
        is_structured(one) for one in (recipe("narrow", 0.25), recipe("narrow", 0.0), recipe("known"), Recipe())
    ] == [
        True,
        False,
        False,
        False,
    ]


def shared(recipes: list[Recipe]) -> list[str]:
    return [str(one) for one in recipes if one.prune is not None and one.prune.statistics == "shared"]


def test_by_itself_a_sweep_shares_up_to_where_that_costs_nothing() -> None:
    asked = [
        Recipe(),
        *(recipe("known", share) for share in (0.3, 0.5, 0.6)),
        recipe("known", pattern="2:4"),
        recipe("unknown", 0.3),
        recipe("dice", 0.3),
        recipe("narrow", 0.3),
    ]
    made = with_statistics(asked, "auto")
    assert shared(made) == ["Known 30% (shared)", "Known 50% (shared)"]
    assert [one.prune.sparsity if one.prune else 0 for one in made] == [0, 0.3, 0.5, 0.6, 0.5, 0.3, 0.3, 0.3]


def test_one_variant_alone_has_nobody_to_share_with() -> None:
    assert shared(with_statistics([Recipe(), recipe("known", 0.3), recipe("known", 0.6)], "auto")) == []
    twice = with_statistics([recipe("known", 0.3), recipe("known", 0.3, quantize="int8")], "auto")
    assert len(shared(twice)) == 2


def test_shared_is_for_all_that_can_and_refused_where_none_can() -> None:
    asked = [recipe("known", 0.9), recipe("unknown", pattern="2:4"), recipe("narrow", 0.25), recipe("dice")]
    assert shared(with_statistics(asked, "shared")) == ["Known 90% (shared)", "Unknown 2:4 (shared)"]
    with pytest.raises(InputError, match="choose sequential statistics"):
        with_statistics([Recipe(), recipe("narrow", 0.25), recipe("dice")], "shared")


def test_sequential_is_for_all() -> None:
    assert shared(with_statistics([recipe("known", 0.3), recipe("known", 0.5)], "sequential")) == []
