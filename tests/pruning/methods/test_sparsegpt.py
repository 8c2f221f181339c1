"""SparseGPT against weight-by-weight optimal brain surgery, and how it behaves at the edges."""

import numpy as np
import pytest
import torch

from pruning.methods import sparsegpt
from pruning.recipe import Pattern
from pruning.statistics import UnusableStatisticsError
from tests.pruning.methods import references

SHAPES = [(24, 40), (10, 300), (33, 129)]


def layer(rows: int, columns: int, seed: int = 0) -> tuple[references.Matrix, references.Matrix]:
    weight = np.random.default_rng(seed).standard_normal((rows, columns))
    return weight, references.correlated_inputs(4 * columns, columns, seed + 1)


def prune(weight: references.Matrix, gram: references.Matrix, sparsity: float) -> references.Matrix:
    pruned: references.Matrix = sparsegpt.prune(
        torch.from_numpy(weight), torch.from_numpy(gram), sparsity, None
    ).numpy()
    return pruned


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.77])
def test_float64_is_optimal_brain_surgery(shape: tuple[int, int], sparsity: float) -> None:
    weight, inputs = layer(*shape)
    gram = inputs.T @ inputs
    expected = references.sparsegpt(weight, gram, sparsity)
    pruned = prune(weight, gram, sparsity)
    np.testing.assert_array_equal(pruned == 0, expected == 0)
    np.testing.assert_allclose(pruned, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("pattern", ["2:4", "4:8"])
@pytest.mark.parametrize("shape", [(24, 40), (10, 264)])
def test_groups_are_optimal_brain_surgery(shape: tuple[int, int], pattern: str) -> None:
    chosen = Pattern.parse(pattern)
    weight, inputs = layer(*shape)
    gram = inputs.T @ inputs
    expected = references.sparsegpt_groups(weight, gram, chosen.kept, chosen.group)
    pruned = sparsegpt.prune(torch.from_numpy(weight), torch.from_numpy(gram), chosen.sparsity, chosen).numpy()
    np.testing.assert_array_equal(pruned == 0, expected == 0)
    np.testing.assert_allclose(pruned, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("shape", [*SHAPES, (64, 256)])
def test_float32_agrees_nearly_everywhere(shape: tuple[int, int]) -> None:
    weight, inputs = layer(*shape)
    single = torch.from_numpy(inputs).float()
    pruned = sparsegpt.prune(torch.from_numpy(weight).float(), single.T @ single, 0.5, None).numpy()
    expected = references.sparsegpt(weight, inputs.T @ inputs, 0.5)
    assert np.mean((pruned == 0) == (expected == 0)) >= 0.999
    error, least = (np.linalg.norm(inputs @ (weight - kept).T) for kept in (pruned, expected))
    assert error == pytest.approx(least, rel=0.01)


def test_the_kept_weights_make_up_for_the_removed_ones() -> None:
    weight, inputs = layer(24, 64)
    pruned = prune(weight, inputs.T @ inputs, 0.5)
    masked_only = np.where(pruned == 0, 0, weight)
    assert np.linalg.norm(inputs @ (weight - pruned).T) < 0.7 * np.linalg.norm(inputs @ (weight - masked_only).T)


@pytest.mark.parametrize("sparsity", [0.3, 0.5])
def test_dead_inputs_go_first_and_leave_the_count_right(sparsity: float) -> None:
    weight, inputs = layer(20, 140)
    inputs[:, [3, 50, 139]] = 0
    pruned = prune(weight, inputs.T @ inputs, sparsity)
    assert np.count_nonzero(pruned[:, [3, 50, 139]]) == 0
    assert np.count_nonzero(pruned == 0) == references.nearest(sparsity, weight.size)
    assert np.isfinite(pruned).all()


def test_groups_lose_dead_inputs_first() -> None:
    weight, inputs = layer(20, 16)
    weight[:, [1, 6, 7]] = 100
    inputs[:, [1, 6, 7]] = 0
    pattern = Pattern.parse("2:4")
    pruned = sparsegpt.prune(torch.from_numpy(weight), torch.from_numpy(inputs.T @ inputs), 0.5, pattern)
    assert int(pruned[:, [1, 6, 7]].count_nonzero()) == 0


def test_zeros_all_in_one_block_count_as_removed() -> None:
    weight, inputs = layer(6, 256)
    weight[:, 130:250] = 0
    for sparsity in (0.5, 0.7):
        pruned = prune(weight, inputs.T @ inputs, sparsity)
        assert np.count_nonzero(pruned == 0) == references.nearest(sparsity, weight.size)


def test_more_dead_inputs_than_there_is_to_remove() -> None:
    weight, inputs = layer(4, 16)
    inputs[:, :12] = 0
    pruned = prune(weight, inputs.T @ inputs, 0.25)
    assert np.count_nonzero(pruned == 0) == 16
    np.testing.assert_array_equal(pruned[:, 12:], weight[:, 12:])


def test_an_indefinite_matrix_is_dampened_more() -> None:
    gram = np.array([[1.0, 1.05], [1.05, 1.0]])  # eigenvalues 2.05 and -0.05: 1% is too little, 10% enough
    weight = np.array([[1.0, 2.0], [3.0, -1.0]])
    expected = references.sparsegpt(weight, gram, 0.5, damping=0.1)
    np.testing.assert_allclose(prune(weight, gram, 0.5), expected, rtol=1e-9)


def test_a_hopeless_matrix_is_refused() -> None:
    gram = np.array([[1.0, 50.0], [50.0, 1.0]])
    with pytest.raises(UnusableStatisticsError, match="positive definite"):
        prune(np.ones((2, 2)), gram, 0.5)


def test_factor_is_that_of_the_inverse() -> None:
    _, inputs = layer(1, 30)
    gram = torch.from_numpy(inputs.T @ inputs)
    factor = sparsegpt.inverse_factor(gram)
    dampened = gram + 0.01 * gram.diagonal().mean() * torch.eye(30, dtype=torch.float64)
    assert torch.equal(factor, factor.triu())
    torch.testing.assert_close(factor.T @ factor @ dampened, torch.eye(30, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [1, 2, 7, 24, 25])
def test_a_triangle_is_inverted_in_parts(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparsegpt, "TRIANGLE", 3)
    lower = np.tril(np.random.default_rng(size).standard_normal((size, size))) + 4 * np.eye(size)
    inverse = sparsegpt.inverse_triangle(torch.from_numpy(lower)).numpy()
    np.testing.assert_allclose(inverse, np.linalg.inv(lower), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(inverse, np.tril(inverse))


def test_nothing_to_remove_changes_nothing() -> None:
    weight, inputs = layer(4, 8)
    np.testing.assert_array_equal(prune(weight, inputs.T @ inputs, 0.0), weight)


def test_statistics_are_needed() -> None:
    with pytest.raises(ValueError, match="Gram"):
        sparsegpt.prune(torch.ones(2, 2), None, 0.5, None)


def test_a_kept_weight_that_an_update_brings_to_zero_is_not_counted_as_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    factor = torch.tensor([[2.0, 1.0], [0.0, 0.25]], dtype=torch.float64)
    monkeypatch.setattr(sparsegpt, "inverse_factor", lambda gram: factor)
    # Removing the first weight takes exactly 1 · 1/2 from the second.
    weight = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    pruned = sparsegpt.prune(weight, torch.eye(2, dtype=torch.float64), 0.5, None)
    assert (pruned != 0).tolist() == [[False, True]]
    assert abs(float(pruned[0, 1])) < 1e-300
