"""Sizes and zeros, against counts done by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from eval.size import count_zeros, prunable_weights, resident_bytes, size_figures
from pruning.anatomy import decoder_blocks
from pruning.artifact import StoredSizes
from pruning.errors import InputError
from pruning.quantize.int8 import Int8Linear, quantize_rows
from tests.eval.tiny import gpt2, llama, opt

STORED = StoredSizes(
    total_bytes=1000,
    weight_file_bytes=900,
    pruned_layer_bytes=600,
    pruned_layer_weights=300,
    dense16_bytes=900,
    dense16_pruned_layer_bytes=600,
    parameters=450,
)


def prune_first_rows(model: nn.Module, rows: int) -> int:
    """Zero the first rows of every prunable layer; how many weights that is."""
    zeros = 0
    for block in decoder_blocks(model):
        for layer in block.layers:
            weight = layer.weight().clone()
            weight[:rows] = 0
            layer.set_weight(weight)
            zeros += rows * weight.shape[1]
    return zeros


def quantize(model: nn.Module) -> None:
    """Every prunable layer to int8, in place."""
    for block in decoder_blocks(model):
        for layer in block.layers:
            codes, scale = quantize_rows(layer.weight())
            model.set_submodule(layer.name, Int8Linear(codes, scale, layer.bias))


@pytest.mark.parametrize("make", [llama, gpt2, opt])
@pytest.mark.parametrize("quantized", [False, True])
def test_sparsity_counts_the_zeros_of_the_prunable_layers(make: Any, quantized: bool) -> None:
    model = make()
    weights = sum(layer.weight().numel() for block in decoder_blocks(model) for layer in block.layers)
    already_zero = sum(int((parameter == 0).sum()) for parameter in model.parameters())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    zeros = prune_first_rows(model, 5)
    extra = 0
    if quantized:
        quantize(model)
        # Rounding makes further zeros of weights below half a step, which are counted as they are.
        codes = [module.codes for module in model.modules() if isinstance(module, Int8Linear)]
        extra = sum(int((code == 0).sum()) for code in codes) - zeros
    figures = size_figures(model, STORED)
    assert figures["sparsity"].value == (zeros + extra) / weights
    assert figures["sparsity_of_model"].value == (already_zero + zeros + extra) / parameters
    assert figures["sparsity"].unit == figures["sparsity_of_model"].unit == "fraction"


def test_weights_that_went_with_smaller_layers_are_removed_too() -> None:
    """A model of fewer weights than the dense one: what is gone counts as zeros do."""
    model = llama()
    weights = sum(layer.weight().numel() for block in decoder_blocks(model) for layer in block.layers)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    already_zero = sum(int((parameter == 0).sum()) for parameter in model.parameters())
    zeros = prune_first_rows(model, 3)
    stored = replace(
        STORED,
        pruned_layer_weights=weights,
        parameters=parameters,
        dense16_pruned_layer_bytes=2 * (weights + 1000),
        dense16_bytes=2 * (parameters + 1100),
    )
    figures = size_figures(model, stored)
    assert figures["sparsity"].value == pytest.approx(1 - (weights - zeros) / (weights + 1000), rel=1e-12)
    kept = parameters - already_zero - zeros
    assert figures["sparsity_of_model"].value == pytest.approx(1 - kept / (parameters + 1100), rel=1e-12)


def test_prunable_weights_have_the_names_they_had_before_quantization() -> None:
    model = gpt2()
    before = {name: weight.shape for name, weight in prunable_weights(model)}
    quantize(model)
    assert {name: weight.shape for name, weight in prunable_weights(model)} == before


def test_a_model_without_prunable_layers_is_refused() -> None:
    with pytest.raises(InputError):
        list(prunable_weights(nn.Sequential(nn.Linear(4, 4))))


def test_zeros_of_either_sign_count_and_small_numbers_do_not() -> None:
    assert count_zeros(torch.tensor([0.0, -0.0, 1e-40, 1.0])) == 2


def test_resident_bytes_count_shared_storage_once() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(10, 4))
    model.tied = model.weight
    model.register_buffer("view", model.weight.detach()[:2])
    model.register_buffer("codes", torch.zeros(7, dtype=torch.int8))
    assert resident_bytes(model) == 10 * 4 * 4 + 7


def test_resident_bytes_of_a_tied_model_are_those_of_its_tensors() -> None:
    model = llama()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    buffers = sum(buffer.nbytes for buffer in {buffer.data_ptr(): buffer for buffer in model.buffers()}.values())
    assert resident_bytes(model) == sum(parameter.nbytes for parameter in model.parameters()) + buffers


def test_sizes_on_disk_are_those_of_the_artifact() -> None:
    figures = size_figures(llama(), STORED)
    assert (figures["size_on_disk"].value, figures["size_on_disk"].unit) == (1000, "bytes")
    assert (figures["size_of_pruned_layers"].value, figures["size_of_pruned_layers"].unit) == (600, "bytes")
    assert (figures["bits_per_weight"].value, figures["bits_per_weight"].unit) == (16.0, "bits")
