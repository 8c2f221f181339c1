"""The id of a run follows from what was asked, files by content, and from nothing that cannot matter."""

import pytest
from pydantic import ValidationError

from app.runs.plain import plainly
from app.runs.spec import CalibrationSpec, EvaluationSpec, RunSpec
from pruning.methods import METHODS
from pruning.recipe import PruneStep, Recipe
from tests.app.factories import make_spec


def test_the_same_fields_give_the_same_id_of_twelve_hexadecimal_digits() -> None:
    first, second = make_spec("wanda", 0.5), make_spec("wanda", 0.5)
    assert first.run_id == second.run_id
    assert len(first.run_id) == 12
    assert set(first.run_id) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    ("spec", "run_id"),
    [
        (make_spec(None), "d3cb71b6e765"),
        (make_spec("wanda", 0.5), "77c659deffc5"),
        (make_spec("magnitude", 0.5), "4cdf10161083"),
        (make_spec("sparsegpt", pattern="2:4", quantize="int8"), "fd4c4e3ea226"),
        (make_spec("sparsegpt", pattern="2:4", quantize="int8", seed=3), "f8bfa942526a"),
    ],
)
def test_ids_of_what_could_be_asked_for_first_stay_what_they_were(spec: RunSpec, run_id: str) -> None:
    """As recorded before a pruning step had an allocation, statistics and a seed: finished runs are found again."""
    assert spec.run_id == run_id


def step(**changes: object) -> RunSpec:
    spec = make_spec("wanda", 0.5)
    assert spec.recipe.prune is not None
    changed = spec.recipe.prune.model_copy(update=changes)
    return spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"prune": changed})})


def test_later_fields_of_a_step_count_where_they_say_something() -> None:
    changed = [step(allocation="owl"), step(allocation="sensitivity"), step(statistics="shared"), step(seed=1)]
    assert len({spec.run_id for spec in [step(), *changed]}) == 5
    for spec in changed:
        assert RunSpec.model_validate_json(spec.model_dump_json()).run_id == spec.run_id


def test_every_field_that_matters_changes_the_id() -> None:
    base = make_spec("wanda", 0.5)
    changed = [
        make_spec("magnitude", 0.5),
        make_spec("wanda", 0.6),
        make_spec("wanda", pattern="2:4"),
        make_spec("wanda", 0.5, quantize="int8"),
        make_spec("wanda", 0.5, seed=1),
        make_spec("wanda", 0.5, device="cpu"),
        base.model_copy(update={"model": "owner/name"}),
        base.model_copy(update={"revision": "main"}),
        base.model_copy(update={"model_hash": "a" * 64}),
        base.model_copy(update={"dtype": "float32"}),
        base.model_copy(update={"evaluation": EvaluationSpec(windows=17)}),
        base.model_copy(update={"evaluation": EvaluationSpec(length=256)}),
    ]
    assert len({spec.run_id for spec in [base, *changed]}) == len(changed) + 1


def test_a_file_counts_by_its_content_and_not_by_its_path() -> None:
    def spec(path: str, text_hash: str) -> RunSpec:
        return RunSpec(
            model=path, model_hash="m" * 64, evaluation=EvaluationSpec(source=f"{path}.txt", text_hash=text_hash)
        )

    assert spec("/a/model", "1").run_id == spec("/b/model", "1").run_id
    assert spec("/a/model", "1").run_id != spec("/a/model", "2").run_id


def test_dense_is_one_run_whatever_calibration_is_asked_beside_it() -> None:
    calibrated = RunSpec(model="bundled", calibration=CalibrationSpec(seed=7, windows=3))
    assert calibrated.calibration is None
    assert calibrated.run_id == RunSpec(model="bundled").run_id
    magnitude = make_spec("magnitude", 0.5, seed=1)
    assert magnitude.run_id == make_spec("magnitude", 0.5, seed=2).run_id


def test_the_dense_run_of_a_protocol_keeps_everything_but_the_recipe() -> None:
    spec = make_spec("wanda", 0.5, device="cpu").model_copy(update={"evaluation": EvaluationSpec(windows=3)})
    assert spec.dense() == RunSpec(model="bundled", device="cpu", evaluation=EvaluationSpec(windows=3))


def test_a_spec_survives_its_own_json() -> None:
    spec = make_spec("sparsegpt", pattern="2:4", quantize="int8", seed=3)
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            lambda: PruneStep(method="wanda", sparsity=1.5),
            "sparsity 1.5 is out of range: choose a share from 0 to 0.95, such as 0.5 for half of the weights",
        ),
        (
            lambda: PruneStep(method="wand", sparsity=0.5),
            f"unknown method 'wand': choose one of {', '.join(METHODS)}",
        ),
        (lambda: CalibrationSpec(windows=0), "windows 0 is too small: the least is 1"),
        (
            lambda: RunSpec(model="bundled", dtype="int3"),
            "dtype 'int3' is not known: choose auto, float32, bfloat16 or float16",
        ),
        (lambda: RunSpec(model="bundled", colour="red"), "there is no setting called colour"),
        (
            lambda: RunSpec(model="bundled", recipe=Recipe(prune=PruneStep(method="wanda", sparsity=0.5))),
            "Wanda 50% looks at calibration text: say which",
        ),
        (
            lambda: CalibrationSpec(windows="many"),
            "windows 'many' is not a whole number",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_plain_sentence(wrong: object, sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        wrong()  # type: ignore[operator]  # each is a function without arguments
    assert str(plainly(caught.value)) == sentence
