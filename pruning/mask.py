"""Choosing exactly which weights to remove, given a score for each."""

import numpy as np
import torch
from torch import Tensor

from pruning.recipe import Pattern

FIRST = -1.0
"""Score of a weight to take before all others; real scores are not negative."""


def removal_count(weights: int, sparsity: float) -> int:
    """The whole number nearest ``sparsity`` × ``weights``."""
    return int(sparsity * weights + 0.5)


def zeros_first(scores: Tensor, weight: Tensor) -> Tensor:
    """``scores``, changed in place so that weights that are zero already are the first to be taken."""
    return scores.masked_fill_(weight == 0, FIRST)


def lowest(scores: Tensor, count: int) -> Tensor:
    """A mask of the shape of ``scores`` that is true at exactly ``count`` of the lowest; of equals, the first ones."""
    flat = scores.reshape(-1)
    if count <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    if count >= flat.numel():
        return torch.ones_like(scores, dtype=torch.bool)
    border = _border(flat, count)
    chosen = flat < border
    at_border = (flat == border).nonzero().squeeze(1)
    chosen[at_border[: count - int(chosen.sum())]] = True
    return chosen.view(scores.shape)


def _border(flat: Tensor, count: int) -> float | Tensor:
    """The ``count``-th lowest score."""
    if flat.device.type == "cpu":
        # numpy selects with vector instructions, which is about ten times as fast as torch.kthvalue.
        return float(np.partition(flat.numpy(), count - 1)[count - 1])
    return torch.kthvalue(flat, count).values


def lowest_per_row(scores: Tensor, sparsity: float) -> Tensor:
    """A mask over (rows, columns) that is true at exactly ``removal_count`` places, spread evenly over the rows.

    Every row has the floor of its share removed, and the rows whose next score is lowest one more. A row that has
    more zeros than that (scores of ``FIRST``) keeps all of them, at the expense of the others, so that the zeros in
    the whole matrix come out right.
    """
    rows = scores.shape[0]
    count = removal_count(scores.numel(), sparsity)
    if count in (0, scores.numel()):
        return torch.full_like(scores, count > 0, dtype=torch.bool)
    zeros = (scores == FIRST).sum(dim=1)
    share = _even_share(zeros, count)
    mask = scores == FIRST
    light = (zeros <= share).nonzero().squeeze(1)
    some = scores if light.numel() == rows else scores[light]
    nearest = torch.topk(some, share + 1, dim=1, largest=False, sorted=False)
    chosen = torch.zeros_like(some, dtype=torch.bool).scatter_(1, nearest.indices, True)
    extra = count - int(zeros[zeros > share].sum()) - share * light.numel()
    next_score, place = nearest.values.max(dim=1)
    keeps_it = lowest(next_score, extra).logical_not_()
    column = nearest.indices.gather(1, place.unsqueeze(1)).squeeze(1)
    chosen[keeps_it.nonzero().squeeze(1), column[keeps_it]] = False
    mask[light] = chosen
    return mask


def _even_share(zeros: Tensor, count: int) -> int:
    """The largest share such that rows of max(share, their zeros) removed do not pass ``count`` in all."""
    share = count // zeros.numel()
    while share > 0 and int(zeros.clamp(min=share).sum()) > count:
        share -= 1
    return share


def lowest_in_groups(scores: Tensor, pattern: Pattern) -> Tensor:
    """A mask over (rows, columns): in each ``group`` consecutive columns all but ``kept`` are true, the lowest.

    Columns must be a multiple of the group. A group with more zeros than it loses keeps them, so a matrix may end up
    with more zeros than were removed.
    """
    rows, columns = scores.shape
    groups = scores.reshape(rows, columns // pattern.group, pattern.group)
    indices = torch.topk(groups, pattern.group - pattern.kept, dim=2, largest=False, sorted=False).indices
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(2, indices, True).view(rows, columns)
