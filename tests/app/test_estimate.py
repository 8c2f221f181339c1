"""What a sweep says before it starts."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from app.estimate import Estimate, ModelSize, bytes_on_disk, estimate, in_words
from app.runs.spec import RunSpec
from pruning.methods import METHODS
from tests.app.factories import make_spec
from tests.app.frames import DENSE16, DENSE16_PRUNED, frame, row

MODEL = ModelSize(parameters=1000, prunable=800)


def ten_seconds(spec: RunSpec) -> Mapping[str, float | None]:
    return {"loading": 4.0, "scoring": 6.0}


def only_dense(spec: RunSpec) -> Mapping[str, float | None]:
    return {"loading": 4.0, "compressing": None if spec.recipe.prune is not None else 1.0}


@pytest.mark.parametrize(
    ("spec", "bytes_"),
    [
        (make_spec(None), 2000),
        (make_spec("wanda", 0.5), 200 * 2 + 800 * (1 + 1 / 8)),
        (make_spec("wanda", 0.03), 200 * 2 + 800 * 2),
        (make_spec(None, quantize="int8"), 200 * 2 + 800),
        (make_spec("wanda", 0.5, quantize="int8"), 200 * 2 + 800 * (0.5 + 1 / 8)),
        (make_spec(None, quantize="int4"), 200 * 2 + 800 * (4 / 8 + 2 / 64)),
        (make_spec("wanda", 0.5, quantize="int4"), 200 * 2 + 800 * (4 / 8 * 0.5 + 1 / 8 + 2 / 64)),
        (
            make_spec("wanda", 0.5, quantize="int4").model_copy(update={"dtype": "float32"}),
            200 * 4 + 800 * (4 / 8 * 0.5 + 1 / 8 + 4 / 64),
        ),
        (make_spec("wanda", 0.5).model_copy(update={"dtype": "float32"}), 200 * 4 + 800 * (2 + 1 / 8)),
    ],
)
def test_bytes_follow_the_format(spec: RunSpec, bytes_: float) -> None:
    assert bytes_on_disk(spec, MODEL) == bytes_


@pytest.mark.parametrize(
    ("quantize", "bytes_"), [(None, 200 * 2 + 600 * 2), ("int8", 200 * 2 + 600), ("int4", 200 * 2 + 600 * 17 / 32)]
)
def test_a_smaller_model_has_no_mask(monkeypatch: pytest.MonkeyPatch, quantize: str | None, bytes_: float) -> None:
    monkeypatch.setitem(METHODS, "narrow", replace(METHODS["wanda"], name="narrow", kind="width", patterns=()))
    assert bytes_on_disk(make_spec("narrow", 0.25, quantize=quantize), MODEL) == bytes_


def test_an_unknown_share_of_prunable_layers_promises_no_saving() -> None:
    assert bytes_on_disk(make_spec("wanda", 0.5), ModelSize(1000)) == 2000


def test_the_size_of_a_model_is_learned_from_its_results() -> None:
    results = frame(row(model="known", parameters=500, dtype="float32"))
    assert ModelSize.known(7, "known", results) == ModelSize(int(DENSE16 / 2), int(DENSE16_PRUNED / 2), 4.0)
    assert ModelSize.known(7, "new", results) == ModelSize(7)
    assert ModelSize.known(None, "new", results) is None


def test_a_sweep_is_the_sum_of_what_is_not_there() -> None:
    specs = [make_spec(None), make_spec("wanda", 0.5), make_spec("wanda", 0.5)]
    assert estimate(specs, set(), MODEL, ten_seconds) == Estimate(2, 2, 2000 + 1300, 20.0, 2)
    assert estimate(specs, {specs[0].run_id}, MODEL, ten_seconds) == Estimate(2, 1, 1300, 10.0, 1)


def test_time_is_only_what_was_measured() -> None:
    specs = [make_spec(None), make_spec("wanda", 0.5)]
    assert estimate(specs, set(), None, only_dense) == Estimate(2, 2, None, 5.0, 1)
    assert estimate(specs[1:], set(), None, only_dense) == Estimate(1, 1, None, None, 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Estimate(4, 4, 540.4e6, 190.0, 4), "about 540 MB on disk, about 3 min on this machine."),
        (Estimate(4, 1, None, 20.0, 1), "3 there already, about 20 s on this machine."),
        (Estimate(4, 4, None, 60.0, 2), "About 1 min for 2 of them; nothing like the others was measured here yet."),
        (Estimate(4, 4, None, None, 0), "How long it takes is known once one like these was measured here."),
        (Estimate(4, 0, None, None, 0), "4 variants, all made or waiting already."),
    ],
)
def test_an_estimate_in_words(given: Estimate, said: str) -> None:
    assert in_words(given).endswith(said)
    assert in_words(given).startswith("4 variants")
