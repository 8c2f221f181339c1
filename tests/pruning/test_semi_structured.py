"""2:4 layers run sparse only where that computes the same and is faster, and what became of them is said."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pruning import semi_structured
from pruning.artifact import save_artifact
from pruning.compress import compress
from pruning.recipe import Pattern, PruneStep, Recipe
from pruning.runtime import load_variant, runtime_of
from pruning.semi_structured import (
    SemiStructuredLinear,
    Tried,
    agree,
    converted,
    is_semi_structured,
    timed,
    use_where_faster,
)
from tests.pruning.folders import tiny_tokenizer
from tests.pruning.tiny import tiny_model

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
HALVES = Recipe(prune=PruneStep(method="magnitude", sparsity=0.5, pattern=Pattern.parse("2:4")))


def layer(rows: int, columns: int, *, dtype: torch.dtype = torch.bfloat16, bias: bool = False) -> nn.Linear:
    """Of each four weights the two in the places that a generator draws are kept."""
    generator = torch.Generator().manual_seed(rows + columns)
    made = nn.Linear(columns, rows, bias=bias)
    kept = torch.rand(rows * columns // 4, 4, generator=generator).argsort(dim=1) < 2
    with torch.no_grad():
        made.weight.copy_((torch.randn(kept.shape, generator=generator) * kept).view(rows, columns))
    return made.to(dtype).requires_grad_(False)


class Fake(nn.Module):
    """Stands for a sparse layer on a machine that has none: the dense one, ``off`` beside the truth."""

    def __init__(self, dense: nn.Linear, off: float = 0.0) -> None:
        super().__init__()
        self.dense = dense
        self.off = off

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.dense(inputs) + self.off
        return output


def test_what_is_two_of_four_is_found() -> None:
    made = layer(8, 16)
    assert is_semi_structured(made)
    made.weight[3, 4:8] = torch.tensor([1.0, 0.0, 2.0, 3.0])
    assert not is_semi_structured(made)
    made.weight[3, 4:8] = torch.tensor([0.0, 0.0, 2.0, 0.0])  # fewer are kept than may be
    assert is_semi_structured(made)
    assert not is_semi_structured(nn.Linear(16, 8))
    assert not is_semi_structured(nn.Linear(6, 8))
    assert not is_semi_structured(nn.Embedding(8, 16))
    made.weight.zero_()
    assert not is_semi_structured(made)


def test_there_are_no_kernels_but_on_cuda() -> None:
    assert converted(layer(64, 128)) is None
    tried = use_where_faster(nn.Sequential(layer(64, 128)))
    assert tried == Tried(layers=1)
    assert tried.words == "2:4 as dense, as there is no sparse kernel for it here"


def model_of(*layers: nn.Module) -> nn.Module:
    return nn.ModuleDict({"block": nn.Sequential(*layers)})


def test_layers_are_replaced_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, dense = layer(64, 128), layer(32, 64), nn.Linear(64, 32)
    model = model_of(first, second, dense)
    times = {(64, 128): (3.0, 1.0), (32, 64): (1.0, 2.0)}
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(semi_structured, "converted", Fake)
    monkeypatch.setattr(
        semi_structured,
        "timed",
        lambda plain, made: (asked.append(tuple(plain.weight.shape)), times[tuple(plain.weight.shape)])[1],
    )
    tried = use_where_faster(model)
    assert tried == Tried(layers=2, possible=2, sparse=1, speed=4.0 / 3.0)
    assert tried.words == "torch semi-structured 2:4 in 1 of 2 layers"
    block = model.get_submodule("block")
    assert isinstance(block[0], Fake)
    assert (block[1], block[2]) == (second, dense)
    assert asked == [(64, 128), (32, 64)]


def test_a_shape_is_timed_once_and_slower_ones_stay_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(layer(64, 128), layer(64, 128))
    asked: list[nn.Module] = []
    monkeypatch.setattr(semi_structured, "converted", Fake)
    monkeypatch.setattr(semi_structured, "timed", lambda plain, made: (asked.append(plain), (1.0, 1.25))[1])
    tried = use_where_faster(model)
    assert (tried, len(asked)) == (Tried(layers=2, possible=2, sparse=0, speed=0.8), 1)
    assert tried.words == "2:4 as dense, as sparse kernels are not faster here: 0.80 of the speed"
    assert all(type(one) is nn.Linear for one in model.get_submodule("block"))
    assert runtime_of(model, torch.bfloat16, torch.device("cuda"), tried) == f"torch bfloat16; {tried.words}"


def test_what_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(semi_structured, "converted", lambda dense: Fake(dense, off=1.0))
    monkeypatch.setattr(semi_structured, "timed", lambda plain, made: (2.0, 1.0))
    assert use_where_faster(model_of(layer(64, 128))) == Tried(layers=1)
    dense = layer(64, 128, bias=True)
    assert agree(dense, Fake(dense))
    assert not agree(dense, Fake(dense, off=0.5))


def test_both_are_timed_in_turns() -> None:
    calls: list[str] = []

    class Named(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            calls.append("dense")
            return inputs

    dense = Named(64, 32)
    sparse = Fake(layer(32, 64, dtype=torch.float32))
    sparse.register_forward_hook(lambda *given: calls.append("sparse"))
    one, other = timed(dense, sparse)
    assert one > 0 < other
    turns = [name for place, name in enumerate(calls) if place % semi_structured.CALLS == 0]
    assert turns == ["dense", "sparse"] * semi_structured.ROUNDS


def test_nothing_is_said_of_a_variant_without_them() -> None:
    assert use_where_faster(tiny_model("llama")).words == ""


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 128), (1536, 576), (4096, 4096)])
def test_sparse_layers_are_within_rounding_of_float64(shape: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    dense = layer(*shape, dtype=dtype, bias=bias)
    made = converted(dense.cuda())
    assert isinstance(made, SemiStructuredLinear)
    for tokens in (1, 5, 64):
        inputs = torch.randn(2, tokens, shape[1], generator=torch.Generator().manual_seed(tokens)).to(dtype)
        weight = dense.weight.cpu().double()
        exact, magnitude = inputs.double() @ weight.T, inputs.double().abs() @ weight.abs().T
        if dense.bias is not None:
            exact, magnitude = exact + dense.bias.cpu().double(), magnitude + dense.bias.cpu().double().abs()
        error = (made(inputs.cuda()).cpu().double() - exact).abs()
        allowed = semi_structured.TOLERANCE[dtype] / 2 * magnitude
        assert bool((error <= allowed).all())
    stored = sum(part.nbytes for part in (made.packed, made.meta) if part is not None)
    assert stored <= 0.6 * dense.weight.nbytes


@pytest.mark.gpu
@on_gpu
def test_a_variant_on_the_card_says_what_became_of_it(tmp_path: Path) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    compress(model, HALVES, None)
    save_artifact(model, tiny_tokenizer(), tmp_path / "variant", {"recipe": str(HALVES)})
    assert "2:4" in load_variant(tmp_path / "variant", device="cuda").runtime


@pytest.mark.gpu
@on_gpu
def test_times_on_this_card_are_printed() -> None:
    for shape in ((576, 576), (4096, 4096), (14336, 4096)):
        dense = layer(*shape).cuda()
        made = converted(dense)
        assert made is not None
        assert agree(dense, made)
        plain, sparse = timed(dense, made)
        sys.stdout.write(f"{shape}: dense {plain * 1e6:.0f} µs, 2:4 {sparse * 1e6:.0f} µs, {plain / sparse:.2f}×\n")
