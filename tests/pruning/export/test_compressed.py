"""What is written as compressed-tensors is what the library itself packs, and transformers computes the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import pack_to_int32
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from pruning.artifact import dequantized_model, rebuild, save_artifact
from pruning.calibration import Windows
from pruning.compress import compress
from pruning.errors import InputError
from pruning.export import export_variant
from pruning.quantize.layer import QuantizedLinear
from pruning.recipe import PruneStep, QuantizeStep, Recipe
from tests.pruning.folders import tiny_tokenizer
from tests.pruning.tiny import tiny_ids, tiny_model

FAMILIES = ("llama", "opt", "gpt_neox", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")


def save(
    folder: Path, family: str = "llama", scheme: str | None = "int8", dtype: torch.dtype = torch.float32, **prune: Any
) -> None:
    model = tiny_model(family, dtype=dtype)
    # Widths of 48 inputs have no group of 32.
    if scheme == "int4":
        model = _wide(family, dtype)
    step = QuantizeStep(scheme=scheme, group=32 if scheme == "int4" else None) if scheme else None
    recipe = Recipe(prune=PruneStep(**prune) if prune else None, quantize=step)
    made = compress(model, recipe, Windows(tiny_ids()))
    save_artifact(made.model, tiny_tokenizer(), folder, {"recipe": "as asked"})


def _wide(family: str, dtype: torch.dtype) -> nn.Module:
    config = tiny_model(family).config
    if hasattr(config, "intermediate_size"):
        config.intermediate_size = 64
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_what_poda_does(family: str, scheme: str, tmp_path: Path) -> None:
    save(tmp_path / "variant", family, scheme)
    export_variant(tmp_path / "variant", tmp_path / "out", "compressed-tensors")
    expected, _ = dequantized_model(tmp_path / "variant")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    with torch.no_grad():
        torch.testing.assert_close(found(tiny_ids()).logits, expected(tiny_ids()).logits)
    prompt = tiny_ids(1, 4)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(found.generate(prompt, **options), expected.generate(prompt, **options))
    tied = expected.get_input_embeddings().weight is expected.get_output_embeddings().weight
    assert (found.get_input_embeddings().weight is found.get_output_embeddings().weight) == tied
    if family == "llama":  # for some families transformers makes a tokenizer of their own kind
        assert AutoTokenizer.from_pretrained(tmp_path / "out")("w3 w9").input_ids == [3, 9]


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_files_hold_what_the_library_packs(scheme: str, tmp_path: Path) -> None:
    save(tmp_path / "variant", "llama", scheme, torch.bfloat16, method="magnitude", sparsity=0.5)
    export_variant(tmp_path / "variant", tmp_path / "out", "compressed-tensors")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    model, _ = rebuild(tmp_path / "variant")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    for name, layer in layers.items():
        packed = pack_to_int32(layer.whole_codes(), 8 if scheme == "int8" else 4)
        assert torch.equal(tensors.pop(f"{name}.weight_packed"), packed)
        assert torch.equal(tensors.pop(f"{name}.weight_scale"), layer.scale.view(len(packed), -1))
        assert tensors.pop(f"{name}.weight_shape").tolist() == [layer.out_features, layer.in_features]
    assert len(layers) == 21
    # The rest once each: the head is tied to the embedding.
    assert tensors.keys() == {name for name, _ in model.named_parameters()}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    quantization = config["quantization_config"]
    (group,) = quantization["config_groups"].values()
    assert (config["dtype"], config["architectures"]) == ("bfloat16", ["LlamaForCausalLM"])
    assert (quantization["quant_method"], quantization["format"]) == ("compressed-tensors", "pack-quantized")
    assert quantization["ignore"] == ["lm_head"]
    assert group["targets"] == ["Linear"]
    expected = {"int8": (8, "channel", None), "int4": (4, "group", 32)}[scheme]
    assert tuple(group["weights"][key] for key in ("num_bits", "strategy", "group_size")) == expected


def test_words_are_filled_up_where_inputs_are_no_multiple_of_four(tmp_path: Path) -> None:
    config = tiny_model("llama").config
    config.intermediate_size = 46
    model = AutoModelForCausalLM.from_config(config).eval()
    compress(model, Recipe(quantize=QuantizeStep(scheme="int8")), None)
    save_artifact(model, tiny_tokenizer(), tmp_path / "variant", {})
    export_variant(tmp_path / "variant", tmp_path / "out", "compressed-tensors")
    expected, _ = dequantized_model(tmp_path / "variant")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    with torch.no_grad():
        torch.testing.assert_close(found(tiny_ids()).logits, expected(tiny_ids()).logits)


def test_rounded_inputs_stay_rounded(tmp_path: Path) -> None:
    """The library rounds to 255 levels and 256, Poda to 255: close, not equal."""
    save(tmp_path / "variant", "llama", "int8-dynamic")
    export_variant(tmp_path / "variant", tmp_path / "out", "compressed-tensors")
    expected, _ = rebuild(tmp_path / "variant")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    with torch.no_grad():
        torch.testing.assert_close(found(tiny_ids()).logits, expected(tiny_ids()).logits, atol=0.02, rtol=0)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "int-quantized"
    assert config["config_groups"]["group_0"]["input_activations"]["strategy"] == "token"
    assert load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8


def test_a_narrower_model_is_written_too(tmp_path: Path) -> None:
    save(tmp_path / "variant", "llama", "int8", method="width", sparsity=0.3)
    export_variant(tmp_path / "variant", tmp_path / "out", "compressed-tensors")
    expected, _ = dequantized_model(tmp_path / "variant")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    with torch.no_grad():
        torch.testing.assert_close(found(tiny_ids()).logits, expected(tiny_ids()).logits)


@pytest.mark.parametrize(
    ("family", "scheme", "cause"), [("llama", None, "is not quantized"), ("gpt2", "int8", "Conv1D")]
)
def test_what_the_format_has_no_place_for_is_refused(
    family: str, scheme: str | None, cause: str, tmp_path: Path
) -> None:
    save(tmp_path / "variant", family, scheme)
    with pytest.raises(InputError, match=f"{cause}.*choose --format transformers"):
        export_variant(tmp_path / "variant", tmp_path / "out", "compressed-tensors")
    assert not (tmp_path / "out").exists()


def test_unknown_formats_and_full_folders_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "variant")
    with pytest.raises(InputError, match="no format 'onnx' to export to: choose transformers or"):
        export_variant(tmp_path / "variant", tmp_path / "out", "onnx")
    with pytest.raises(InputError, match="is not empty"):
        export_variant(tmp_path / "variant", tmp_path / "variant", "compressed-tensors")
