"""Every format takes every kind of variant it says it takes: it loads in its own library and writes the same text."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from pruning.artifact import dequantized_model
from pruning.calibration import Windows
from pruning.compress import compress
from pruning.errors import RunError
from pruning.export import FORMATS, card, export_variant
from tests.pruning.export.small import KINDS, llama_cpp, save_small, small_model
from tests.pruning.tiny import tiny_ids

PROMPT = [5, 9, 40, 77, 31, 200, 11]
QUANTIZED = ("int8", "int4")


def check_in_transformers(variant: Path, out: Path) -> None:
    """transformers reads ``out`` by itself, computes what ``variant`` does, and goes on from a prompt as it does."""
    expected, _ = dequantized_model(variant)
    found = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, expected(ids).logits)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(found.generate(ids, **options), expected.generate(ids, **options))
    assert AutoTokenizer.from_pretrained(out)("hello 12 <tool>").input_ids == [262, 223, 264, 223, 269]


def stored(out: Path) -> set[str]:
    """Names of the tensors in a transformers folder."""
    (path,) = out.glob("*.safetensors")
    with safe_open(path, framework="pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_folder_of_every_kind(kind: str, tied: bool, tmp_path: Path) -> None:
    save_small(tmp_path / "variant", kind, small_model(tie_word_embeddings=tied))
    export_variant(tmp_path / "variant", tmp_path / "out")
    check_in_transformers(tmp_path / "variant", tmp_path / "out")
    expected, _ = dequantized_model(tmp_path / "variant")
    assert stored(tmp_path / "out") == {name for name, _ in expected.named_parameters()}
    assert ("lm_head.weight" in stored(tmp_path / "out")) != tied


@pytest.mark.parametrize("shape", ["dense", "wanda", "width", "depth"])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_codes_of_every_shape(kind: str, shape: str, tmp_path: Path) -> None:
    model = compress(small_model(tie_word_embeddings=True), KINDS[shape], Windows(tiny_ids())).model
    save_small(tmp_path / "variant", kind, model)
    export_variant(tmp_path / "variant", tmp_path / "out", "compressed-tensors")
    check_in_transformers(tmp_path / "variant", tmp_path / "out")
    assert "lm_head.weight" not in stored(tmp_path / "out")


@pytest.mark.parametrize("shape", ["wanda", "width", "depth"])
def test_llama_cpp_runs_what_was_pruned_and_quantized(shape: str, tmp_path: Path) -> None:
    model = compress(small_model(), KINDS[shape], Windows(tiny_ids())).model
    save_small(tmp_path / "variant", "int8", model)
    export_variant(tmp_path / "variant", tmp_path / "out", "gguf")
    expected, _ = dequantized_model(tmp_path / "variant")
    _, found = llama_cpp(tmp_path / "out").generate(PROMPT, 1)
    with torch.no_grad():
        told = expected(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    assert (found[0] - told).square().mean().sqrt() < 0.01


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_is_left_when_the_card_finds_no_room(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_small(tmp_path / "variant", "int8")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pruning.export.write_card", full)
    with pytest.raises(RunError, match="disk is full: the exported model out"):
        export_variant(tmp_path / "variant", tmp_path / "out", form)
    assert [path.name for path in tmp_path.iterdir()] == ["variant"]


@pytest.mark.parametrize("form", FORMATS)
def test_the_variant_stays_as_it_is_and_its_files_tell_nothing_of_the_machine(form: str, tmp_path: Path) -> None:
    home = tmp_path / "home-of-somebody"
    save_small(home / "variant", "int8", name=str(home / "model"))
    before = {file.name: file.read_bytes() for file in (home / "variant").iterdir()}
    export_variant(home / "variant", home / "out", form)
    assert {file.name: file.read_bytes() for file in (home / "variant").iterdir()} == before
    assert (home / "out" / card.CARD).is_file()
    assert [file.name for file in (home / "out").iterdir() if b"home-of-somebody" in file.read_bytes()] == []


def test_a_folder_of_gguf_holds_the_file_and_the_card(tmp_path: Path) -> None:
    save_small(tmp_path / "variant")
    export_variant(tmp_path / "variant", tmp_path / "out", "gguf")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["README.md", "tiny-Dense-F16.gguf"]


@pytest.mark.parametrize("form", FORMATS)
def test_the_same_variant_and_record_give_the_same_files(form: str, tmp_path: Path) -> None:
    save_small(tmp_path / "variant", "int8")
    record = {"figures": {"perplexity": {"value": 12.5}}, "provenance": {"date": "2026-01-02"}}
    for name in ("one", "two"):
        export_variant(tmp_path / "variant", tmp_path / name, form, json.loads(json.dumps(record)))
    one, two = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two
