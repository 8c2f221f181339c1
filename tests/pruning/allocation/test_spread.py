"""Spreading a sparsity: the total is exact, and more goes where it was found to hurt less."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pruning.allocation.exact import HIGHEST, exact_shares
from pruning.allocation.owl import FACTOR, SPREAD, outlier_ratio
from pruning.allocation.owl import wished_shares as by_outliers
from pruning.allocation.sensitivity import Damage, kind_of, measure_damage
from pruning.allocation.sensitivity import wished_shares as by_damage
from pruning.allocation.spread import shares
from pruning.allocation.threshold import shares_below_one_threshold
from pruning.anatomy import decoder_blocks, prunable_layers
from pruning.calibration import Windows
from pruning.compress import compress
from pruning.errors import RunError
from pruning.methods import METHODS
from pruning.placement import Stage
from pruning.recipe import PruneStep, Recipe
from pruning.replay import capture, logits_of
from pruning.statistics import Observed
from tests.pruning.architectures import ARCHITECTURES, architecture
from tests.pruning.test_resume import fingerprint
from tests.pruning.tiny import tiny_ids, tiny_model

WINDOWS = Windows(tiny_ids())


def nothing() -> None:
    """The tick of a caller that does not watch."""


def spread(model: nn.Module, **step: object) -> dict[str, float]:
    asked = PruneStep.model_validate({"sparsity": 0.5, **step})
    return shares(model, decoder_blocks(model), asked, WINDOWS, Stage(model, None), nothing)


def removed(model: nn.Module, found: dict[str, float]) -> list[float]:
    return [found[layer.name] * layer.weight().numel() for layer in prunable_layers(model)]


@settings(deadline=None)
@given(
    wished=st.lists(st.floats(-0.3, 1.3), min_size=1, max_size=12),
    sizes=st.lists(st.integers(1, 5000), min_size=12, max_size=12),
    sparsity=st.floats(0.0, 0.95),
)
def test_counts_are_whole_and_add_up(wished: list[float], sizes: list[int], sparsity: float) -> None:
    names = [str(place) for place in range(len(wished))]
    of = dict(zip(names, sizes, strict=False))
    found = exact_shares(dict(zip(names, wished, strict=True)), of, sparsity)
    counts = [found[name] * of[name] for name in names]
    assert all(abs(count - round(count)) < 1e-6 for count in counts)
    assert sum(round(count) for count in counts) == math.floor(sparsity * sum(of.values()) + 0.5)
    assert all(0 <= found[name] <= HIGHEST + 1 / of[name] for name in names)


def test_a_constant_is_all_that_changes_where_there_is_room() -> None:
    wished, sizes = {"a": 0.3, "b": 0.5, "c": 0.7}, {"a": 1000, "b": 3000, "c": 1000}
    found = exact_shares(wished, sizes, 0.6)
    assert found == {"a": pytest.approx(0.4), "b": pytest.approx(0.6), "c": pytest.approx(0.8)}


def test_a_layer_at_its_bound_leaves_the_rest_to_the_others() -> None:
    found = exact_shares({"a": -2.0, "b": 0.5}, {"a": 100, "b": 100}, 0.4)
    assert found == {"a": 0.0, "b": 0.8}


@pytest.mark.parametrize("sparsity", [0.0, 0.31, 0.5, 0.95])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_threshold_is_that_of_all_weights_sorted_together(dtype: torch.dtype, sparsity: float) -> None:
    model = tiny_model("gpt2", dtype=dtype)
    layers = prunable_layers(model)
    everything = torch.cat([layer.weight().float().abs().flatten() for layer in layers])
    count = math.floor(sparsity * everything.numel() + 0.5)
    chosen = everything.argsort(stable=True)[:count]
    expected, start = [], 0
    for layer in layers:
        end = start + layer.weight().numel()
        expected.append(int(((chosen >= start) & (chosen < end)).sum()))
        start = end
    found = shares_below_one_threshold(layers, sparsity)
    assert [found[layer.name] * layer.weight().numel() for layer in layers] == pytest.approx(expected, abs=1e-6)


def test_the_smallest_of_all_weights_go() -> None:
    model, dense = tiny_model("llama"), tiny_model("llama")
    compress(model, Recipe(prune=PruneStep(method="magnitude-global", sparsity=0.4)), None)
    gone, kept = [], []
    for pruned, before in zip(prunable_layers(model), prunable_layers(dense), strict=True):
        zero = pruned.weight() == 0
        gone.append(before.weight()[zero].abs())
        kept.append(before.weight()[~zero].abs())
    assert float(torch.cat(gone).max()) <= float(torch.cat(kept).min())


def test_outliers_are_counted_over_the_whole_block() -> None:
    model = tiny_model("llama")
    block = decoder_blocks(model)[0]
    torch.manual_seed(0)
    seen = {
        layer.name: Observed(torch.rand(layer.in_features) * (20 if place == 2 else 1), None, 9)
        for place, layer in enumerate(block.layers)
    }
    scores: list[float] = []
    for layer in block.layers:
        norms = seen[layer.name].statistic
        assert norms is not None
        scores += [abs(w) * n for row in layer.weight().tolist() for w, n in zip(row, norms.tolist(), strict=True)]
    mean = sum(scores) / len(scores)
    expected = sum(score > FACTOR * mean for score in scores) / len(scores)
    assert 0 < expected < 0.5
    assert outlier_ratio(block, seen) == pytest.approx(expected, abs=2 / len(scores))


def test_more_outliers_mean_less_sparsity_over_twice_the_spread() -> None:
    found = by_outliers([0.01, 0.03, 0.02], 0.6)
    assert found == pytest.approx([0.6 + SPREAD, 0.6 - SPREAD, 0.6])
    assert by_outliers([0.02, 0.02], 0.6) == [0.6, 0.6]


def test_the_least_damage_has_equal_slopes() -> None:
    model = tiny_model("llama")
    blocks = decoder_blocks(model)
    kinds = {kind_of(block, layer): 1.0 for block in blocks for layer in block.layers}
    kinds["mlp.down_proj"] = 1.5
    damage = Damage(blocks=[1.0, 1.2, 0.9], kinds=kinds, growth=10.0)
    wished = by_damage(blocks, damage, 0.5)
    slopes = []
    for block, of_block in zip(blocks, damage.blocks, strict=True):
        for layer in block.layers:
            each = of_block * kinds[kind_of(block, layer)] / layer.weight().numel()
            slopes.append(each * math.exp(damage.growth * wished[layer.name]))
    assert max(slopes) / min(slopes) == pytest.approx(1.0)


@torch.no_grad()
def test_damage_is_the_divergence_of_the_model_with_that_part_pruned() -> None:
    model = tiny_model("llama")
    blocks = decoder_blocks(model)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.mul_(12)  # as drawn, the model hardly looks at its input
    before = fingerprint(model)
    step = PruneStep(method="magnitude", sparsity=0.6, allocation="sensitivity")
    damage = measure_damage(model, blocks, step, WINDOWS, Stage(model, None), nothing)
    assert fingerprint(model) == before
    ids = WINDOWS.ids[:42]  # what fits in the tokens looked at
    dense = model(ids).logits.double().log_softmax(-1)

    def divergence(chosen: list[Tensor], share: float = 0.6) -> float:
        kept = [weight.clone() for weight in chosen]
        for weight in chosen:
            count = math.floor(share * weight.numel() + 0.5)
            weight.view(-1)[weight.abs().flatten().argsort()[:count]] = 0
        other = model(ids).logits.double().log_softmax(-1)
        for weight, old in zip(chosen, kept, strict=True):
            weight.copy_(old)
        return float((dense.exp() * (dense - other)).sum() / ids.numel())

    for block, found in zip(blocks, damage.blocks, strict=True):
        assert found == pytest.approx(divergence([layer.weight() for layer in block.layers]), rel=1e-3)
    for kind, found in damage.kinds.items():
        alike = [layer.weight() for block in blocks for layer in block.layers if kind_of(block, layer) == kind]
        assert len(alike) == 3
        assert found == pytest.approx(divergence(alike), rel=1e-3)
    weights = [layer.weight() for layer in prunable_layers(model)]
    growth = math.log(divergence(weights) / divergence(weights, 0.5)) / 0.1
    assert damage.growth == pytest.approx(min(max(growth, 3.0), 20.0), rel=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gemma2", "mixtral", "gpt_oss"])
def test_the_end_of_the_model_alone_gives_its_logits(name: str) -> None:
    model = architecture(name)
    blocks = decoder_blocks(model)
    replay = capture(model, blocks, WINDOWS.ids)
    for index, block in enumerate(blocks):
        replay.hidden = [replay.run(index, 0, block.module)]
    expected = model(WINDOWS.ids, use_cache=False).logits
    assert torch.equal(logits_of(model, blocks, replay, replay.hidden[0]), expected)
    part = logits_of(model, blocks, replay, replay.hidden[0][:, 3:9])
    assert torch.allclose(part, expected[:, 3:9], atol=1e-6)


@pytest.mark.parametrize("allocation", ["owl", "sensitivity"])
@pytest.mark.parametrize("name", [*list(ARCHITECTURES)[::4], "mixtral", "gpt_oss"])
def test_the_total_is_exact_on_any_architecture(name: str, allocation: str) -> None:
    model = architecture(name)
    found = spread(model, method="wanda", sparsity=0.47, allocation=allocation)
    assert found.keys() == {layer.name for layer in prunable_layers(model)}
    everything = sum(layer.weight().numel() for layer in prunable_layers(model))
    assert sum(round(count) for count in removed(model, found)) == math.floor(0.47 * everything + 0.5)
    assert len(set(found.values())) > 1


@pytest.mark.parametrize(
    ("method", "allocation"),
    [
        (name, allocation)
        for name, method in METHODS.items()
        if method.kind == "weights"
        for allocation in method.allocations
        if allocation != "uniform"
    ],
)
def test_layers_lose_what_was_spread(method: str, allocation: str) -> None:
    model = tiny_model("llama")
    step = PruneStep(method=method, sparsity=0.5, allocation=allocation)
    made = compress(model, Recipe(prune=step), WINDOWS)
    expected = spread(tiny_model("llama"), method=method, allocation=allocation)
    assert {layer.name: layer.requested_sparsity for layer in made.layers} == expected
    for layer in prunable_layers(model):
        assert int((layer.weight() == 0).sum()) == round(expected[layer.name] * layer.weight().numel())


def test_layers_that_differ_by_a_digit_are_kinds_of_their_own_and_experts_are_not() -> None:
    block = decoder_blocks(architecture("opt"))[0]
    assert {kind_of(block, layer) for layer in block.layers} >= {"fc1", "fc2"}
    for name in ("mixtral", "deepseek_v3"):
        block = decoder_blocks(architecture(name))[-1]
        experts = [layer for layer in block.layers if "experts" in layer.name and "shared" not in layer.name]
        assert len(experts) > 2 * len({kind_of(block, layer) for layer in experts})


def test_predictions_that_are_not_finite_are_named() -> None:
    model: Any = tiny_model("llama")
    model.lm_head.weight.data[3] = torch.inf
    with pytest.raises(RunError, match=r"what the model predicts on the calibration text.*not finite"):
        spread(model, method="wanda", sparsity=0.5, allocation="sensitivity")
