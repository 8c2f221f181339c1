"""ADMM against plain loops over the paper, its refit against least squares, and its masks against all masks."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pruning.methods import admm, sparsegpt, wanda
from pruning.recipe import Pattern
from pruning.statistics import UnusableStatisticsError
from tests.pruning.methods import references

SHAPES = [(24, 40), (10, 96), (33, 65)]


def layer(rows: int, columns: int, seed: int = 0) -> tuple[references.Matrix, references.Matrix]:
    weight = np.random.default_rng(seed).standard_normal((rows, columns))
    inputs = references.correlated_inputs(4 * columns, columns, seed + 1)
    return weight, inputs.T @ inputs


def prune(
    weight: references.Matrix, gram: references.Matrix, sparsity: float, pattern: Pattern | None = None
) -> references.Matrix:
    pruned: references.Matrix = admm.prune(torch.from_numpy(weight), torch.from_numpy(gram), sparsity, pattern).numpy()
    return pruned


@pytest.fixture
def exact_refit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admm, "REFIT", 500)
    monkeypatch.setattr(admm, "TOLERANCE", 1e-13)


@pytest.mark.usefixtures("exact_refit")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.77])
def test_float64_is_the_paper(shape: tuple[int, int], sparsity: float) -> None:
    weight, gram = layer(*shape)
    expected = references.admm(weight, gram, sparsity)
    pruned = prune(weight, gram, sparsity)
    np.testing.assert_array_equal(pruned == 0, expected == 0)
    np.testing.assert_allclose(pruned, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.usefixtures("exact_refit")
@pytest.mark.parametrize("pattern", ["2:4", "4:8"])
def test_groups_are_the_paper(pattern: str) -> None:
    chosen = Pattern.parse(pattern)
    weight, gram = layer(24, 64)
    expected = references.admm(weight, gram, chosen.sparsity, (chosen.kept, chosen.group))
    pruned = prune(weight, gram, chosen.sparsity, chosen)
    np.testing.assert_array_equal(pruned == 0, expected == 0)
    np.testing.assert_allclose(pruned, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_is_as_good(shape: tuple[int, int]) -> None:
    weight, gram = layer(*shape)
    single = admm.prune(torch.from_numpy(weight).float(), torch.from_numpy(gram).float(), 0.5, None).double().numpy()
    expected = references.admm(weight, gram, 0.5)
    assert np.mean((single == 0) == (expected == 0)) >= 0.995
    error, least = (references.output_error(weight, kept, gram) for kept in (single, expected))
    assert error == pytest.approx(least, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_refit_reaches_least_squares_on_its_mask(dtype: torch.dtype) -> None:
    weight, gram = layer(40, 192)
    problem = admm.normalise(torch.from_numpy(gram).to(dtype))
    target = torch.from_numpy(weight).to(dtype) * problem.norms
    removed = torch.rand(40, 192, generator=torch.Generator().manual_seed(0)) < 0.5
    start = target.masked_fill(removed, 0)
    hessian, dense = problem.hessian.double().numpy(), target.double().numpy()
    best = references.least_squares(dense, hessian, removed.numpy())
    least = references.output_error(dense, best, hessian)
    first = references.output_error(dense, start.double().numpy(), hessian)
    kept = start
    for _ in range(8):  # each call is at most REFIT steps from where the one before ended
        kept = admm.refit(target, problem.hessian, kept, removed)
    assert bool((kept[removed] == 0).all())
    error = references.output_error(dense, kept.double().numpy(), hessian)
    assert least * (1 - 1e-9) <= error <= least * 1.0001
    assert first > 1.5 * least
    # What is left over on the kept weights, in float64: (t − z)H is zero where z is free to move.
    residual = ((dense - kept.double().numpy()) @ hessian)[~removed.numpy()]
    assert np.linalg.norm(residual) <= 3e-4 * np.linalg.norm(dense @ hessian)


@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.7])
def test_what_is_returned_is_all_but_least_squares_on_its_mask(sparsity: float) -> None:
    weight, gram = layer(48, 96)
    pruned = prune(weight, gram, sparsity)
    norms = np.sqrt(np.diag(gram))
    hessian = gram / np.outer(norms, norms) + 0.1 * np.eye(96)
    best = references.least_squares(weight * norms, hessian, pruned == 0)
    least = references.output_error(weight * norms, best, hessian)
    assert references.output_error(weight * norms, pruned * norms, hessian) <= 1.001 * least


def test_of_all_masks_of_a_small_problem_the_best_is_mostly_found() -> None:
    ratios = []
    for seed in range(20):
        weight, gram = layer(1, 8, seed)
        norms = np.sqrt(np.diag(gram))
        hessian = gram / np.outer(norms, norms) + 0.1 * np.eye(8)
        errors = []
        for chosen in itertools.combinations(range(8), 4):
            removed = np.zeros((1, 8), dtype=bool)
            removed[0, list(chosen)] = True
            best = references.least_squares(weight * norms, hessian, removed)
            errors.append(references.output_error(weight * norms, best, hessian))
        found = references.output_error(weight * norms, prune(weight, gram, 0.5) * norms, hessian)
        assert found >= min(errors) * (1 - 1e-9)
        ratios.append(found / min(errors))
    assert sum(ratio < 1.001 for ratio in ratios) >= 16
    assert max(ratios) < 1.5


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("ask", [0.3, 0.5, 0.7, "2:4"])
def test_the_error_is_below_that_of_sparsegpt_and_wanda(seed: int, ask: float | str) -> None:
    pattern = Pattern.parse(ask) if isinstance(ask, str) else None
    sparsity = pattern.sparsity if pattern is not None else float(ask)
    weight, gram = layer(24, 64, seed)
    given_gram, given_weight = torch.from_numpy(gram), torch.from_numpy(weight)
    error = references.output_error(weight, prune(weight, gram, sparsity, pattern), gram)
    surgeon = sparsegpt.prune(given_weight, given_gram, sparsity, pattern).numpy()
    masked = wanda.prune(given_weight, given_gram.diagonal().sqrt(), sparsity, pattern).numpy()
    assert error < references.output_error(weight, surgeon, gram)
    assert error < references.output_error(weight, masked, gram)


def test_dead_inputs_go_first_and_those_kept_stay_what_they_were() -> None:
    weight, gram = layer(20, 40)
    gram[:, [3, 17, 39]] = gram[[3, 17, 39]] = 0
    pruned = prune(weight, gram, 0.5)
    assert np.count_nonzero(pruned[:, [3, 17, 39]]) == 0
    assert np.count_nonzero(pruned == 0) == 400
    few = prune(weight, gram, 0.05)  # 40 of the 60 weights on dead inputs
    dead = few[:, [3, 17, 39]]
    assert np.count_nonzero(dead == 0) == 40
    np.testing.assert_array_equal(dead[dead != 0], weight[:, [3, 17, 39]][dead != 0])
    alive = [column for column in range(40) if column not in (3, 17, 39)]
    np.testing.assert_allclose(few[:, alive], weight[:, alive], rtol=1e-3)


def test_all_inputs_dead() -> None:
    weight, _ = layer(4, 8)
    pruned = prune(weight, np.zeros((8, 8)), 0.5)
    assert np.count_nonzero(pruned == 0) == 16
    np.testing.assert_array_equal(pruned[pruned != 0], weight[pruned != 0])


def test_a_hardly_used_input_is_not_given_enormous_weights() -> None:
    weight, inputs = np.random.default_rng(0).standard_normal((16, 32)), references.correlated_inputs(128, 32, 1)
    inputs[:, 5] = 1e-6 * inputs[:, :4].sum(axis=1)
    pruned = prune(weight, inputs.T @ inputs, 0.5)
    assert np.abs(pruned[:, 5]).max() < 10 * np.abs(weight).max()


@settings(deadline=None, max_examples=50)
@given(
    rows=st.integers(1, 8),
    ask=st.one_of(st.floats(0.05, 0.9), st.sampled_from(["2:4", "4:8"])),
    zeros=st.floats(0, 0.6),
    seed=st.integers(0, 99),
)
def test_zeros_that_are_there_stay_and_count(rows: int, ask: float | str, zeros: float, seed: int) -> None:
    pattern = Pattern.parse(ask) if isinstance(ask, str) else None
    sparsity = pattern.sparsity if pattern is not None else float(ask)
    weight, gram = layer(rows, 16, seed)
    natural = np.random.default_rng(seed).random(weight.shape) < zeros
    weight[natural] = 0
    pruned = prune(weight, gram, sparsity, pattern)
    assert np.count_nonzero(pruned[natural]) == 0
    if pattern is None:
        assert np.count_nonzero(pruned == 0) == max(references.nearest(sparsity, weight.size), natural.sum())
    again = prune(pruned, gram, sparsity, pattern)
    np.testing.assert_array_equal(again == 0, pruned == 0)


def test_as_many_zeros_as_asked_for_change_nothing() -> None:
    weight, gram = layer(8, 16)
    weight[:, ::2] = 0
    np.testing.assert_array_equal(prune(weight, gram, 0.5), weight)
    np.testing.assert_array_equal(prune(weight, gram, 0.0), weight)


def test_a_hopeless_matrix_is_refused() -> None:
    gram = np.array([[1.0, 500.0], [500.0, 1.0]])
    with pytest.raises(UnusableStatisticsError, match="positive definite"):
        prune(np.array([[1.0, 2.0], [3.0, 4.0]]), gram, 0.5)


def test_an_indefinite_matrix_is_dampened_more() -> None:
    gram = np.array([[1.0, 1.5], [1.5, 1.0]])  # eigenvalues 2.5 and -0.5: 0.1 is too little, 1 enough
    weight = np.array([[1.0, 2.0], [3.0, -1.0]])
    expected = references.admm(weight, gram, 0.5, damping=1.0)
    pruned = prune(weight, gram, 0.5)
    np.testing.assert_allclose(pruned, expected, rtol=1e-3)


def test_a_kept_weight_that_the_update_brings_to_zero_is_not_counted_as_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, gram = layer(4, 8)
    monkeypatch.setattr(admm, "refit", lambda target, hessian, kept, removed: torch.zeros_like(kept))
    assert np.count_nonzero(prune(weight, gram, 0.5) == 0) == 16


def test_statistics_are_needed() -> None:
    with pytest.raises(ValueError, match="Gram"):
        admm.prune(torch.ones(2, 2), None, 0.5, None)


def test_the_inputs_are_left_as_they_were() -> None:
    weight, gram = layer(6, 16)
    given_weight, given_gram = torch.from_numpy(weight.copy()), torch.from_numpy(gram.copy())
    admm.prune(given_weight, given_gram, 0.5, None)
    np.testing.assert_array_equal(given_weight.numpy(), weight)
    np.testing.assert_array_equal(given_gram.numpy(), gram)
