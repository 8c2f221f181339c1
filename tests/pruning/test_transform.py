"""One layer: its report, its fallbacks, what it draws at random, and quantization after pruning."""

import math

import pytest
import torch
from torch import Tensor, nn

from pruning.anatomy import LinearLayer
from pruning.errors import RunError
from pruning.methods import METHODS
from pruning.quantize.int8 import Int8Linear
from pruning.recipe import PruneStep, QuantizeStep, Recipe
from pruning.statistics import Observed
from pruning.transform import UNSEEN, Transformed, examine, norms_of, put
from pruning.transform import transform as transform_subject


class Holder(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.inner = nn.Linear(weight.shape[1], weight.shape[0])
        with torch.no_grad():
            self.inner.weight.copy_(weight)


def layer_of(weight: Tensor) -> tuple[Holder, LinearLayer]:
    holder = Holder(weight).requires_grad_(False)
    return holder, LinearLayer("inner", holder.inner)


def observed(inputs: Tensor, kind: str = "norms") -> Observed:
    statistic = inputs.norm(dim=0) if kind == "norms" else inputs.T @ inputs
    return Observed(statistic, inputs, len(inputs))


def transform(layer: LinearLayer, block: str, seen: Observed, asked: Recipe, share: float) -> Transformed:
    return transform_subject(examine(layer, block, seen), asked, share)


def recipe(method: str = "wanda", sparsity: float = 0.5, quantize: bool = False, seed: int = 0) -> Recipe:
    return Recipe(
        prune=PruneStep(method=method, sparsity=sparsity, seed=seed),
        quantize=QuantizeStep(scheme="int8") if quantize else None,
    )


def test_the_error_of_the_output_is_measured_on_the_sample() -> None:
    # W = [[3, 1]] loses its 1: X W'ᵀ differs from X Wᵀ by x₂ alone.
    _, layer = layer_of(torch.tensor([[3.0, 1.0]]))
    inputs = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    done = transform(layer, "b", observed(inputs), recipe(), 0.5)
    assert done.weight is not None
    assert done.weight.tolist() == [[3.0, 0.0]]
    assert done.report.output_error == pytest.approx(math.sqrt(2**2 + 1**2) / math.sqrt(5**2 + 1**2))
    assert (done.report.sampled, done.report.tokens) == (2, 2)


def test_outliers_are_those_of_the_dense_layer_above_five_means() -> None:
    weight = torch.ones(4, 25)
    weight[0, 3] = -400.0
    weight[2, 7] = 30.0
    norms = torch.ones(25)
    norms[11] = 20.0
    scores = [[abs(float(weight[i, j])) * float(norms[j]) for j in range(25)] for i in range(4)]
    mean = sum(map(sum, scores)) / 100
    expected = sum(score > 5 * mean for row in scores for score in row) / 100
    assert 0 < expected < 0.05
    _, layer = layer_of(weight)
    done = transform(layer, "b", Observed(norms, torch.ones(1, 25), 1), recipe(), 0.5)
    assert done.report.outlier_ratio == expected


def test_without_text_there_is_no_error_and_no_outlier_ratio() -> None:
    _, layer = layer_of(torch.randn(4, 6))
    report = transform(layer, "b", UNSEEN, recipe("magnitude"), 0.5).report
    assert (report.output_error, report.outlier_ratio, report.tokens, report.sampled) == (None, None, 0, 0)


def test_the_layer_itself_is_left_alone_until_the_result_is_put_there() -> None:
    weight = torch.randn(4, 6)
    holder, layer = layer_of(weight)
    done = transform(layer, "b", observed(torch.randn(9, 6)), recipe(), 0.5)
    assert torch.equal(holder.inner.weight, weight)
    put(holder, layer, done.tensors(), recipe())
    assert int((holder.inner.weight == 0).sum()) == 12
    assert done.report.sparsity == 0.5


def test_quantized_layers_report_the_error_of_what_will_run() -> None:
    torch.manual_seed(0)
    weight, inputs = torch.randn(8, 32), torch.randn(64, 32)
    holder, layer = layer_of(weight)
    done = transform(layer, "b", observed(inputs), recipe(quantize=True), 0.5)
    put(holder, layer, done.tensors(), recipe(quantize=True))
    assert isinstance(holder.inner, Int8Linear)
    runs = holder.inner.dequantized().double()
    change = inputs.double() @ (weight.double() - runs).T
    expected = float(change.norm() / (inputs.double() @ weight.double().T).norm())
    assert done.report.output_error == pytest.approx(expected, rel=1e-5)
    assert done.report.sparsity == int((holder.inner.codes == 0).sum()) / 256


def test_a_gram_matrix_serves_methods_that_want_norms() -> None:
    torch.manual_seed(0)
    weight, inputs = torch.randn(8, 32), torch.randn(64, 32)
    _, layer = layer_of(weight)
    by_norms = transform(layer, "b", observed(inputs), recipe(), 0.5)
    by_gram = transform(layer, "b", observed(inputs, "gram"), recipe(), 0.5)
    assert by_norms.weight is not None
    assert by_gram.weight is not None
    assert torch.equal(by_norms.weight, by_gram.weight)
    assert torch.allclose(norms_of(inputs.T @ inputs), inputs.norm(dim=0))


def test_what_is_drawn_follows_from_seed_and_name_alone() -> None:
    seeded = [name for name, method in METHODS.items() if method.seeded]
    for method in seeded:
        weight = torch.randn(16, 16)
        _, layer = layer_of(weight)
        torch.manual_seed(1)
        first = transform(layer, "b", UNSEEN, recipe(method), 0.5).weight
        torch.manual_seed(2)
        again = transform(layer, "b", UNSEEN, recipe(method), 0.5).weight
        other = transform(layer, "b", UNSEEN, recipe(method, seed=1), 0.5).weight
        elsewhere = transform(LinearLayer("other", layer.module), "b", UNSEEN, recipe(method), 0.5).weight
        assert first is not None
        assert again is not None
        assert other is not None
        assert elsewhere is not None
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert not torch.equal(first, elsewhere)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_name_block_and_layer(value: float) -> None:
    weight = torch.ones(2, 4)
    weight[1, 2] = value
    _, layer = layer_of(weight)
    with pytest.raises(RunError, match="the weights of inner in block b are not finite"):
        transform(layer, "b", observed(torch.ones(3, 4)), recipe(), 0.5)
    _, layer = layer_of(torch.ones(2, 4))
    inputs = torch.ones(3, 4)
    inputs[0, 0] = value
    with pytest.raises(RunError, match="what inner in block b was given on the calibration text"):
        transform(layer, "b", observed(inputs), recipe(), 0.5)


def test_large_finite_numbers_are_not_taken_for_infinite_ones() -> None:
    weight = torch.full((4, 8), 3e38)
    _, layer = layer_of(weight)
    assert examine(layer, "b", UNSEEN).dense.isfinite().all()
