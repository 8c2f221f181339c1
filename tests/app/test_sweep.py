"""A sweep becomes specs, dense first, or is refused in one sentence before anything is loaded."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from app.runs.spec import CalibrationSpec, EvaluationSpec
from app.runs.sweep import PRESETS, SweepRequest, identified, reference_of
from pruning.errors import InputError
from pruning.methods import METHODS
from tests.app.factories import make_spec


def test_a_sweep_is_dense_and_every_combination_once() -> None:
    request = SweepRequest(
        methods=("magnitude", "wanda"),
        sparsities=(0.3, 0.5),
        patterns=("2:4",),
        quantize=("none", "int8"),
        statistics="sequential",
    )
    labels = [str(spec.recipe) for spec in request.specs()]
    expected = [
        f"{method} {share}{scheme}"
        for method, share, scheme in product(("Magnitude", "Wanda"), ("30%", "50%", "2:4"), ("", " + int8"))
    ]
    assert labels[0] == "Dense"
    assert sorted(labels[1:]) == sorted(expected)


def test_quantization_alone_is_asked_for_by_method_none() -> None:
    assert [str(spec.recipe) for spec in SweepRequest(methods=("none",), quantize=("int8",)).specs()] == [
        "Dense",
        "int8",
    ]
    assert [str(spec.recipe) for spec in SweepRequest().specs()] == ["Dense"]


def test_repeated_choices_are_one_run() -> None:
    specs = SweepRequest(methods=("wanda", "wanda"), sparsities=(0.5, 0.5)).specs()
    assert [str(spec.recipe) for spec in specs] == ["Dense", "Wanda 50%"]


def test_every_spec_carries_the_protocol_and_the_file_hash_of_the_model() -> None:
    request = SweepRequest(
        methods=("magnitude", "wanda"),
        sparsities=(0.5,),
        calibration=CalibrationSpec(windows=4, seed=9),
        evaluation=EvaluationSpec(windows=3, length=64),
        device="cpu",
        dtype="float32",
    )
    dense, magnitude, wanda = request.specs()
    for spec in (dense, magnitude, wanda):
        assert (spec.model, spec.device, spec.dtype) == ("bundled", "cpu", "float32")
        assert spec.evaluation == EvaluationSpec(windows=3, length=64)
        assert spec.model_hash is not None
        assert len(spec.model_hash) == 64
    assert dense.calibration is None
    assert magnitude.calibration is None
    assert wanda.calibration == CalibrationSpec(windows=4, seed=9)


def test_allocations_are_combined_and_what_there_is_not_is_said() -> None:
    request = SweepRequest(
        methods=("wanda",),
        sparsities=(0.6,),
        patterns=("2:4",),
        allocations=("uniform", "owl"),
        statistics="sequential",
    )
    assert [str(spec.recipe) for spec in request.specs()] == ["Dense", "Wanda 60%", "Wanda 60% (OWL)", "Wanda 2:4"]
    assert request.left_out() == ["2:4 with OWL"]


def test_statistics_are_shared_by_itself_only_where_that_was_measured_to_cost_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(METHODS, "wanda", replace(METHODS["wanda"], shared_up_to=0.5))
    asked = {"methods": ("wanda",), "sparsities": (0.4, 0.5, 0.6)}
    shared = [
        [str(spec.recipe) for spec in SweepRequest(**asked, **choice).specs()]
        for choice in ({}, {"statistics": "shared"}, {"statistics": "sequential"})
    ]
    assert shared == [
        ["Dense", "Wanda 40% (shared)", "Wanda 50% (shared)", "Wanda 60%"],
        ["Dense", "Wanda 40% (shared)", "Wanda 50% (shared)", "Wanda 60% (shared)"],
        ["Dense", "Wanda 40%", "Wanda 50%", "Wanda 60%"],
    ]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"methods": ("wanda",), "sparsities": (0.5,), "allocations": ()}, "Choose at least one of the allocations"),
        ({"methods": ("wanda",), "sparsities": (0.5,), "allocations": ("fair",)}, "unknown allocation 'fair'"),
        (
            {"methods": ("magnitude",), "sparsities": (0.5,), "statistics": "shared"},
            "Nothing here shares statistics with other variants",
        ),
        ({"methods": ("wanda",)}, "Wanda needs at least one sparsity or pattern: choose how much to remove"),
        ({"sparsities": (0.5,)}, "A sparsity or pattern needs a method that removes weights: choose one"),
        ({"methods": ("none",), "patterns": ("2:4",)}, "needs a method that removes weights"),
        ({"methods": ("wanda",), "sparsities": (0.5, 1.5)}, "sparsity 1.5 is out of range"),
        ({"methods": ("wanda",), "patterns": ("3:2",)}, "3:2 removes nothing"),
        ({"methods": ("wanda",), "patterns": ("1:8",)}, "pattern 1:8 is not offered by Wanda: choose 2:4 or 4:8"),
        ({"methods": ("wnda",), "sparsities": (0.5,)}, "unknown method 'wnda'"),
        ({"methods": ("none",), "quantize": ("int3",)}, "unknown quantization 'int3'"),
        ({"quantize": ()}, "Choose at least one of the quantizations"),
        ({"quantize": ("none", "int4"), "groups": (128,)}, "group 128 does not divide a width of 576 inputs"),
        ({"quantize": ("int8", "joint-int4")}, "joint int4 is one pass with SparseGPT or ADMM, and nothing is pruned"),
        ({"quantize": ("int8",), "groups": (64,)}, "int8 has one scale per output channel"),
        ({"quantize": ("float8", "int8"), "device": "cpu"}, "float8 runs on cuda only, not on cpu: choose int8"),
        ({"model": "./missing"}, "no such folder"),
        ({"evaluation": EvaluationSpec(source="./missing.txt")}, "there is no text file at ./missing.txt"),
        (
            {"methods": ("wanda",), "sparsities": (0.5,), "calibration": CalibrationSpec(source="./missing.txt")},
            "there is no text file at ./missing.txt",
        ),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_sentence(asked: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        SweepRequest.model_validate(asked).specs()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_presets_can_be_made_and_the_first_is_dense_and_one_variant() -> None:
    sizes = {name: len(preset.request.specs()) for name, preset in PRESETS.items()}
    assert sizes == {"look": 2, "methods": 10, "bits": 4, "small": 7}
    assert all(preset.request.left_out() == [] for preset in PRESETS.values())


def test_every_group_size_is_a_variant_of_each_quantization_that_has_groups() -> None:
    request = SweepRequest(
        methods=("none", "wanda"),
        sparsities=(0.5,),
        quantize=("int8", "int4"),
        groups=(64, 32),
        statistics="sequential",
    )
    assert [str(spec.recipe) for spec in request.specs()] == [
        "Dense",
        *("int8", "int4", "int4 g32"),
        *("Wanda 50% + int8", "Wanda 50% + int4", "Wanda 50% + int4 g32"),
    ]
    assert request.left_out() == []


def test_what_cannot_be_stored_so_is_left_out_and_named() -> None:
    """The bundled model's layers have 576 or 1536 inputs: 128 does not divide 576."""
    request = SweepRequest(
        methods=("none", "wanda", "sparsegpt"),
        sparsities=(0.5,),
        quantize=("joint-int4", "int4"),
        groups=(64, 128),
        statistics="sequential",
    )
    assert [str(spec.recipe) for spec in request.specs()] == [
        "Dense",
        "int4",
        "Wanda 50% + int4",
        "SparseGPT 50% + joint int4",
        "SparseGPT 50% + int4",
    ]
    assert request.left_out() == [
        *("joint int4 alone", "joint int4 after Wanda"),
        *("joint int4 in groups of 128", "int4 in groups of 128"),
    ]
    assert SweepRequest(quantize=("float8", "int8")).left_out() == []


def test_files_are_named_by_content_and_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("some words " * 1000)
    spec = make_spec("wanda").model_copy(
        update={"calibration": CalibrationSpec(source="mine.txt"), "evaluation": EvaluationSpec(source="./mine.txt")}
    )
    first = identified(spec)
    assert first.calibration is not None
    assert first.calibration.source == first.evaluation.source == str(tmp_path / "mine.txt")
    # printf "some words %.0s" $(seq 1000) | sha256sum
    assert first.evaluation.text_hash == "09450c730f33dc2e1fd98755f3b014202bb045af537bbc28bff127354166ff87"
    Path("moved.txt").write_text("some words " * 1000)
    moved = spec.model_copy(
        update={"calibration": CalibrationSpec(source="moved.txt"), "evaluation": EvaluationSpec(source="moved.txt")}
    )
    assert identified(moved).run_id == first.run_id
    Path("mine.txt").write_text("other words " * 1000)
    assert identified(spec).run_id != first.run_id


def test_a_hub_model_keeps_its_revision_apart() -> None:
    spec = identified(make_spec("wanda", model="owner/name@v1.0"))
    assert (spec.model, spec.revision, spec.model_hash) == ("owner/name", "v1.0", None)
    assert str(reference_of(spec)) == "owner/name@v1.0"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b" \n\n", "mine.txt has no text in it"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"ten bytes.", "mine.txt has 10 bytes of text, too few for 16 windows of 512 tokens: lower the windows"),
    ],
)
def test_a_text_that_cannot_do_is_refused_before_a_model_is_loaded(
    tmp_path: Path, content: bytes, sentence: str
) -> None:
    file = tmp_path / "mine.txt"
    file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        SweepRequest(evaluation=EvaluationSpec(source=str(file))).specs()
    assert sentence in str(caught.value)


def test_calibration_needs_no_more_than_one_window(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_bytes(b"x" * 256)
    asked = {"methods": ("wanda",), "sparsities": (0.5,)}
    SweepRequest(**asked, calibration=CalibrationSpec(source=str(file), length=256)).specs()
    with pytest.raises(InputError, match="too few for one calibration window of 257 tokens"):
        SweepRequest(**asked, calibration=CalibrationSpec(source=str(file), length=257)).specs()
