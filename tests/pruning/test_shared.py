"""Variants made together: from the dense model's statistics, each as if it were alone."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pruning import shared as sharing
from pruning.allocation import spread
from pruning.anatomy import decoder_blocks
from pruning.calibration import Windows
from pruning.checkpoint import Checkpoint
from pruning.compress import compress
from pruning.errors import InputError
from pruning.methods import METHODS
from pruning.recipe import Pattern, PruneStep, QuantizeStep, Recipe
from pruning.shared import Order, compress_shared
from tests.pruning.test_resume import fingerprint
from tests.pruning.tiny import tiny_ids, tiny_model

WINDOWS = Windows(tiny_ids())
INT8 = QuantizeStep(scheme="int8")
SHARING = [name for name, method in METHODS.items() if method.needs_calibration and method.kind == "weights"]


def recipe(method: str, ask: float | str = 0.5, quantize: QuantizeStep | None = None) -> Recipe:
    pattern = Pattern.parse(ask) if isinstance(ask, str) else None
    sparsity = pattern.sparsity if pattern is not None else float(ask)
    step = PruneStep(method=method, sparsity=sparsity, pattern=pattern, statistics="shared")
    return Recipe(prune=step, quantize=quantize)


def dense_inputs(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """What every prunable layer is given by the whole dense model, (tokens, features), in one plain forward."""
    seen: dict[str, list[Tensor]] = {}
    handles = [
        layer.module.register_forward_pre_hook(
            lambda module, args, name=layer.name: seen.setdefault(name, []).append(
                args[0].reshape(-1, args[0].shape[-1])
            )
        )
        for block in decoder_blocks(model)
        for layer in block.layers
    ]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_wanda_is_scored_by_the_dense_models_inputs(family: str) -> None:
    dense = tiny_model(family)
    inputs = dense_inputs(dense, WINDOWS.ids)
    model = tiny_model(family)
    compress(model, recipe("wanda"), WINDOWS)
    for block in decoder_blocks(model):
        for layer in block.layers:
            before = dense.get_submodule(layer.name)
            weight = (before.weight.T if isinstance(before, Conv1D) else before.weight).detach()
            scores = weight.abs() * inputs[layer.name].norm(dim=0)
            removed = scores[layer.weight() == 0]
            share = layer.in_features // 2
            assert removed.numel() == layer.out_features * share
            for row in range(layer.out_features):
                border = scores[row].sort().values[share - 1]
                gone = scores[row][layer.weight()[row] == 0]
                assert gone.numel() == share
                assert float(gone.max()) <= float(border) * (1 + 1e-5)


def test_every_variant_is_what_it_would_be_alone(tmp_path: Path) -> None:
    recipes = [recipe(method, ask) for method in SHARING for ask in (0.3, 0.5, "2:4")]
    recipes += [recipe(method, 0.5, INT8) for method in SHARING]
    orders = [Order(one, Checkpoint(tmp_path / str(place), "k")) for place, one in enumerate(recipes)]
    model = tiny_model("qwen3")
    before = fingerprint(model)
    assert compress_shared(model, orders, WINDOWS) == []
    assert fingerprint(model) == before
    for order in orders:
        together, alone = tiny_model("qwen3"), tiny_model("qwen3")
        made = compress(together, order.recipe, WINDOWS, checkpoint=order.checkpoint)
        single = compress(alone, order.recipe, WINDOWS)
        assert fingerprint(together) == fingerprint(alone), str(order.recipe)
        assert made.together == len(recipes)
        assert single.together == 1
        assert [layer.output_error for layer in made.layers] == [layer.output_error for layer in single.layers]


def test_time_is_what_was_done_once_and_the_variants_own(tmp_path: Path) -> None:
    orders = [Order(recipe(method), Checkpoint(tmp_path / method, "k")) for method in SHARING]
    compress_shared(tiny_model("llama"), orders, WINDOWS)
    made = [compress(tiny_model("llama"), order.recipe, WINDOWS, checkpoint=order.checkpoint) for order in orders]
    common = {one.common_seconds for one in made}
    assert len(common) == 1
    for one in made:
        assert one.common_seconds is not None
        assert one.common_seconds > 0
        own = sum(layer.seconds for layer in one.layers)
        assert one.seconds == pytest.approx(one.common_seconds + own)


def test_time_is_that_of_the_first_look_and_of_spreading_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(work: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def slow(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return work(*args, **kwargs)

        return slow

    monkeypatch.setattr(sharing, "capture", slowly(sharing.capture, 0.3))
    monkeypatch.setattr(spread, "shares", slowly(spread.shares, 0.7))
    spreading = recipe("wanda")
    assert spreading.prune is not None
    spreading = Recipe(prune=spreading.prune.model_copy(update={"allocation": "owl"}))
    orders = [
        Order(one, Checkpoint(tmp_path / str(place), "k")) for place, one in enumerate([spreading, recipe("wanda")])
    ]
    started = time.perf_counter()
    compress_shared(tiny_model("llama"), orders, WINDOWS)
    wall = time.perf_counter() - started
    owl, uniform = (compress(tiny_model("llama"), o.recipe, WINDOWS, checkpoint=o.checkpoint) for o in orders)
    assert uniform.common_seconds is not None
    assert owl.common_seconds == uniform.common_seconds
    assert 0.3 < uniform.common_seconds < wall - 0.7
    assert uniform.seconds < wall - 0.7
    assert uniform.seconds + 0.4 < owl.seconds < wall


def test_only_variants_that_are_not_there_yet_are_made_together(tmp_path: Path) -> None:
    orders = [Order(recipe("wanda", share), Checkpoint(tmp_path / str(share), "k")) for share in (0.3, 0.5)]
    compress_shared(tiny_model("llama"), orders[:1], WINDOWS)
    compress_shared(tiny_model("llama"), orders, WINDOWS)
    for order in orders:
        made = compress(tiny_model("llama"), order.recipe, WINDOWS, checkpoint=order.checkpoint)
        assert made.together == 1
        assert made.resumed == 3


def test_the_first_block_is_that_of_the_sequential_walk_and_later_ones_are_not() -> None:
    shared, sequential = tiny_model("llama"), tiny_model("llama")
    compress(shared, recipe("sparsegpt"), WINDOWS)
    compress(sequential, Recipe(prune=PruneStep(method="sparsegpt", sparsity=0.5)), WINDOWS)
    equal = [
        all(torch.equal(a.weight(), b.weight()) for a, b in zip(one.layers, other.layers, strict=True))
        for one, other in zip(decoder_blocks(shared), decoder_blocks(sequential), strict=True)
    ]
    assert equal == [True, False, False]


def test_one_model_holds_one_variant() -> None:
    with pytest.raises(ValueError, match="give each a checkpoint"):
        compress_shared(tiny_model("llama"), [Order(recipe("wanda"), None), Order(recipe("wanda", 0.3), None)], WINDOWS)


def test_a_recipe_that_does_not_fit_is_refused_before_any_work(tmp_path: Path) -> None:
    model = tiny_model("llama")
    orders = [
        Order(recipe("wanda"), Checkpoint(tmp_path / "a", "k")),
        Order(recipe("wanda", "4:8"), Checkpoint(tmp_path / "b", "k")),
    ]
    model.model.layers[2].mlp.down_proj = nn.Linear(44, 32)
    with pytest.raises(InputError, match=r"pattern 4:8 does not fit model\.layers\.2\.mlp\.down_proj"):
        compress_shared(model, orders, WINDOWS)
    assert not Checkpoint(tmp_path / "a", "k").has(0)
