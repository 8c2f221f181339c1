"""What goes and what the kept weights become, against least squares on the inputs themselves."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pruning.statistics import UnusableStatisticsError
from pruning.structured import select
from pruning.structured.select import DAMPING, compensated, removal_order


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def correlated(rows: int, features: int, seed: int = 0) -> Tensor:
    """Inputs (rows, features) of unequal strength, each mixed with the others."""
    strengths = torch.linspace(0.2, 3, features, dtype=torch.float64)
    return random(rows, features, seed=seed) @ (random(features, features, seed=seed + 1) * 0.4) * strengths


def best(weight: Tensor, inputs: Tensor, kept: list[int]) -> tuple[np.ndarray, float]:
    """Weights (out, kept) by numpy's least squares, and what is lost; the damping is rows that ask for no change."""
    damping = DAMPING * float(inputs.square().sum() / inputs.shape[1])
    rows = np.concatenate([inputs.numpy(), np.sqrt(damping) * np.eye(inputs.shape[1])])
    wanted = rows @ weight.numpy().T
    solution, *_ = np.linalg.lstsq(rows[:, kept], wanted, rcond=None)
    return solution.T, float(((rows[:, kept] @ solution - wanted) ** 2).sum())


@settings(max_examples=30, deadline=None)
@given(features=st.integers(2, 12), seed=st.integers(0, 1000), data=st.data())
def test_kept_weights_are_the_least_squares_of_the_inputs(features: int, seed: int, data: st.DataObject) -> None:
    kept = data.draw(st.lists(st.integers(0, features - 1), min_size=1, unique=True).map(sorted))
    weight, inputs = random(5, features, seed=seed), correlated(40, features, seed=seed)
    found = compensated(weight, inputs.T @ inputs, torch.tensor(kept))
    expected, _ = best(weight, inputs, kept)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-8, atol=1e-10)


def test_all_inputs_kept_change_nothing() -> None:
    weight, inputs = random(4, 6), correlated(20, 6)
    assert torch.equal(compensated(weight, inputs.T @ inputs, torch.arange(6)), weight)


def test_inputs_that_were_always_zero_are_given_up_for_nothing() -> None:
    weight, inputs = random(4, 6), correlated(20, 6)
    inputs[:, [1, 4]] = 0
    gram = inputs.T @ inputs
    order = removal_order(weight, gram, 1, 3)
    assert set(order.groups[:2].tolist()) == {1, 4}
    kept = torch.tensor([0, 2, 3, 5])
    assert torch.equal(compensated(weight, gram, kept), weight[:, kept])


def greedily(weight: Tensor, inputs: Tensor, size: int, count: int) -> tuple[list[int], list[float]]:
    """Every group tried at every step, by least squares on the inputs."""
    groups = weight.shape[1] // size
    left, order, costs = list(range(groups)), [], []
    for _ in range(count):
        tried = {}
        for group in left:
            kept = [g * size + i for g in left if g != group for i in range(size)]
            tried[group] = best(weight, inputs, kept)[1]
        chosen = min(tried, key=tried.__getitem__)
        left.remove(chosen)
        order.append(chosen)
        costs.append(tried[chosen])
    return order, costs


@pytest.mark.parametrize(("features", "size", "count"), [(12, 1, 7), (12, 3, 3), (16, 4, 2), (9, 3, 2), (5, 1, 4)])
@pytest.mark.parametrize("seed", [0, 7, 23])
def test_groups_go_in_the_order_of_what_they_cost_then(features: int, size: int, count: int, seed: int) -> None:
    weight, inputs = random(6, features, seed=seed), correlated(50, features, seed=seed)
    found = removal_order(weight, inputs.T @ inputs, size, count)
    order, costs = greedily(weight, inputs, size, count)
    assert found.groups.tolist() == order
    np.testing.assert_allclose(found.costs.numpy(), costs, rtol=1e-8)


def test_several_at_a_time_cost_what_least_squares_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "ROUNDS", 4)  # 24 groups go six at a time
    weight, inputs = random(6, 24), correlated(80, 24)
    found = removal_order(weight, inputs.T @ inputs, 1, 14)
    assert len(set(found.groups.tolist())) == 14
    for end in (6, 12, 14):
        kept = sorted(set(range(24)) - set(found.groups[:end].tolist()))
        assert float(found.costs[end - 1]) == pytest.approx(best(weight, inputs, kept)[1], rel=1e-8)
    assert all(a <= b for a, b in pairwise(found.costs.tolist()))


def test_nothing_to_remove_is_an_empty_order() -> None:
    order = removal_order(random(4, 6), torch.eye(6, dtype=torch.float64), 2, 0)
    assert (order.groups.numel(), order.costs.numel()) == (0, 0)


def test_fewer_tokens_than_inputs_are_no_obstacle() -> None:
    weight, inputs = random(4, 12), correlated(5, 12)
    order = removal_order(weight.float(), (inputs.T @ inputs).float(), 1, 8)
    assert len(set(order.groups.tolist())) == 8
    kept = [0, 3, 5, 7]
    found = compensated(weight, inputs.T @ inputs, torch.tensor(kept))
    np.testing.assert_allclose(found.numpy(), best(weight, inputs, kept)[0], rtol=1e-8)


def test_a_gram_matrix_of_nothing_real_is_refused() -> None:
    gram = -torch.eye(4, dtype=torch.float64)
    with pytest.raises(UnusableStatisticsError, match="positive definite"):
        removal_order(random(3, 4), gram, 1, 2)
    with pytest.raises(UnusableStatisticsError, match="positive definite"):
        compensated(random(3, 4), gram, torch.tensor([0, 1]))
