"""Magnitude per row against sorting each row by hand."""

import numpy as np
import pytest
import torch

from pruning.methods import magnitude_row
from pruning.recipe import Pattern
from tests.pruning.methods import references


def test_every_row_loses_its_smallest() -> None:
    weight = torch.tensor([[0.1, -0.2, 5.0, 4.0], [-60.0, 30.0, 70.0, -80.0]])
    pruned = magnitude_row.prune(weight, None, 0.5, None)
    assert torch.equal(pruned, torch.tensor([[0.0, 0.0, 5.0, 4.0], [0.0, 0.0, 70.0, -80.0]]))


@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.77])
def test_it_is_wanda_on_inputs_that_are_all_as_strong(sparsity: float) -> None:
    weight = np.random.default_rng(0).standard_normal((7, 33))
    expected = references.wanda(weight, np.eye(33), sparsity)
    pruned = magnitude_row.prune(torch.from_numpy(weight), None, sparsity, None)
    np.testing.assert_array_equal(pruned.numpy(), expected)


def test_two_of_four() -> None:
    weight = torch.tensor([[1.0, -2.0, 3.0, -4.0, 8.0, 7.0, -6.0, 5.0]])
    pruned = magnitude_row.prune(weight, None, 0.5, Pattern.parse("2:4"))
    assert torch.equal(pruned, torch.tensor([[0.0, 0.0, 3.0, -4.0, 8.0, 7.0, 0.0, 0.0]]))
