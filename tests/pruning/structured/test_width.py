"""A narrower model: what is kept, what it computes, and that it is an ordinary model on disk."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from pruning.anatomy import decoder_blocks, prunable_layers
from pruning.artifact import rebuild, save_artifact
from pruning.calibration import Windows
from pruning.checkpoint import Checkpoint
from pruning.compress import compress
from pruning.errors import CancelledError, InputError, RunError
from pruning.export import export_variant
from pruning.recipe import PruneStep, QuantizeStep, Recipe
from pruning.structured import narrow, width
from pruning.structured.select import DAMPING
from pruning.structured.width import prune_width
from tests.pruning.architectures import ARCHITECTURES, architecture
from tests.pruning.structured.test_rows import EXPERTS, FFN_ONLY, NEITHER, UNLIKE
from tests.pruning.tiny import tiny_ids, tiny_model

IDS = tiny_ids()
WINDOWS = Windows(IDS)
NARROWED = [name for name in ARCHITECTURES if name not in EXPERTS | UNLIKE | NEITHER]


class NoTokenizer:
    """Saves nothing."""

    def save_pretrained(self, folder: Path) -> None:
        pass


def step(sparsity: float) -> PruneStep:
    return PruneStep(method="width", sparsity=sparsity)


def weights_in_blocks(model: nn.Module) -> int:
    return sum(layer.weight().numel() for layer in prunable_layers(model))


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    found: Tensor = model(ids, use_cache=False).logits
    return found


@torch.no_grad()
def kill(model: Any, channels: list[int], group: int | None) -> None:
    """Make FFN ``channels`` give nothing in every block, and a KV group of two heads."""
    for layer in model.model.layers:
        layer.mlp.up_proj.weight[channels] = 0
        if group is not None:
            layer.self_attn.v_proj.weight[group * 8 : group * 8 + 8] = 0


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "gemma2", "gemma3"])
def test_what_gives_nothing_goes_and_nothing_changes(family: str) -> None:
    model = tiny_model(family)
    dead = list(range(3, 48, 4))  # 12 of 48
    kill(model, dead, None)
    expected = logits(model)
    total = weights_in_blocks(model)
    made = prune_width(model, step(12 * 3 * 32 * 3 / total), WINDOWS, multiple=4)
    assert made.model.config.intermediate_size == 36
    assert weights_in_blocks(made.model) == total - 12 * 3 * 32 * 3
    torch.testing.assert_close(logits(made.model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("group", [0, 1])
def test_a_group_of_heads_that_gives_nothing_goes_and_nothing_changes(group: int) -> None:
    model = tiny_model("llama")
    kill(model, [], group)
    expected = logits(model)
    config: Any = model.config
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    # Half of q, k, v and o; an FFN of 48 channels rounded to 48 keeps all it has.
    share = 3 * (32 + 16) * 32 / weights_in_blocks(model)
    made = prune_width(model, step(share), WINDOWS, multiple=48)
    config = made.model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 1, 8)
    assert made.removed == tuple(f"model.layers.{i}: 1 of 2 KV groups ({group})" for i in range(3))
    torch.testing.assert_close(logits(made.model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NARROWED)
def test_every_architecture_that_can_be_narrower(name: str) -> None:
    model: Any = architecture(name)
    total = weights_in_blocks(model)
    made = prune_width(model, step(0.2), WINDOWS, multiple=4)
    assert type(made.model) is type(model)
    left = weights_in_blocks(made.model)
    gone = sum(layer.sparsity * layer.shape[0] * layer.shape[1] for layer in made.layers)
    assert gone == pytest.approx(total - left)
    assert 1 - left / total == pytest.approx(0.2, abs=0.06)
    assert f"{1 - left / total:.1%} removed" in (made.note or "")
    assert bool(torch.isfinite(logits(made.model)).all())
    assert ("; " in (made.note or "")) == (name in FFN_ONLY)
    # Nothing is left of the old blocks but their shapes.
    assert all(p.is_meta for block in decoder_blocks(model) for p in block.module.parameters())


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "phi3", "gpt2", "opt"])
def test_saved_exported_and_loaded_it_generates_the_same_with_a_cache(family: str, tmp_path: Path) -> None:
    model: Any = architecture(family)
    made = prune_width(model, step(0.3), WINDOWS, multiple=4)
    save_artifact(made.model, NoTokenizer(), tmp_path / "variant", {}, dense=(1_000_000, 1_000_000))
    rebuilt, _ = rebuild(tmp_path / "variant")
    export_variant(tmp_path / "variant", tmp_path / "plain")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    expected = logits(made.model)
    assert torch.equal(logits(rebuilt), expected)
    assert torch.equal(logits(loaded), expected)
    loaded.generation_config.eos_token_id = None
    prompt = IDS[:1, :10]
    cached, plain = (
        loaded.generate(prompt, max_new_tokens=12, do_sample=False, use_cache=cache) for cache in (True, False)
    )
    assert cached.shape[1] == 22
    assert torch.equal(cached, plain)


def test_tied_weights_stay_tied_and_are_not_copied() -> None:
    model: Any = tiny_model("llama")
    embedding = model.model.embed_tokens.weight
    made: Any = prune_width(model, step(0.25), WINDOWS, multiple=4).model
    assert made.model.embed_tokens.weight is embedding
    assert made.lm_head.weight is embedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_and_mode_stay(dtype: torch.dtype) -> None:
    made = prune_width(tiny_model("llama", dtype=dtype).train(), step(0.25), WINDOWS, multiple=4)
    assert {p.dtype for p in made.model.parameters()} == {dtype}
    assert not any(module.training for module in made.model.modules())
    assert not any(p.requires_grad for p in made.model.parameters())
    assert made.model.config.dtype == dtype


def test_the_first_block_is_fitted_by_least_squares_on_its_inputs() -> None:
    dense: Any = tiny_model("llama")
    given: list[Tensor] = []
    handle = dense.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    logits(dense)
    handle.remove()
    inputs = given[0].flatten(0, 1).double().numpy()
    weight = dense.model.layers[0].mlp.down_proj.weight.detach().clone().double().numpy()
    gates = dense.model.layers[0].mlp.gate_proj.weight.detach().clone()
    # A third of the FFN alone: an FFN of 32 channels, whatever could be had from the heads.
    made: Any = prune_width(dense, step(16 * 3 * 32 * 3 / weights_in_blocks(dense)), WINDOWS, multiple=16)
    assert made.model.config.num_attention_heads == 4
    layer = made.model.model.layers[0].mlp
    kept = [int((gates == row).all(dim=1).nonzero()) for row in layer.gate_proj.weight]
    assert kept == sorted(kept)
    assert len(kept) == 32
    damping = DAMPING * (inputs**2).sum() / 48
    rows = np.concatenate([inputs, np.sqrt(damping) * np.eye(48)])
    solution, *_ = np.linalg.lstsq(rows[:, kept], rows @ weight.T, rcond=None)
    np.testing.assert_allclose(layer.down_proj.weight.numpy(), solution.T, rtol=1e-3, atol=1e-5)
    report = {entry.name: entry for entry in made.layers}["model.layers.0.mlp.down_proj"]
    change = inputs @ weight.T - inputs[:, kept] @ layer.down_proj.weight.numpy().T.astype(np.float64)
    assert (report.tokens, report.sampled) == (len(inputs), len(inputs))
    assert report.output_error == pytest.approx(np.linalg.norm(change) / np.linalg.norm(inputs @ weight.T), rel=1e-4)
    assert report.note is None  # it was treated as asked


def test_a_later_block_is_fitted_to_what_the_narrower_ones_before_it_give() -> None:
    made: Any = prune_width(tiny_model("llama"), step(0.25), WINDOWS, multiple=4)
    seen: list[Tensor] = []
    last = made.model.model.layers[2].mlp.down_proj
    handle = last.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    logits(made.model)
    handle.remove()
    dense: Any = tiny_model("llama")
    # The narrower blocks before it, and the dense block after them.
    hybrid: Any = made.model
    hybrid.model.layers[2] = dense.model.layers[2]
    full: list[Tensor] = []
    handle = dense.model.layers[2].mlp.down_proj.register_forward_pre_hook(lambda module, args: full.append(args[0]))
    logits(hybrid)
    handle.remove()
    inputs, weight = full[0].flatten(0, 1).double(), dense.model.layers[2].mlp.down_proj.weight.detach().double()
    kept = [int((full[0].flatten(0, 1).T - column).abs().sum(dim=1).argmin()) for column in seen[0].flatten(0, 1).T]
    rows = np.concatenate([inputs.numpy(), np.sqrt(DAMPING * float(inputs.square().sum()) / 48) * np.eye(48)])
    solution, *_ = np.linalg.lstsq(rows[:, kept], rows @ weight.numpy().T, rcond=None)
    np.testing.assert_allclose(last.weight.numpy(), solution.T, rtol=1e-3, atol=1e-5)


def test_choosing_by_cost_and_fitting_beat_chance_and_leaving_as_it_is() -> None:
    expected = logits(tiny_model("qwen2"))

    def error(**options: Any) -> float:
        made = prune_width(tiny_model("qwen2"), step(0.25), WINDOWS, multiple=4, **options)
        return float((logits(made.model) - expected).square().mean())

    def last(weight: Tensor, gram: Tensor, part: Any, keep: int) -> Tensor:
        return torch.arange(part.units)[-keep:]

    assert error() < 0.9 * error(compensate=False)
    assert error() < 0.9 * error(choose=last)


@pytest.mark.parametrize(
    ("sparsity", "message"), [(0.95, "at most .* lower the sparsity, or choose depth"), (0.001, "raise the sparsity")]
)
def test_a_share_that_no_width_gives_is_refused(sparsity: float, message: str) -> None:
    model = tiny_model("gpt2")
    before = logits(model)
    with pytest.raises(InputError, match=message):
        prune_width(model, step(sparsity), WINDOWS, multiple=32)
    assert torch.equal(logits(model), before)


def test_the_widths_are_multiples_and_the_note_says_how_near_they_come() -> None:
    made: Any = prune_width(tiny_model("gpt2"), step(0.2), WINDOWS)  # 32 on a CPU
    assert made.model.config.n_inner == 96
    # A block of GPT-2 has 12 times the square of the hidden size, 8 of them in the FFN, of which a quarter goes.
    assert made.note.startswith("20.0% asked, 16.7% removed: every block keeps 96 of 128 FFN channels; ")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_stopped_at_any_block_it_goes_on_to_the_same_bits(family: str, tmp_path: Path) -> None:
    expected = prune_width(tiny_model(family), step(0.3), WINDOWS, multiple=4)
    resumed = []
    for last in (0, 1, 2, 99):

        def stop(phase: str, done: int, total: int, unit: str, last: int = last) -> None:
            if done > last:
                raise CancelledError

        try:
            made = prune_width(
                tiny_model(family), step(0.3), WINDOWS, multiple=4, checkpoint=Checkpoint(tmp_path, "k"), progress=stop
            )
            resumed.append(made.resumed)
        except CancelledError:
            resumed.append(sum(Checkpoint(tmp_path, "k").has(index) for index in range(3)))
    assert resumed == [1, 2, 3, 3]
    state, wanted = made.model.state_dict(), expected.model.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    assert made.removed == expected.removed
    assert [{**vars(one), "seconds": 0} for one in made.layers] == [
        {**vars(one), "seconds": 0} for one in expected.layers
    ]


def test_time_of_what_was_found_finished_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    solve, plan = narrow._solve, width.cheapest

    def solving_slowly(*arguments: Any) -> Any:
        time.sleep(0.2)
        return solve(*arguments)

    def planning_slowly(*arguments: Any) -> Any:
        time.sleep(0.4)
        return plan(*arguments)

    def stop(phase: str, done: int, total: int, unit: str) -> None:
        if done > 1:
            raise CancelledError

    monkeypatch.setattr(narrow, "_solve", solving_slowly)
    monkeypatch.setattr(width, "cheapest", planning_slowly)
    with pytest.raises(CancelledError):
        prune_width(
            tiny_model("gpt2"), step(0.3), WINDOWS, multiple=4, checkpoint=Checkpoint(tmp_path, "k"), progress=stop
        )
    monkeypatch.undo()
    made = prune_width(tiny_model("gpt2"), step(0.3), WINDOWS, multiple=4, checkpoint=Checkpoint(tmp_path, "k"))
    assert made.resumed == 2
    assert made.earlier > 0.8


def test_quantizing_what_is_left_is_said_and_does_not_begin_anew() -> None:
    recipe = Recipe(prune=step(0.3), quantize=QuantizeStep(scheme="int8"))
    positions: list[tuple[int, int]] = []
    made = compress(
        tiny_model("llama"), recipe, WINDOWS, progress=lambda phase, done, total, unit: positions.append((done, total))
    )
    shares = [done / total for done, total in positions]
    assert shares == sorted(shares)
    assert made.note is not None
    assert made.note.endswith("the change of each layer's output is that before quantization")


def test_without_a_solution_the_strongest_stay_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Tensor:
        raise narrow.UnusableStatisticsError("no")

    monkeypatch.setattr(narrow, "compensated", fail)
    dense: Any = tiny_model("gpt2")
    weight = dense.transformer.h[0].mlp.c_proj.weight.detach().clone()
    given: list[Tensor] = []
    dense.transformer.h[0].mlp.c_proj.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    logits(dense)
    strengths = given[0].flatten(0, 1).square().sum(dim=0) * weight.square().sum(dim=1)
    made: Any = prune_width(dense, step(0.3), WINDOWS, multiple=4)
    width = made.model.config.n_inner
    kept = strengths.argsort(descending=True)[:width].sort().values
    assert torch.equal(made.model.transformer.h[0].mlp.c_proj.weight, weight[kept])
    report = {entry.name: entry for entry in made.layers}["transformer.h.0.mlp.c_proj"]
    assert "chosen by strength alone: no" in (report.note or "")


@pytest.mark.parametrize("where", ["weight", "activation"])
def test_what_is_not_finite_is_named(where: str) -> None:
    model: Any = tiny_model("llama")
    with torch.no_grad():
        layer = model.model.layers[1].mlp
        (layer.down_proj if where == "weight" else layer.up_proj).weight[0, 0] = float("nan")
    with pytest.raises(RunError, match=r"model.layers.1.mlp.down_proj in block model.layers.1.*--dtype float32"):
        prune_width(model, step(0.25), WINDOWS, multiple=4)
