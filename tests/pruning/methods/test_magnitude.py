"""Magnitude pruning against sorting by hand."""

import pytest
import torch

from pruning.methods import magnitude
from pruning.recipe import Pattern


def test_the_smallest_of_the_whole_matrix_go() -> None:
    weight = torch.tensor([[0.1, -0.2, 5.0], [-6.0, 0.3, 7.0]])
    pruned = magnitude.prune(weight, None, 0.5, None)
    assert torch.equal(pruned, torch.tensor([[0.0, 0.0, 5.0], [-6.0, 0.0, 7.0]]))
    assert weight[0, 0] == 0.1


def test_two_of_four_keeps_the_largest_pair() -> None:
    weight = torch.tensor([[1.0, -2.0, 3.0, -4.0, 8.0, 7.0, -6.0, 5.0]])
    pattern = Pattern.parse("2:4")
    pruned = magnitude.prune(weight, None, 0.5, pattern)
    assert torch.equal(pruned, torch.tensor([[0.0, 0.0, 3.0, -4.0, 8.0, 7.0, 0.0, 0.0]]))


def test_ties_do_not_overshoot() -> None:
    pruned = magnitude.prune(torch.ones(5, 7), None, 0.5, None)
    assert int((pruned == 0).sum()) == 18  # the whole number nearest 17.5, halves upwards


@pytest.mark.parametrize(
    ("given", "returned"),
    [(torch.float64, torch.float64), (torch.bfloat16, torch.float32), (torch.float16, torch.float32)],
)
def test_precision(given: torch.dtype, returned: torch.dtype) -> None:
    weight = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)).to(given)
    pruned = magnitude.prune(weight, None, 0.3, None)
    assert pruned.dtype == returned
    order = weight.double().abs().flatten().argsort()
    expected = weight.flatten().clone()
    expected[order[:18]] = 0
    assert torch.equal(pruned.to(given).flatten(), expected)
