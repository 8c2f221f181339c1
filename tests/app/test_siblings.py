"""Which runs share statistics."""

from app.runs.siblings import shares_statistics, siblings_of
from app.runs.spec import CalibrationSpec, RunSpec
from tests.app.factories import make_spec, sharing


def test_the_same_model_text_dtype_and_device_share() -> None:
    spec = sharing("wanda", 0.5)
    other_text = spec.model_copy(update={"calibration": CalibrationSpec(windows=9)})
    asked = [
        spec,
        sharing("sparsegpt", 0.3),
        sharing("wanda", 0.5, quantize="int8"),
        sharing("sparsegpt", 0.3),
        make_spec("wanda", 0.4),
        make_spec(None),
        sharing("wanda", 0.3, device="cpu"),
        sharing("wanda", 0.3, seed=1),
        sharing("wanda", 0.3).model_copy(update={"dtype": "float32"}),
        sharing("wanda", 0.3, model="owner/name"),
        other_text,
    ]
    assert [str(one.recipe) for one in siblings_of(spec, asked)] == [
        "SparseGPT 30% (shared)",
        "Wanda 50% (shared) + int8",
    ]
    assert siblings_of(make_spec("wanda", 0.5), asked) == []


def test_how_they_are_measured_does_not_matter() -> None:
    spec = sharing("wanda", 0.5)
    longer = spec.model_copy(update={"evaluation": spec.evaluation.model_copy(update={"windows": 99})})
    assert siblings_of(spec, [longer]) == [longer]


def test_files_count_by_content() -> None:
    def on(path: str, text_hash: str) -> RunSpec:
        text = CalibrationSpec(source=f"{path}.txt", text_hash=text_hash)
        return sharing("wanda", 0.5 if path == "/a" else 0.3).model_copy(
            update={"model": path, "model_hash": "m" * 64, "calibration": text}
        )

    assert siblings_of(on("/a", "1"), [on("/b", "1")]) == [on("/b", "1")]
    assert siblings_of(on("/a", "1"), [on("/b", "2")]) == []


def test_a_step_that_removes_nothing_shares_nothing() -> None:
    assert shares_statistics(sharing("wanda", 0.5))
    assert not shares_statistics(sharing("wanda", 0.0))
    assert not shares_statistics(make_spec("wanda", 0.5))
