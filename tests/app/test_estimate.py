"""What a sweep says before it starts."""

from collections.abc import Mapping

import pytest

from app.estimate import ModelSize, bytes_on_disk, estimate, said
from app.runs.spec import RunSpec
from tests.app.factories import make_spec
from tests.app.frames import DENSE16_PRUNED, frame, row

MODEL = ModelSize(parameters=1000, prunable=800)


def ten_seconds(spec: RunSpec) -> Mapping[str, float | None]:
    return {"loading": 4.0, "scoring": 6.0}


def never(spec: RunSpec) -> Mapping[str, float | None]:
    return {"loading": 4.0, "scoring": None}


@pytest.mark.parametrize(
    ("spec", "bytes_"),
    [
        (make_spec(None), 2000),
        (make_spec("wanda", 0.5), 200 * 2 + 800 * (1 + 1 / 8)),
        (make_spec("wanda", 0.03), 200 * 2 + 800 * 2),
        (make_spec(None, quantize="int8"), 200 * 2 + 800),
        (make_spec("wanda", 0.5, quantize="int8"), 200 * 2 + 800 * (0.5 + 1 / 8)),
        (make_spec("wanda", 0.5).model_copy(update={"dtype": "float32"}), 200 * 4 + 800 * (2 + 1 / 8)),
    ],
)
def test_bytes_follow_the_format(spec: RunSpec, bytes_: float) -> None:
    assert bytes_on_disk(spec, MODEL) == bytes_


def test_an_unknown_share_of_prunable_layers_promises_no_saving() -> None:
    assert bytes_on_disk(make_spec("wanda", 0.5), ModelSize(1000)) == 2000


def test_the_size_of_a_model_is_learned_from_its_results() -> None:
    results = frame(row(model="known", parameters=500, dtype="float32"))
    assert ModelSize.known(7, "known", results) == ModelSize(500, int(DENSE16_PRUNED / 2), 4.0)
    assert ModelSize.known(7, "new", results) == ModelSize(7)
    assert ModelSize.known(None, "new", results) is None


def test_dense_is_added_and_counted_apart() -> None:
    found = estimate([make_spec("wanda", 0.5), make_spec("wanda", 0.6)], set(), MODEL, ten_seconds)
    assert (found.asked, found.to_make, found.dense_added, found.seconds) == (2, 2, True, 30.0)
    assert said(found) == (
        "2 variants, and the dense model to compare with, about 4.44 kB on disk, about 30 s on this machine."
    )


def test_what_is_there_costs_nothing() -> None:
    specs = [make_spec("wanda", 0.5), make_spec("wanda", 0.6)]
    there = {specs[0].run_id, specs[0].dense().run_id}
    found = estimate(specs, there, MODEL, ten_seconds)
    assert (found.to_make, found.dense_added, found.seconds) == (1, False, 10.0)
    assert said(found).startswith("2 variants, 1 of them there already, ")


def test_all_there() -> None:
    spec = make_spec("wanda", 0.5)
    assert "all there already" in said(estimate([spec], {spec.run_id, spec.dense().run_id}, MODEL, never))


def test_time_is_not_guessed_before_it_was_measured() -> None:
    found = estimate([make_spec("wanda", 0.5)], set(), None, never)
    assert found.seconds is None
    assert found.bytes_on_disk is None
    assert "once a run like these has been measured" in said(found)


def test_nothing_chosen() -> None:
    assert "choose" in said(estimate([], set(), MODEL, never))


def test_the_same_variant_asked_twice_is_one() -> None:
    assert estimate([make_spec(None), make_spec(None)], set(), MODEL, ten_seconds).asked == 1
