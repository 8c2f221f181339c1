"""Factors are those of the dampened matrix, made once for layers with the same input, and never kept for another."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor

from pruning.methods import admm, sparsegpt
from pruning.methods.factor import Memory, dampened_cholesky
from pruning.statistics import UnusableStatisticsError


def positive(size: int, seed: int = 0) -> Tensor:
    inputs = torch.randn(4 * size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return inputs.T @ inputs


@pytest.mark.parametrize(("lowest", "added"), [(0.5, 0.1), (-0.5, 1.0), (-5.0, 10.0), (-50.0, 100.0)])
def test_the_least_damping_that_is_enough(lowest: float, added: float) -> None:
    turn = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    matrix = turn @ torch.diag(torch.tensor([lowest, 1, 2, 3, 4], dtype=torch.float64)) @ turn.T
    lower, dampened = dampened_cholesky(matrix.clone(), 0.1, torch.tensor(1.0, dtype=torch.float64))
    expected = matrix.numpy() + added * np.eye(5)
    np.testing.assert_allclose(dampened.numpy(), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lower.numpy(), np.linalg.cholesky(expected), rtol=1e-9, atol=1e-12)


def test_beyond_that_it_is_refused() -> None:
    with pytest.raises(UnusableStatisticsError, match="even dampened by 100 of its mean"):
        dampened_cholesky(torch.diag(torch.tensor([1.0, -101.0])), 0.1, torch.tensor(1.0))
    with pytest.raises(UnusableStatisticsError):
        dampened_cholesky(torch.full((2, 2), torch.nan), 0.1, torch.tensor(1.0))


class Counting:
    """A computation that counts how often it is asked for."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, matrix: Tensor) -> Tensor:
        self.times += 1
        return matrix * 2


def test_the_same_tensor_is_worked_on_once() -> None:
    memory, compute, like = Memory(), Counting(), torch.ones(1)
    first, second = torch.ones(3, 3), torch.ones(3, 3)
    assert memory.get(first, compute, like) is memory.get(first, compute, like)
    assert compute.times == 1
    memory.get(second, compute, like)  # equal, and another
    assert compute.times == 2
    memory.get(first, compute, like)  # only the last is kept
    assert compute.times == 3


def test_a_tensor_that_changed_or_another_precision_is_worked_on_again() -> None:
    memory, compute, like = Memory(), Counting(), torch.ones(1)
    matrix = torch.ones(3, 3)
    memory.get(matrix, compute, like)
    matrix.add_(1)
    assert torch.equal(memory.get(matrix, compute, like), torch.full((3, 3), 4.0))
    assert memory.get(matrix, compute, like.double()).dtype == torch.float64
    other = Counting()
    memory.get(matrix, other, like.double())
    assert (compute.times, other.times) == (3, 1)


def test_nothing_is_kept_longer_than_the_tensor() -> None:
    memory, like = Memory(), torch.ones(1)
    matrix = torch.ones(3, 3)
    result = weakref.ref(memory.get(matrix, Counting(), like))
    assert result() is not None
    del matrix
    gc.collect()
    assert result() is None


def test_an_error_leaves_nothing_behind() -> None:
    memory, like = Memory(), torch.ones(1)
    matrix = torch.ones(3, 3)

    def fail(given: Tensor) -> Tensor:
        raise UnusableStatisticsError("no")

    for _ in range(2):
        with pytest.raises(UnusableStatisticsError):
            memory.get(matrix, fail, like)
    assert torch.equal(memory.get(matrix, Counting(), like), 2 * matrix)


@pytest.mark.parametrize("method", [admm, sparsegpt])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_are_the_same_to_the_bit_with_and_without(method: object, dtype: torch.dtype) -> None:
    prune = method.prune  # type: ignore[attr-defined]
    gram = positive(48).to(dtype)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(rows, 48, generator=generator).to(dtype) for rows in (16, 8, 24)]
    shared = [prune(weight, gram, share, None) for share in (0.5, 0.7) for weight in weights]
    alone = [prune(weight, gram.clone(), share, None) for share in (0.5, 0.7) for weight in weights]
    assert all(torch.equal(one, other) for one, other in zip(shared, alone, strict=True))
