"""Random pruning: exact counts, chance alone decides, and the seed decides chance."""

import numpy as np
import pytest
import torch

from pruning.methods import random
from pruning.recipe import Pattern


def prune(weight: torch.Tensor, sparsity: float, pattern: str | None = None, seed: int = 0) -> torch.Tensor:
    chosen = Pattern.parse(pattern) if pattern is not None else None
    return random.prune(weight, None, sparsity, chosen, generator=torch.Generator().manual_seed(seed))


def test_the_seed_decides() -> None:
    weight = torch.randn(8, 12)
    assert torch.equal(prune(weight, 0.5), prune(weight, 0.5))
    assert not torch.equal(prune(weight, 0.5), prune(weight, 0.5, seed=1))


def test_size_plays_no_part() -> None:
    weight = torch.cat([torch.full((50, 20), 1e-3), torch.full((50, 20), 1e3)])
    small, large = prune(weight, 0.3).view(2, -1)
    assert int((small == 0).sum()) + int((large == 0).sum()) == 600
    # 600 of 2000: 300 of the small ones and a standard deviation of 14.5.
    assert abs(int((small == 0).sum()) - 300) < 4 * 14.5


@pytest.mark.parametrize("pattern", ["2:4", "4:8"])
def test_groups_lose_what_they_must(pattern: str) -> None:
    chosen = Pattern.parse(pattern)
    pruned = prune(torch.ones(30, 32), 0.5, pattern)
    kept = pruned.view(30, -1, chosen.group).sum(dim=2)
    assert torch.equal(kept, torch.full_like(kept, chosen.kept))
    assert len(np.unique(pruned.numpy(), axis=0)) > 20


def test_zeros_that_are_there_go_first_and_kept_weights_stay() -> None:
    weight = torch.arange(40, dtype=torch.bfloat16).view(5, 8)
    weight[:, 3] = 0
    pruned = prune(weight, 0.5)
    assert pruned.dtype == torch.float32
    assert int((pruned == 0).sum()) == 20
    assert torch.equal(pruned[pruned != 0], weight.float()[pruned != 0])
