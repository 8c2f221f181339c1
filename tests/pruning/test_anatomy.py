"""Anatomy: the right layers of every family, and no others."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from pruning.anatomy import LinearLayer, Unpruned, decoder_blocks, prunable_layers, unpruned
from pruning.errors import InputError
from tests.pruning.architectures import architecture
from tests.pruning.tiny import CONFIGS, LAYERS, tiny_model


@pytest.mark.parametrize("family", CONFIGS)
def test_every_linear_layer_of_every_block_and_no_other(family: str) -> None:
    model = tiny_model(family)
    blocks = decoder_blocks(model)
    assert [len(block.layers) for block in blocks] == [LAYERS[family]] * 3
    layers = prunable_layers(model)
    assert len({layer.name for layer in layers}) == 3 * LAYERS[family]
    for layer in layers:
        assert model.get_submodule(layer.name) is layer.module
        assert not any(word in layer.name for word in ("head", "embed", "wte", "project", "norm"))
    for block in blocks:
        assert model.get_submodule(block.name) is block.module
        assert all(layer.name.startswith(block.name + ".") for layer in block.layers)


def test_names_are_those_of_the_model() -> None:
    names = [layer.name for layer in decoder_blocks(tiny_model("llama"))[1].layers]
    assert names[0] == "model.layers.1.self_attn.q_proj"
    assert names[-1] == "model.layers.1.mlp.down_proj"


def test_conv1d_is_read_and_written_as_out_in() -> None:
    conv = Conv1D(nf=6, nx=4)
    layer = LinearLayer("conv", conv)
    assert (layer.out_features, layer.in_features) == (6, 4)
    weight = torch.arange(24.0).view(6, 4)
    storage = conv.weight
    with torch.no_grad():
        layer.set_weight(weight)
    assert conv.weight is storage
    assert torch.equal(conv.weight, weight.T)
    assert torch.equal(layer.weight(), weight)
    inputs = torch.randn(3, 4)
    torch.testing.assert_close(conv(inputs), inputs @ weight.T + layer.bias)


def test_bias_may_be_absent() -> None:
    assert LinearLayer("linear", nn.Linear(2, 3, bias=False)).bias is None


def test_the_outermost_list_with_the_most_weights_wins() -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    model = nn.Module()
    model.vision = nn.ModuleList([nn.Linear(2, 2)])
    model.layers = nn.ModuleList([Expert(), Expert()])
    assert [block.name for block in decoder_blocks(model)] == ["layers.0", "layers.1"]
    assert len(prunable_layers(model)) == 6


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.ModuleList([nn.ReLU()]), nn.Sequential(nn.Linear(2, 2))])
def test_a_model_without_blocks_is_refused(model: nn.Module) -> None:
    with pytest.raises(InputError, match="no list of decoder blocks"):
        decoder_blocks(model)


@pytest.mark.parametrize(
    ("model", "left"),
    [
        (
            "llama",
            [
                ("model.embed_tokens.weight", 96 * 32, "embedding"),
                ("lm_head.weight", 0, "tied: it is model.embed_tokens.weight"),
            ],
        ),
        (
            "qwen2",
            [("model.embed_tokens.weight", 96 * 32, "embedding"), ("lm_head.weight", 96 * 32, "output head")],
        ),
        (
            "opt",
            [
                ("model.decoder.embed_tokens.weight", 96 * 16, "embedding"),
                ("model.decoder.embed_positions.weight", 66 * 32, "embedding"),
                ("model.decoder.project_out.weight", 32 * 16, "linear layer outside of the decoder blocks"),
                ("model.decoder.project_in.weight", 16 * 32, "linear layer outside of the decoder blocks"),
                ("lm_head.weight", 0, "tied: it is model.decoder.embed_tokens.weight"),
            ],
        ),
        (
            "gpt_oss",
            [
                ("model.embed_tokens.weight", 96 * 32, "embedding"),
                *(
                    (f"model.layers.{block}.mlp.{name}", weights, reason)
                    for block in range(2)
                    for name, weights, reason in (
                        ("router.weight", 6 * 32, "router"),
                        ("experts.gate_up_proj_bias", 6 * 96, "biases of experts"),
                        ("experts.down_proj_bias", 6 * 32, "biases of experts"),
                    )
                ),
                ("lm_head.weight", 96 * 32, "output head"),
            ],
        ),
    ],
)
def test_what_is_not_pruned_is_listed_with_its_reason(model: str, left: list[tuple[str, int, str]]) -> None:
    assert unpruned(architecture(model)) == [Unpruned(*entry) for entry in left]


def test_convolutions_and_matrices_of_no_layer_are_listed_as_such() -> None:
    reasons = {entry.name: entry.reason for entry in unpruned(architecture("recurrent_gemma"))}
    inside = "model.layers.0.temporal_block"
    assert reasons[f"{inside}.conv_1d.weight"] == "convolution"
    assert reasons[f"{inside}.rg_lru.input_gate_weight"] == "parameter of RecurrentGemmaRglru, which is no linear layer"
