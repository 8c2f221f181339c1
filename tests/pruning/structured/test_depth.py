"""A shorter model: which blocks go, that the rest computes what it did, and that it is an ordinary model on disk."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pruning.anatomy import decoder_blocks, prunable_layers
from pruning.artifact import rebuild, save_artifact
from pruning.calibration import Windows
from pruning.checkpoint import Checkpoint
from pruning.compress import compress
from pruning.errors import CancelledError, InputError, RunError
from pruning.export import export_variant
from pruning.recipe import PruneStep, Recipe
from pruning.structured.depth import prune_depth, without_blocks
from pruning.structured.influence import Miss
from tests.pruning.architectures import ARCHITECTURES, architecture
from tests.pruning.structured.test_width import NoTokenizer, logits
from tests.pruning.tiny import tiny_ids

IDS = tiny_ids()
WINDOWS = Windows(IDS)
MIXED = {"deepseek_v3", "llama4_text", "qwen3_next", "recurrent_gemma"}
"""Of two blocks, which are of two kinds."""


def step(sparsity: float) -> PruneStep:
    return PruneStep(method="depth", sparsity=sparsity)


def deep(blocks: int = 6, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A Llama whose blocks change their input by very different amounts."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model: Any = LlamaForCausalLM(config).eval().to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 10 * float(torch.rand((), generator=generator))
            layer.mlp.down_proj.weight *= 10 * float(torch.rand((), generator=generator))
    return model


class Through(nn.Module):
    """Gives back what it is given, as a block of its class would."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        made = self.block(*args, **kwargs)
        return hidden if isinstance(made, Tensor) else (hidden, *made[1:])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)


def skipping(model: nn.Module, removed: list[int]) -> Tensor:
    """The logits of ``model`` when those blocks hand on what they are given."""
    blocks = decoder_blocks(model)
    for index in removed:
        parent, _, leaf = blocks[index].name.rpartition(".")
        model.get_submodule(parent)._modules[leaf] = Through(blocks[index].module)
    return logits(model)


@pytest.mark.parametrize("place", range(5))
def test_a_block_that_does_nothing_goes_and_nothing_changes(place: int) -> None:
    model = deep(5)
    with torch.no_grad():
        model.model.layers[place].self_attn.o_proj.weight.zero_()
        model.model.layers[place].mlp.down_proj.weight.zero_()
    expected = logits(model)
    made = prune_depth(model, step(0.2), WINDOWS)
    assert made.removed == (f"model.layers.{place}",)
    assert made.note == "20.0% asked, 20.0% removed: 1 of 5 blocks"
    assert torch.equal(logits(made.model), expected)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in MIXED])
@pytest.mark.parametrize("removed", [0, 1])
def test_what_is_left_of_every_architecture_computes_what_it_did(name: str, removed: int) -> None:
    model = architecture(name)
    blocks = decoder_blocks(model)
    expected = skipping(architecture(name), [removed])
    made = without_blocks(model, blocks, [removed])
    assert len(decoder_blocks(made)) == len(blocks) - 1
    torch.testing.assert_close(logits(made), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(MIXED))
def test_the_last_block_of_a_kind_stays(name: str) -> None:
    with pytest.raises(InputError, match="of a kind of its own"):
        prune_depth(architecture(name), step(0.5), WINDOWS)


def test_lists_that_speak_of_blocks_are_cut() -> None:
    model = architecture("gemma3")
    assert model.config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    expected = skipping(architecture("gemma3"), [0])
    made: Any = without_blocks(model, decoder_blocks(model), [0])
    assert made.config.layer_types == ["sliding_attention", "full_attention"]
    assert torch.equal(logits(made), expected)
    assert [layer.self_attn.layer_idx for layer in made.model.layers] == [0, 1]


def by_influence(model: Any, count: int) -> list[int]:
    """The blocks to remove by a plain reading of 1 - cos, measured again after every removal."""
    kept = list(model.model.layers)
    removed = []
    for _ in range(count):
        model.model.layers = nn.ModuleList([layer for layer in kept if layer is not None])
        seen: dict[int, tuple[Tensor, Tensor]] = {}
        handles = [
            layer.register_forward_hook(
                lambda m, args, kwargs, out, seen=seen: seen.update({id(m): (args[0], out)}), with_kwargs=True
            )
            for layer in model.model.layers
        ]
        logits(model)
        for handle in handles:
            handle.remove()
        influence = {}
        for index, layer in enumerate(kept):
            if layer is not None:
                before, after = (part.double() for part in seen[id(layer)])
                cosine = (before * after).sum(-1) / before.norm(dim=-1) / after.norm(dim=-1)
                influence[index] = float((1 - cosine).mean())
        chosen = min(influence, key=influence.__getitem__)
        removed.append(chosen)
        kept[chosen] = None
    return removed


@pytest.mark.parametrize("seed", range(4))
def test_blocks_go_in_the_order_in_which_they_are_missed_least(seed: int) -> None:
    made = prune_depth(deep(seed=seed), step(0.5), WINDOWS)
    assert list(made.removed) == [f"model.layers.{index}" for index in by_influence(deep(seed=seed), 3)]


@pytest.mark.parametrize(("sparsity", "blocks"), [(0.1, 1), (0.24, 1), (0.25, 2), (0.4, 2), (0.42, 3), (0.9, 5)])
def test_the_nearest_whole_number_of_blocks_goes(sparsity: float, blocks: int) -> None:
    made = prune_depth(deep(), step(sparsity), WINDOWS)
    assert len(made.removed) == blocks
    assert made.model.config.num_hidden_layers == 6 - blocks
    assert [layer.self_attn.layer_idx for layer in made.model.model.layers] == list(range(6 - blocks))


@pytest.mark.parametrize("sparsity", [0.08, 0.95])
def test_a_share_that_no_number_of_blocks_is_near_is_refused(sparsity: float) -> None:
    with pytest.raises(InputError, match=r"16\.7% to 83.3%.*choose a sparsity in that range"):
        prune_depth(deep(), step(sparsity), WINDOWS)


def test_a_single_block_is_refused() -> None:
    with pytest.raises(InputError, match="single block"):
        prune_depth(deep(1), step(0.5), WINDOWS)


def test_parameters_are_those_of_the_model_and_reports_are_of_its_layers() -> None:
    model = deep()
    before = {id(parameter) for parameter in model.parameters()}
    names = [layer.name for layer in prunable_layers(model)]
    made = prune_depth(model, step(1 / 3), WINDOWS)
    assert {id(parameter) for parameter in made.model.parameters()} < before
    assert [entry.name for entry in made.layers] == names
    gone = {entry.name for entry in made.layers if entry.sparsity == 1}
    assert gone == {name for name in names for block in made.removed if name.startswith(f"{block}.")}
    assert all(entry.sparsity in (0, 1) for entry in made.layers)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "opt", "phi3", "qwen3_moe", "mixtral", "gpt_oss"])
def test_saved_exported_and_loaded_it_generates_the_same_with_a_cache(family: str, tmp_path: Path) -> None:
    made = prune_depth(architecture(family), step(0.4), WINDOWS)
    save_artifact(made.model, NoTokenizer(), tmp_path / "variant", {}, dense=(1_000_000, 1_000_000))
    rebuilt, _ = rebuild(tmp_path / "variant")
    export_variant(tmp_path / "variant", tmp_path / "plain")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    expected = logits(made.model)
    assert torch.equal(logits(rebuilt), expected)
    assert torch.equal(logits(loaded), expected)
    loaded.generation_config.eos_token_id = None
    cached, plain = (
        loaded.generate(IDS[:1, :10], max_new_tokens=12, do_sample=False, use_cache=cache) for cache in (True, False)
    )
    assert cached.shape[1] == 22
    assert torch.equal(cached, plain)


def test_stopped_at_any_block_it_goes_on_to_the_same_blocks(tmp_path: Path) -> None:
    expected = prune_depth(deep(), step(0.5), WINDOWS)
    noted = []
    for last in (0, 1, 2, 99):

        def stop(phase: str, done: int, total: int, unit: str, last: int = last) -> None:
            assert 0 <= done <= total == 3
            if done > last:
                raise CancelledError

        try:
            made = prune_depth(deep(), step(0.5), WINDOWS, checkpoint=Checkpoint(tmp_path, "k"), progress=stop)
            noted.append(made.resumed)
        except CancelledError:
            noted.append(len(Checkpoint(tmp_path, "k").note("removed")))
    assert noted == [1, 2, 3, 3]
    assert made.removed == expected.removed
    assert torch.equal(logits(made.model), logits(expected.model))
    assert all(layer.note is None for layer in made.layers)  # all were treated as asked


def test_time_of_what_was_found_finished_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = Miss.order

    def slowly(*arguments: Any) -> list[int]:
        time.sleep(0.3)
        return order(*arguments)

    def stop(phase: str, done: int, total: int, unit: str) -> None:
        if done > 1:
            raise CancelledError

    monkeypatch.setattr(Miss, "order", slowly)
    with pytest.raises(CancelledError):
        prune_depth(deep(), step(0.5), WINDOWS, checkpoint=Checkpoint(tmp_path, "k"), progress=stop)
    monkeypatch.undo()
    recipe = Recipe(prune=step(0.5))
    assert compress(deep(), recipe, WINDOWS, checkpoint=Checkpoint(tmp_path, "k")).seconds > 0.6


def test_what_is_not_finite_is_named() -> None:
    model = deep()
    with torch.no_grad():
        model.model.layers[4].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(RunError, match=r"block model.layers.4 .* --dtype float32"):
        prune_depth(model, step(0.5), WINDOWS)


def test_a_model_in_bfloat16_stays_in_it() -> None:
    made = prune_depth(deep(dtype=torch.bfloat16), step(0.5), WINDOWS)
    assert {parameter.dtype for parameter in made.model.parameters()} == {torch.bfloat16}
