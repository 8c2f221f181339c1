"""Experts in one tensor: found by structure, and each given exactly the tokens that were routed to it."""

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn

from pruning import experts
from pruning.anatomy import ExpertLayer, decoder_blocks, expert_tensors, prunable_layers, unpruned
from pruning.calibration import Windows
from pruning.compress import compress
from pruning.experts import find_experts, one_expert_at_a_time
from pruning.recipe import Pattern, PruneStep, QuantizeStep, Recipe
from pruning.statistics import Collector, Observed
from tests.pruning.architectures import ARCHITECTURES, EXPERTS, architecture
from tests.pruning.test_architectures import EXPERT_LAYERS
from tests.pruning.tiny import tiny_ids, tiny_model

IDS = tiny_ids(windows=4, length=20)


class Mixture(NamedTuple):
    """One architecture's mixture in its last block, by plain loops.

    ``routed`` gives of one token (width,) the experts it goes to and what each is given; ``inner`` of one expert's
    first product what its second is given.
    """

    place: str
    routed: Callable[[Any, Tensor], list[tuple[int, Tensor]]]
    first: Callable[[Any, int], Callable[[Tensor], Tensor]]
    inner: Callable[[Tensor], Tensor]


def _most(scores: Tensor, count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda expert: -float(scores[expert]))[:count]


def _ordered(rows: Tensor) -> Tensor:
    """``rows`` in an order of their own: a mixture takes first choices before second ones."""
    return rows[rows[:, 0].argsort()]


def _halves(states: Tensor) -> Tensor:
    gate, up = states[: len(states) // 2], states[len(states) // 2 :]
    return gate / (1 + (-gate).exp()) * up


def _interleaved(states: Tensor) -> Tensor:
    gate, up = states[::2].clamp(max=7.0), states[1::2].clamp(-7.0, 7.0)
    return gate / (1 + (-1.702 * gate).exp()) * (up + 1)


MIXTURES = {
    "mixtral": Mixture(
        "mlp",
        lambda mixture, token: [(expert, token) for expert in _most(mixture.gate.weight @ token, 2)],
        lambda mixture, expert: lambda states: mixture.experts.gate_up_proj[expert] @ states,
        _halves,
    ),
    "qwen3_moe": Mixture(
        "mlp",
        lambda mixture, token: [(expert, token) for expert in _most(mixture.gate.weight @ token, 2)],
        lambda mixture, expert: lambda states: mixture.experts.gate_up_proj[expert] @ states,
        _halves,
    ),
    "gpt_oss": Mixture(
        "mlp",
        lambda mixture, token: [
            (expert, token) for expert in _most(mixture.router.weight @ token + mixture.router.bias, 2)
        ],
        lambda mixture, expert: (
            lambda states: states @ mixture.experts.gate_up_proj[expert] + mixture.experts.gate_up_proj_bias[expert]
        ),
        _interleaved,
    ),
    "llama4_text": Mixture(
        "feed_forward",
        lambda mixture, token: [
            (expert, token * torch.sigmoid(mixture.router.weight[expert] @ token))
            for expert in _most(mixture.router.weight @ token, 1)
        ],
        lambda mixture, expert: lambda states: states @ mixture.experts.gate_up_proj[expert],
        _halves,
    ),
}


def collected(model: nn.Module, kind: Any = "gram", ids: Tensor = IDS) -> dict[str, Observed]:
    """What the layers of the last block are given, in batches of one window."""
    with Collector(decoder_blocks(model)[-1].layers, kind, ids.numel()) as collector, torch.no_grad():
        for window in ids.split(1):
            collector.run(lambda window=window: model(window))  # type: ignore[misc]
    return collector.results()


@pytest.mark.parametrize("name", MIXTURES)
@torch.no_grad()
def test_an_expert_is_given_the_tokens_that_the_router_sends_it(name: str) -> None:
    model = architecture(name)
    mixture = decoder_blocks(model)[-1].module.get_submodule(MIXTURES[name].place)
    tokens: list[Tensor] = []
    handle = mixture.register_forward_pre_hook(lambda module, args: tokens.extend(args[0].reshape(-1, 32)))
    model(IDS)
    handle.remove()
    first: dict[int, list[Tensor]] = {expert: [] for expert in range(EXPERTS)}
    second: dict[int, list[Tensor]] = {expert: [] for expert in range(EXPERTS)}
    for token in tokens:
        for expert, given in MIXTURES[name].routed(mixture, token):
            first[expert].append(given)
            second[expert].append(MIXTURES[name].inner(MIXTURES[name].first(mixture, expert)(given)))
    grams, norms = collected(model), collected(model, "norms")
    place = f"{decoder_blocks(model)[-1].name}.{MIXTURES[name].place}.experts"
    checked = 0
    for parameter, given_to in (("gate_up_proj", first), ("down_proj", second)):
        for expert, rows in given_to.items():
            seen = grams[f"{place}.{parameter}[{expert}]"]
            assert seen.tokens == len(rows)
            if not rows:
                assert seen.statistic is None
                continue
            gram = sum(torch.outer(row, row) for row in rows)
            assert seen.statistic is not None
            assert seen.sample is not None
            torch.testing.assert_close(seen.statistic, gram, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(_ordered(seen.sample), _ordered(torch.stack(rows)), rtol=1e-4, atol=1e-5)
            other = norms[f"{place}.{parameter}[{expert}]"]
            torch.testing.assert_close(other.statistic, gram.diagonal().sqrt(), rtol=1e-4, atol=1e-5)
            checked += 1
    assert checked >= EXPERTS


@pytest.mark.parametrize("name", EXPERT_LAYERS)
@torch.no_grad()
def test_every_expert_is_a_layer_of_its_own(name: str) -> None:
    model = architecture(name)
    block = decoder_blocks(model)[-1]
    seen = collected(model, "none")
    for tensor in expert_tensors(block.layers):
        members = [layer for layer in block.layers if isinstance(layer, ExpertLayer) and layer.tensor == tensor]
        assert [layer.name for layer in members] == [f"{tensor.name}[{expert}]" for expert in range(EXPERTS)]
        for layer in members:
            given = seen[layer.name].sample
            assert layer.weight().shape == (layer.out_features, layer.in_features)
            assert given is None or given.shape[1] == layer.in_features
            assert layer.bias is None or layer.bias.shape == (layer.out_features,)
            assert not layer.quantizable
    assert {layer.out_features for layer in block.layers if "down_proj[" in layer.name} == {32}
    assert {layer.in_features for layer in block.layers if "gate_up_proj[" in layer.name} == {32}


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@torch.no_grad()
def test_square_matrices_are_told_apart_by_how_they_are_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_TRANSPOSED", WeakKeyDictionary())
    config = ARCHITECTURES[name]()
    config.intermediate_size = config.hidden_size
    monkeypatch.setitem(ARCHITECTURES, name, lambda: config)
    model = architecture(name)
    block = decoder_blocks(model)[-1]
    layers = [layer for layer in block.layers if isinstance(layer, ExpertLayer) and "down_proj" in layer.name]
    assert [layer.weight().shape for layer in layers] == [(32, 32)] * EXPERTS
    outputs: list[Tensor] = []
    handle = layers[0].module.register_forward_hook(lambda module, args, output: outputs.append(output.clone()))
    model(IDS)
    for layer in layers:
        weight = layer.weight().clone()
        weight[5] = 0
        layer.set_weight(weight)
        if layer.bias is not None:
            layer.bias[5] = 0
    model(IDS)
    handle.remove()
    before, after = (output.reshape(-1, 32) for output in outputs)
    others = [column for column in range(32) if column != 5]
    assert bool((after[:, 5] == 0).all())
    torch.testing.assert_close(after[:, others], before[:, others])


@pytest.mark.parametrize("name", EXPERT_LAYERS)
def test_shapes_alone_say_the_same_where_nothing_can_be_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def transposed(model: nn.Module) -> dict[str, bool]:
        return {tensor.name: tensor.transposed for tensor in expert_tensors(prunable_layers(model))}

    monkeypatch.setattr(experts, "_TRANSPOSED", WeakKeyDictionary())
    with torch.device("meta"):
        empty = architecture(name)
    guessed = transposed(empty)
    assert not experts._TRANSPOSED
    seen = transposed(architecture(name))
    assert len(experts._TRANSPOSED) == 1
    assert guessed == seen
    assert set(seen.values()) == {name in ("gpt_oss", "llama4_text")}


@torch.no_grad()
def test_an_expert_no_token_reached_is_named_and_pruned_by_magnitude() -> None:
    model = architecture("gpt_oss")
    for block in decoder_blocks(model):
        block.module.get_submodule("mlp.router").bias[3] = -1e6
    seen = collected(model)
    place = "model.layers.1.mlp.experts"
    for parameter in ("gate_up_proj", "down_proj"):
        assert seen[f"{place}.{parameter}[3]"] == Observed(statistic=None, sample=None, tokens=0)
        assert sum(seen[f"{place}.{parameter}[{expert}]"].tokens for expert in range(EXPERTS)) == 2 * IDS.numel()
    dense = {layer.name: layer.weight().clone() for layer in prunable_layers(model)}
    made = compress(model, Recipe(prune=PruneStep(method="sparsegpt", sparsity=0.5)), Windows(IDS))
    notes = {entry.name: entry.note for entry in made.layers if "[3]" in entry.name}
    assert len(notes) == 4
    assert set(notes.values()) == {"pruned by magnitude: no calibration token reached it"}
    for layer in prunable_layers(model):
        if layer.name in notes:
            before = dense[layer.name]
            border = before.abs().flatten().sort().values[before.numel() // 2]
            assert torch.equal(layer.weight(), torch.where(before.abs() < border, 0.0, before))


@pytest.mark.parametrize("name", ["gpt_oss", "mixtral"])
def test_patterns_run_along_the_inputs_of_an_expert(name: str) -> None:
    model = architecture(name)
    step = PruneStep(method="wanda", sparsity=0.5, pattern=Pattern.parse("2:4"))
    compress(model, Recipe(prune=step), Windows(IDS))
    for layer in prunable_layers(model):
        zeros = (layer.weight() == 0).reshape(layer.out_features, -1, 4).sum(dim=-1)
        assert bool((zeros == 2).all())


@torch.no_grad()
def test_the_model_runs_its_own_implementation_again_whatever_happens() -> None:
    model: Any = architecture("mixtral")
    model.config._experts_implementation = "batched_mm"
    layers = decoder_blocks(model)[-1].layers
    assert model.config._experts_implementation == "batched_mm"
    during: list[str] = []

    def forward() -> None:
        during.append(model.config._experts_implementation)
        raise ValueError("stopped")

    with Collector(layers, "norms", 1) as collector, pytest.raises(ValueError, match="stopped"):
        collector.run(forward)
    assert during == ["eager"]
    assert model.config._experts_implementation == "batched_mm"
    with one_expert_at_a_time([nn.Linear(1, 1)]):  # of a module that has no choice nothing is asked
        pass


@torch.no_grad()
def test_one_pass_collects_and_gives_what_the_block_puts_out() -> None:
    model = architecture("mixtral")
    expected = model(IDS).logits
    with Collector(decoder_blocks(model)[-1].layers, "gram", IDS.numel(), stop=False) as collector:
        found = collector.run(lambda: model(IDS).logits)
    assert found is not None
    torch.testing.assert_close(found, expected)


def test_looking_for_experts_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_TRANSPOSED", WeakKeyDictionary())
    config = ARCHITECTURES["mixtral"]()
    config.attention_dropout = 0.5  # which draws random numbers in a model that is trained
    monkeypatch.setitem(ARCHITECTURES, "mixtral", lambda: config)
    model = architecture("mixtral")
    model.train()
    model.get_submodule("model.norm").eval()
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    decoder_blocks(model)
    assert torch.equal(torch.randn(3), expected)
    assert not model.get_submodule("model.norm").training
    assert model.get_submodule("model.layers.0.mlp").training
    assert len(experts._TRANSPOSED) == 1


def test_int8_leaves_experts_as_they_are_and_says_so() -> None:
    model = architecture("mixtral")
    dense = {layer.name: layer.weight().clone() for layer in prunable_layers(model) if not layer.quantizable}
    made = compress(model, Recipe(quantize=QuantizeStep(scheme="int8")), None)
    notes = {entry.name: entry.note for entry in made.layers}
    assert {name for name, note in notes.items() if note is not None} == dense.keys()
    for tensor in expert_tensors(prunable_layers(model)):
        for expert in range(EXPERTS):
            assert torch.equal(tensor.tensor[expert], dense[f"{tensor.name}[{expert}]"])


class Experts(nn.Module):
    """Two stacks and a bias, which is no router."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(count, 6, 4)), nn.Parameter(torch.randn(count, 4, 6))
        self.up_bias = nn.Parameter(torch.randn(count, 6))


class Beside(nn.Module):
    """Experts, and what is beside them."""

    def __init__(self, experts: nn.Module, **beside: nn.Module) -> None:
        super().__init__()
        self.attention = nn.Linear(4, 4)
        self.experts = experts
        for name, module in beside.items():
            self.add_module(name, module)


@pytest.mark.parametrize(
    ("block", "tensors", "routers"),
    [
        (Beside(Experts(5), router=nn.Linear(4, 5)), {"b.experts.up", "b.experts.down"}, {"b.router.weight"}),
        (Beside(Experts(5)), set(), set()),
        (Beside(Experts(5), router=nn.Linear(4, 6)), set(), set()),
        (
            Beside(nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), gate=nn.Linear(4, 3)),
            set(),
            {"b.gate.weight"},
        ),
        (Beside(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)]), gate=nn.Linear(4, 2)), set(), set()),
        (Beside(nn.ModuleList([nn.ReLU(), nn.ReLU()]), gate=nn.Linear(4, 2)), set(), set()),
        (Beside(nn.Conv1d(4, 5, 3), gate=nn.Linear(4, 5)), set(), set()),
        (
            Beside(Beside(Experts(4), near=nn.Linear(4, 4)), far=nn.Linear(4, 4)),
            {"b.experts.experts.up", "b.experts.experts.down"},
            {"b.experts.near.weight", "b.experts.attention.weight"},
        ),
    ],
)
def test_experts_are_as_many_as_the_rows_of_a_matrix_beside_them(
    block: nn.Module, tensors: set[str], routers: set[str]
) -> None:
    found, names = find_experts(block, "b.")
    assert {tensor.name for tensor in found} == tensors
    assert names == routers
    assert all(tensor.width == 4 for tensor in found)


def test_a_router_in_a_linear_layer_is_not_pruned() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(
        [Beside(nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), gate=nn.Linear(4, 3)) for _ in range(2)]
    )
    names = [layer.name for layer in decoder_blocks(model)[1].layers]
    assert names == ["layers.1.attention", *(f"layers.1.experts.{expert}" for expert in range(3))]
    assert [(entry.name, entry.reason) for entry in unpruned(model)] == [
        ("layers.0.gate.weight", "router"),
        ("layers.1.gate.weight", "router"),
    ]


def test_models_without_experts_are_not_run() -> None:
    model = tiny_model("llama")
    model.register_forward_pre_hook(lambda module, args: pytest.fail("it was run"))
    assert not expert_tensors(prunable_layers(model))
