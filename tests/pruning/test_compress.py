"""The walk: exact counts on every family, statistics of the compressed model so far, and how it stops and fails."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from pruning.anatomy import LinearLayer, decoder_blocks, prunable_layers
from pruning.calibration import Windows
from pruning.compress import compress
from pruning.errors import CancelledError, InputError, RunError
from pruning.methods import METHODS
from pruning.quantize.int8 import Int8Linear, quantize_rows
from pruning.recipe import Pattern, PruneStep, QuantizeStep, Recipe
from pruning.statistics import InputGram
from tests.pruning.tiny import CONFIGS, tiny_ids, tiny_model

WINDOWS = Windows(tiny_ids())


def recipe(method: str, ask: float | str, quantize: bool = False) -> Recipe:
    pattern = Pattern.parse(ask) if isinstance(ask, str) else None
    sparsity = pattern.sparsity if pattern is not None else float(ask)
    return Recipe(
        prune=PruneStep(method=method, sparsity=sparsity, pattern=pattern),
        quantize=QuantizeStep(scheme="int8") if quantize else None,
    )


def untouched(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter that is not the weight of a prunable layer."""
    pruned = {id(layer.module.weight) for layer in prunable_layers(model)}
    return {name: value.detach().clone() for name, value in model.named_parameters() if id(value) not in pruned}


FINE_GRAINED = [name for name, method in METHODS.items() if method.kind == "weights"]
ASKED: list[tuple[str, float | str]] = [
    (name, ask) for name in FINE_GRAINED for ask in (0.5, "2:4", 0.37) if ask != "2:4" or METHODS[name].patterns
]


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(("method", "ask"), ASKED)
def test_every_method_on_every_family(method: str, ask: float | str, family: str) -> None:
    model = tiny_model(family)
    rest = untouched(model)
    dense = [layer.weight().clone() for layer in prunable_layers(model)]
    report = compress(model, recipe(method, ask), WINDOWS)
    layers = prunable_layers(model)
    assert [entry.name for entry in report.layers] == [layer.name for layer in layers]
    sparsity = 0.5 if isinstance(ask, str) else ask
    everything = sum(weight.numel() for weight in dense)
    assert sum(int((layer.weight() == 0).sum()) for layer in layers) == pytest.approx(sparsity * everything, abs=14)
    for entry, layer, before in zip(report.layers, layers, dense, strict=True):
        weight = layer.weight()
        zeros = int((weight == 0).sum())
        assert entry.sparsity == pytest.approx(zeros / weight.numel(), abs=1e-12)
        if METHODS[method].scope == "layer":
            assert zeros == int(sparsity * weight.numel() + 0.5)
            assert entry.requested_sparsity == sparsity
        assert entry.shape == tuple(weight.shape)
        assert entry.note is None
        if isinstance(ask, str):
            assert int((weight != 0).view(weight.shape[0], -1, 4).sum(dim=2).max()) == 2
        if METHODS[method].statistics != "gram":
            assert torch.equal(weight[weight != 0], before[weight != 0])
    for name, value in rest.items():
        assert torch.equal(model.get_parameter(name), value), name
    assert torch.isfinite(model(tiny_ids()).logits).all()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", FINE_GRAINED)
def test_nothing_asked_leaves_every_bit(method: str, dtype: torch.dtype, family: str) -> None:
    model = tiny_model(family, dtype=dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = compress(model, recipe(method, 0.0), WINDOWS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {entry.requested_sparsity for entry in report.layers} == {0.0}


def test_dense_needs_no_windows_and_changes_nothing() -> None:
    model = tiny_model("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    compress(model, Recipe(), None)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_tied_weights_stay_tied() -> None:
    model = tiny_model("llama")
    compress(model, recipe("sparsegpt", 0.5), WINDOWS)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox", "gemma2", "gemma3"])
@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_statistics_are_those_of_the_model_compressed_so_far(method: str, family: str) -> None:
    """Against the slow way: for each block run the whole model anew and listen to the inputs of its layers."""
    walked, expected = tiny_model(family).double(), tiny_model(family).double()
    compress(walked, recipe(method, 0.5), WINDOWS)
    prune = METHODS[method].load()
    for block in decoder_blocks(expected):
        inputs = inputs_of(expected, block.layers)
        for layer in block.layers:
            gram = inputs[layer.name].T @ inputs[layer.name]
            statistics = gram if method == "sparsegpt" else gram.diagonal().sqrt()
            with torch.no_grad():
                layer.set_weight(prune(layer.weight(), statistics, 0.5, None))
    for one, other in zip(prunable_layers(walked), prunable_layers(expected), strict=True):
        torch.testing.assert_close(one.weight(), other.weight(), rtol=1e-7, atol=1e-9)


def inputs_of(model: nn.Module, layers: list[LinearLayer]) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}

    def listen(name: str) -> object:
        return lambda module, args: seen.update({name: args[0].reshape(-1, args[0].shape[-1])})

    handles = [layer.module.register_forward_pre_hook(listen(layer.name)) for layer in layers]  # type: ignore[arg-type]
    with torch.no_grad():
        model(WINDOWS.ids)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_int8_is_applied_to_the_pruned_weights(family: str) -> None:
    pruned, quantized = tiny_model(family), tiny_model(family)
    compress(pruned, recipe("magnitude", 0.5), None)
    report = compress(quantized, recipe("magnitude", 0.5, quantize=True), None)
    for layer, entry in zip(prunable_layers(pruned), report.layers, strict=True):
        int8 = quantized.get_submodule(layer.name)
        assert isinstance(int8, Int8Linear)
        codes, scale = quantize_rows(layer.weight())
        assert torch.equal(int8.codes, codes)
        assert torch.equal(int8.scale, scale)
        assert bool((int8.codes[layer.weight() == 0] == 0).all())
        assert entry.sparsity == pytest.approx(float((codes == 0).float().mean()))
        assert (int8.bias is None) == (layer.bias is None)
    torch.testing.assert_close(quantized(tiny_ids()).logits, pruned(tiny_ids()).logits, rtol=0.1, atol=0.02)


def test_the_next_block_sees_quantized_outputs() -> None:
    coarse, plain = tiny_model("llama"), tiny_model("llama")
    compress(coarse, recipe("sparsegpt", 0.5, quantize=True), WINDOWS)
    compress(plain, recipe("sparsegpt", 0.5), WINDOWS)
    name = prunable_layers(plain)[-1].name
    last = coarse.get_submodule(name)
    assert isinstance(last, Int8Linear)
    codes, _ = quantize_rows(plain.get_submodule(name).weight)
    assert not torch.equal(last.codes, codes)


def test_quantization_alone_needs_no_windows() -> None:
    model = tiny_model("llama")
    report = compress(model, Recipe(quantize=QuantizeStep(scheme="int8")), None)
    assert len(report.layers) == 21
    assert sum(isinstance(module, Int8Linear) for module in model.modules()) == 21


@pytest.mark.parametrize("method", [name for name in FINE_GRAINED if METHODS[name].scope == "layer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models_stay_in_their_dtype_with_exact_counts(dtype: torch.dtype, method: str) -> None:
    model = tiny_model("llama", dtype=dtype)
    with torch.no_grad():
        for layer in prunable_layers(model):
            layer.module.weight.mul_(1e-5)  # near the end of float16, where a small weight could become zero
    compress(model, recipe(method, 0.5), WINDOWS)
    for layer in prunable_layers(model):
        assert layer.weight().dtype == dtype
        natural_limit = int(0.5 * layer.weight().numel() + 0.5)
        assert int((layer.weight() == 0).sum()) == natural_limit


def test_progress_counts_blocks_and_is_called_within_them() -> None:
    calls: list[tuple[str, int, int, str]] = []
    compress(tiny_model("llama"), recipe("wanda", 0.5), WINDOWS, progress=lambda *call: calls.append(call))
    assert {(phase, total, unit) for phase, _, total, unit in calls} == {("compressing", 3, "blocks")}
    done = [call[1] for call in calls]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, 3)
    assert done.count(1) > 7


@pytest.mark.parametrize("method", ["magnitude", "sparsegpt"])
def test_cancelling_stops_at_the_next_step_and_leaves_no_hooks(method: str) -> None:
    model = tiny_model("llama")
    calls = 0

    def cancel(phase: str, done: int, total: int, unit: str) -> None:
        nonlocal calls
        calls += 1
        if done == 1:
            raise CancelledError

    with pytest.raises(CancelledError):
        compress(model, recipe(method, 0.5), WINDOWS, progress=cancel)
    assert not any(module._forward_pre_hooks for module in model.modules())
    last = decoder_blocks(model)[-1]
    assert all(int((layer.weight() == 0).sum()) == 0 for layer in last.layers)
    counted = calls
    model(tiny_ids())
    assert calls == counted


@pytest.mark.parametrize(
    ("where", "message"), [("weights", "the weights of"), ("inputs", "was given on the calibration")]
)
@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_numbers_that_are_not_finite_name_the_layer(method: str, where: str, message: str) -> None:
    model = tiny_model("llama")
    block = model.model.layers[1]
    with torch.no_grad():
        if where == "weights":
            block.self_attn.k_proj.weight[3, 2] = float("nan")
            layer = "model.layers.1.self_attn.k_proj"
        else:
            block.post_attention_layernorm.weight[0] = float("inf")
            layer = "model.layers.1.mlp.gate_proj"
    with pytest.raises(RunError, match=f"{message}.*|{layer}") as failure:
        compress(model, recipe(method, 0.5), WINDOWS)
    assert message in str(failure.value)
    assert layer in str(failure.value)
    assert "block model.layers.1" in str(failure.value)


def test_a_layer_whose_gram_cannot_be_used_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    original = InputGram.result

    def indefinite(self: InputGram) -> Tensor | None:
        gram = original(self)
        assert gram is not None
        if gram.shape[0] == 48:  # the input of down_proj alone
            gram[0, 1] = gram[1, 0] = 1e6 * float(gram.diagonal().max())
        return gram

    monkeypatch.setattr(InputGram, "result", indefinite)
    model = tiny_model("llama")
    report = compress(model, recipe("sparsegpt", 0.5), WINDOWS)
    noted = {entry.name: entry.note for entry in report.layers if entry.note is not None}
    assert set(noted) == {f"model.layers.{index}.mlp.down_proj" for index in range(3)}
    assert all(note.startswith("pruned by Wanda: the Gram matrix") for note in noted.values())
    assert {entry.sparsity for entry in report.layers} == {0.5}


class Experts(nn.Module):
    """A model in which one layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 8)
        self.layers = nn.ModuleList([nn.ModuleDict({"used": nn.Linear(8, 8), "idle": nn.Linear(8, 8)})])
        self.layers[0].forward = lambda states: self.layers[0]["used"](states)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers[0](self.embed(ids))


def test_a_layer_no_token_reached_is_pruned_by_magnitude_and_says_so() -> None:
    report = compress(Experts(), recipe("wanda", 0.5), WINDOWS)
    assert [entry.note is None for entry in report.layers] == [True, False]
    assert {entry.sparsity for entry in report.layers} == {0.5}


def test_a_width_no_pattern_fits_is_refused_before_any_work() -> None:
    model = tiny_model("llama")
    model.model.layers[2].mlp.down_proj = nn.Linear(46, 32)
    calls: list[int] = []
    with pytest.raises(InputError, match=r"2:4 does not fit model\.layers\.2\.mlp\.down_proj: its 46 inputs"):
        compress(model, recipe("magnitude", "2:4"), None, progress=lambda *call: calls.append(1))
    assert not calls
    assert all(int((layer.weight() == 0).sum()) == 0 for layer in prunable_layers(model))


def test_windows_are_needed_by_methods_that_look_at_text() -> None:
    with pytest.raises(InputError, match="calibration windows"):
        compress(tiny_model("llama"), recipe("wanda", 0.5), None)


def test_windows_longer_than_the_model_takes_are_refused() -> None:
    with pytest.raises(InputError, match="65 tokens are longer than the 64"):
        compress(tiny_model("gpt2"), recipe("wanda", 0.5), Windows(tiny_ids(1, 65)))


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
