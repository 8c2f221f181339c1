"""Wanda against plain loops, and what it promises about counts."""

import numpy as np
import pytest
import torch

from pruning.methods import wanda
from pruning.recipe import Pattern
from tests.pruning.methods import references

SHAPES = [(24, 40), (7, 33), (16, 160)]


def layer(rows: int, columns: int, seed: int = 0) -> tuple[references.Matrix, references.Matrix]:
    weight = np.random.default_rng(seed).standard_normal((rows, columns))
    return weight, references.correlated_inputs(4 * columns, columns, seed + 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.77])
def test_float64_is_the_plain_loops(shape: tuple[int, int], sparsity: float) -> None:
    weight, inputs = layer(*shape)
    norms = torch.from_numpy(inputs).norm(dim=0)
    pruned = wanda.prune(torch.from_numpy(weight), norms, sparsity, None)
    assert pruned.dtype == torch.float64
    np.testing.assert_array_equal(pruned.numpy(), references.wanda(weight, inputs, sparsity))


@pytest.mark.parametrize("pattern", ["2:4", "4:8"])
def test_groups_are_the_plain_loops(pattern: str) -> None:
    chosen = Pattern.parse(pattern)
    weight, inputs = layer(24, 40)
    norms = torch.from_numpy(inputs).norm(dim=0)
    pruned = wanda.prune(torch.from_numpy(weight), norms, chosen.sparsity, chosen)
    np.testing.assert_array_equal(pruned.numpy(), references.wanda_groups(weight, inputs, chosen.kept, chosen.group))


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_agrees_nearly_everywhere(shape: tuple[int, int]) -> None:
    weight, inputs = layer(*shape)
    norms = torch.from_numpy(inputs).float().norm(dim=0)
    pruned = wanda.prune(torch.from_numpy(weight).float(), norms, 0.5, None).numpy()
    expected = references.wanda(weight, inputs, 0.5)
    assert np.mean((pruned == 0) == (expected == 0)) >= 0.999
    error, least = (np.linalg.norm(inputs @ (weight - kept).T) for kept in (pruned, expected))
    assert error == pytest.approx(least, rel=0.01)


def test_the_input_is_left_as_it_was() -> None:
    weight = torch.randn(4, 8)
    before = weight.clone()
    wanda.prune(weight, torch.ones(8), 0.5, None)
    assert torch.equal(weight, before)


def test_a_weak_input_goes_before_a_small_weight() -> None:
    weight = torch.tensor([[3.0, 1.0, -2.0, 0.5]])
    norms = torch.tensor([0.1, 1.0, 1.0, 4.0])  # scores 0.3, 1, 2, 2
    pruned = wanda.prune(weight, norms, 0.5, None)
    assert torch.equal(pruned, torch.tensor([[0.0, 0.0, -2.0, 0.5]]))


def test_statistics_are_needed() -> None:
    with pytest.raises(ValueError, match="norms"):
        wanda.prune(torch.ones(2, 2), None, 0.5, None)
