"""Every method on every architecture: exact counts, finite logits, and nothing else touched."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pruning.anatomy import ExpertLayer, LinearLayer, decoder_blocks, prunable_layers, unpruned
from pruning.calibration import Windows
from pruning.compress import compress
from pruning.methods import METHODS
from pruning.recipe import PruneStep, Recipe
from pruning.replay import capture, hidden_of
from tests.pruning.architectures import ARCHITECTURES, EXPERTS, architecture
from tests.pruning.tiny import tiny_ids

WINDOWS = Windows(tiny_ids(windows=4, length=20))
WEIGHT_METHODS = sorted(name for name, method in METHODS.items() if method.kind == "weights")
EXPERT_LAYERS = {
    "deepseek_v3": 2,
    "gpt_oss": 2,
    "granitemoe": 2,
    "llama4_text": 2,
    "mixtral": 2,
    "olmoe": 2,
    "phimoe": 2,
    "qwen2_moe": 2,
    "qwen3_moe": 2,
    "qwen3_next": 2,
}
"""3-D tensors in one mixture of each."""


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weight_of(layer: LinearLayer) -> str:
    """The name of the parameter that ``layer`` is or is part of."""
    return layer.tensor.name if isinstance(layer, ExpertLayer) else f"{layer.name}.weight"


def untouched(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer that is no prunable layer's weight."""
    pruned = {weight_of(layer) for layer in prunable_layers(model)}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.clone() for name, tensor in tensors.items() if name not in pruned}


def test_there_are_enough_architectures() -> None:
    assert len(ARCHITECTURES) >= 40
    assert len({type(make()) for make in ARCHITECTURES.values()}) == len(ARCHITECTURES)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_weight_is_pruned_or_left_for_a_reason(name: str) -> None:
    model = architecture(name)
    layers = prunable_layers(model)
    left = unpruned(model)
    pruned = {weight_of(layer) for layer in layers}
    assert not pruned & {entry.name for entry in left}
    everything = {known for known, p in model.named_parameters(remove_duplicate=False) if p.ndim >= 2}
    assert pruned | {entry.name for entry in left} == everything
    parameters = sum(p.numel() for p in model.parameters() if p.ndim >= 2)
    assert sum(layer.weight().numel() for layer in layers) + sum(entry.weights for entry in left) == parameters
    assert all(entry.reason for entry in left)
    head = next((entry for entry in left if entry.name.endswith(("lm_head.weight", "embed_out.weight"))), None)
    assert head is None or head.reason == "output head" or head.reason.startswith("tied: it is ")
    routers = [entry for entry in left if entry.reason == "router"]
    experts = {weight_of(layer) for layer in layers if isinstance(layer, ExpertLayer)}
    assert len(experts) == EXPERT_LAYERS.get(name, 0) * len(routers)
    assert len([layer for layer in layers if isinstance(layer, ExpertLayer)]) == EXPERTS * len(experts)
    assert bool(routers) == (name in EXPERT_LAYERS)


@pytest.mark.parametrize("attention", ["as it comes", "eager"])
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_replayed_blocks_are_the_model_bit_for_bit(name: str, attention: str) -> None:
    model: Any = architecture(name)
    if attention == "eager":  # which is handed masks where the other is told there is nothing to mask
        model.set_attn_implementation(attention)
    blocks = decoder_blocks(model)
    expected: list[Tensor] = []
    handles = [
        block.module.register_forward_hook(lambda module, args, output: expected.append(hidden_of(output)))
        for block in blocks
    ]
    model(WINDOWS.ids, use_cache=False)
    for handle in handles:
        handle.remove()
    replay = capture(model, blocks, WINDOWS.ids)
    assert len(expected) == len(blocks)
    for index, block in enumerate(blocks):
        replay.hidden = [replay.run(index, 0, block.module)]
        assert torch.equal(replay.hidden[0], expected[index])


@pytest.mark.parametrize("method", WEIGHT_METHODS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_method_on_every_architecture(name: str, method: str) -> None:
    model = architecture(name)
    before = untouched(model)
    dense = [layer.weight().clone() for layer in prunable_layers(model)]
    with torch.no_grad():
        logits = model(WINDOWS.ids).logits
    made = compress(model, Recipe(prune=PruneStep(method=method, sparsity=0.5)), WINDOWS)
    layers = prunable_layers(made.model)
    assert [entry.name for entry in made.layers] == [layer.name for layer in layers]
    zeros = [int((layer.weight() == 0).sum()) for layer in layers]
    if METHODS[method].scope == "layer":
        assert zeros == [math.floor(layer.weight().numel() / 2 + 0.5) for layer in layers]
    assert sum(zeros) == math.floor(sum(weight.numel() for weight in dense) / 2 + 0.5)
    assert [entry.sparsity for entry in made.layers] == [
        count / weight.numel() for count, weight in zip(zeros, dense, strict=True)
    ]
    after = untouched(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[known], before[known]) for known in before)
    with torch.no_grad():
        found = model(WINDOWS.ids).logits
    assert bool(torch.isfinite(found).all())
    assert not torch.equal(found, logits)
    fallbacks = {entry.name: entry.note for entry in made.layers if entry.note is not None}
    if METHODS[method].needs_calibration:
        starved = {entry.name for entry in made.layers if entry.tokens == 0}
        assert set(fallbacks) == starved
        assert all("magnitude" in note for note in fallbacks.values())
        if name != "bart":  # whose layers that look at an encoder are given nothing without one
            assert len(starved) <= 2 * EXPERTS
            assert all("experts" in layer for layer in starved)
    else:
        assert not fallbacks
