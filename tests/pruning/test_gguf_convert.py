"""GGUF files become plain folders with the very weights transformers reads from them."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pruning import gguf_convert
from pruning.errors import CancelledError, InputError
from pruning.gguf_convert import converted
from pruning.sources import WEIGHTS, bundled_file
from tests.pruning.folders import write_gguf
from tests.pruning.tiny import tiny_model

KIND = gguf.GGMLQuantizationType


@pytest.mark.parametrize("kind", [KIND.F32, KIND.Q8_0, KIND.Q4_1])
def test_weights_come_back_in_the_order_of_torch(tmp_path: Path, kind: KIND) -> None:
    expected = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), kind)
    folder = converted(tmp_path / "tiny.gguf", "a" * 64, tmp_path / "cache")
    found = load_file(folder / WEIGHTS)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(found[name].float().numpy(), values), name


def test_what_sixteen_bits_hold_exactly_takes_sixteen_bits(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", dtype=torch.bfloat16))
    found = load_file(converted(tmp_path / "tiny.gguf", "a" * 64, tmp_path / "cache") / WEIGHTS)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_a_copy_is_made_once_and_again_when_it_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    made = []
    convert = gguf_convert._convert
    monkeypatch.setattr(gguf_convert, "_convert", lambda *arguments: (made.append(1), convert(*arguments)))

    def use() -> Path:
        return converted(tmp_path / "tiny.gguf", "a" * 64, tmp_path / "cache")

    folder = use()
    use()
    assert len(made) == 1
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-1])
    use()
    assert len(made) == 2
    assert load_file(folder / WEIGHTS).keys()
    (folder / "config.json").unlink()
    use()
    assert len(made) == 3
    monkeypatch.setattr(gguf_convert, "_MAKER", "another version")
    use()
    assert len(made) == 4
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


def test_cancelling_leaves_nothing_behind_and_gguf_as_it_was(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    reader, dequantize = gguf.GGUFReader, gguf.dequantize

    def stop(phase: str, done: int, total: int, unit: str) -> None:
        assert (phase, unit) == ("converting", "weights")
        if done:
            raise CancelledError

    with pytest.raises(CancelledError):
        converted(tmp_path / "tiny.gguf", "a" * 64, tmp_path / "cache", stop)
    assert list((tmp_path / "cache").iterdir()) == []
    assert (gguf.GGUFReader, gguf.dequantize) == (reader, dequantize)


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    whole = (tmp_path / "tiny.gguf").read_bytes()
    for length in (len(whole) - 100, len(whole) // 2, 300):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"cut\.gguf"):
            converted(tmp_path / "cut.gguf", "b" * 64, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_that_lacks_a_layer_is_named(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config.num_hidden_layers = 4
    write_gguf(tmp_path / "tiny.gguf", model)
    with pytest.raises(InputError, match=r"lacks weights.*layers\.3"):
        converted(tmp_path / "tiny.gguf", "c" * 64, tmp_path / "cache")


@pytest.mark.slow
def test_the_bundled_model_is_what_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = bundled_file()
    folder = converted(path, "d" * 64, tmp_path / "cache")
    own = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, "local_files_only": True}
    expected = AutoModelForCausalLM.from_pretrained(**own, dtype=torch.float32).state_dict()
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    text = "Prune the tree, é 木 \n\t 12345 <|im_start|>user"
    one, other = AutoTokenizer.from_pretrained(**own), AutoTokenizer.from_pretrained(folder)
    assert other(text).input_ids == one(text).input_ids
    assert other.eos_token_id == one.eos_token_id
    assert other.chat_template == one.chat_template
