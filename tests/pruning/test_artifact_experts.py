"""Experts in one tensor come back bit for bit, and sizes are told beside those of the dense model."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from pruning.artifact import rebuild, save_artifact, stored_sizes
from pruning.artifact_format import read_layout
from pruning.compress import compress
from pruning.errors import InputError
from pruning.export import export_variant
from tests.pruning.architectures import architecture
from tests.pruning.test_artifact import TOKENIZER, assert_same, change, recipe, rewrite, save
from tests.pruning.tiny import tiny_ids, tiny_model


def save_experts(name: str, folder: Path, sparsity: float, int8: bool = False) -> nn.Module:
    model = architecture(name, dtype=torch.bfloat16)
    compress(model, recipe(sparsity, int8), None)
    save_artifact(model, TOKENIZER, folder, {})
    return model


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3", "llama4_text"])
def test_experts_come_back_bit_for_bit(name: str, int8: bool, tmp_path: Path) -> None:
    saved = save_experts(name, tmp_path / "variant", 0.5, int8)
    found, layout = rebuild(tmp_path / "variant")
    assert_same(found, saved)
    # By hand: the parameters of three dimensions are the experts.
    experts = {key: value for key, value in saved.named_parameters() if value.ndim == 3}
    assert experts.keys() == {key for key, record in layout.layers.items() if record.experts}
    for key, value in experts.items():
        record = layout.layers[key]
        assert (record.storage, record.shape) == ("bitmask", tuple(value.shape))
        assert record.zeros == value.numel() // 2
        assert layout.masked[key].kept == value.numel() - record.zeros
    assert not any("gate.weight" in key or "router" in key for key in layout.layers)
    logits = saved(tiny_ids()).logits
    assert torch.equal(found(tiny_ids()).logits, logits)


def test_sizes_count_experts_among_the_pruned_layers(tmp_path: Path) -> None:
    save_experts("mixtral", tmp_path / "half", 0.5)
    save_experts("mixtral", tmp_path / "dense", 0.0)
    attention, experts = 2 * (32 * 32 * 2 + 16 * 32 * 2), 2 * 6 * (96 * 32 + 32 * 48)
    for folder, share in (("half", 0.5), ("dense", 1.0)):
        sizes = stored_sizes(tmp_path / folder)
        assert sizes.pruned_layer_weights == attention + experts
        assert sizes.dense16_pruned_layer_bytes == 2 * (attention + experts)
        masks = (attention + experts) / 8 if share < 1 else 0
        assert sizes.pruned_layer_bytes == 2 * share * (attention + experts) + masks


def test_exported_experts_give_the_same_logits_in_transformers(tmp_path: Path) -> None:
    saved = save_experts("mixtral", tmp_path / "variant", 0.5)
    export_variant(tmp_path / "variant", tmp_path / "plain")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16, local_files_only=True)
    assert torch.equal(found(tiny_ids()).logits, saved(tiny_ids()).logits)


EXPERTS_LAYER = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"shape": [6, 48, 32]}, r"shape \(6, 32, 48\) where \(6, 48, 32\) was expected"),
        ({"shape": [48, 32, 6]}, "was expected"),
        ({"shape": [6, 32], "zeros": 96}, r"down_proj is stored as bitmask, and its tensors are not"),
        ({"zeros": 0}, "is said to have 0 zeros"),
        ({"storage": "dense"}, "is stored as dense, and its tensors are not"),
        ({"storage": "bitmask+int8"}, "experts in one tensor are not stored as bitmask.int8"),
    ],
)
def test_records_of_experts_that_do_not_fit_are_named(record: dict[str, object], why: str, tmp_path: Path) -> None:
    save_experts("mixtral", tmp_path / "variant", 0.5)
    layout, _ = read_layout(tmp_path / "variant")
    layers = layout.model_dump(mode="json")["layers"]
    layers[EXPERTS_LAYER].update(record)
    change(tmp_path / "variant", layers=layers)
    with pytest.raises(InputError, match=why):
        read_layout(tmp_path / "variant")


def test_version_1_is_read_and_has_no_experts(tmp_path: Path) -> None:
    saved = save(tmp_path / "variant")
    layout, _ = read_layout(tmp_path / "variant")
    rewrite(tmp_path / "variant", {**layout.model_dump(mode="json", exclude={"dense", "files"}), "version": 1})
    found, older = rebuild(tmp_path / "variant")
    assert_same(found, saved)
    assert older.version == 1
    assert stored_sizes(tmp_path / "variant").dense16_bytes == 2 * layout.parameters
    save_experts("mixtral", tmp_path / "experts", 0.5)
    change(tmp_path / "experts", version=1, files={})
    with pytest.raises(InputError, match="version 1 has no experts"):
        read_layout(tmp_path / "experts")


def test_ratios_are_to_the_dense_model_where_a_variant_has_fewer_parameters(tmp_path: Path) -> None:
    model = tiny_model("llama")
    save_artifact(model, TOKENIZER, tmp_path / "same", {})
    save_artifact(model, TOKENIZER, tmp_path / "smaller", {}, dense=(100_000, 60_000))
    same, smaller = stored_sizes(tmp_path / "same"), stored_sizes(tmp_path / "smaller")
    assert (smaller.dense16_bytes, smaller.dense16_pruned_layer_bytes) == (200_000, 120_000)
    assert (same.dense16_bytes, same.dense16_pruned_layer_bytes) == (2 * same.parameters, 2 * same.pruned_layer_weights)
    assert (smaller.parameters, smaller.pruned_layer_weights) == (same.parameters, same.pruned_layer_weights)
    assert smaller.pruned_layer_bytes == same.pruned_layer_bytes
