"""Which groups of a layer's inputs can go at the least cost, and what the kept weights become: least squares."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pruning.methods.factor import dampened_cholesky
from pruning.methods.precision import working_copy
from pruning.statistics import UnusableStatisticsError

DAMPING = 0.01
"""Share of the mean diagonal added to the diagonal of the Gram matrix; ten times more at every retry."""

ROUNDS = 64
"""In about so many rounds groups are removed; their costs are found anew in each, from what is still there."""


@dataclass(frozen=True)
class Order:
    """Groups in the order in which they go (groups,), and what the first so many cost together (groups,).

    Costs are ‖X(W - W')ᵀ‖², those of a dampened Gram matrix, with the kept weights at their best.
    """

    groups: Tensor
    costs: Tensor


def removal_order(weight: Tensor, gram: Tensor, size: int, count: int) -> Order:
    """The first ``count`` groups of ``size`` consecutive inputs to remove from ``weight`` (out, in), greedily.

    The cost of a group g is tr(W_g ([H⁻¹]_gg)⁻¹ W_gᵀ), with H the dampened ``gram`` of what is still there and W
    compensated for what is gone (Kurtic et al. 2023, ZipLM, arXiv 2302.04089, equations 2 and 3; Ling et al. 2024,
    SlimGPT, arXiv 2412.18110). Groups on inputs that were always zero go first, and cost nothing.
    Raises UnusableStatisticsError where H is not positive definite however much it is dampened.
    """
    weights = working_copy(weight)
    gram = gram.to(weights)
    inverse = _inverse(gram)
    groups = weights.shape[1] // size
    dead = (gram.diagonal().view(groups, size) == 0).all(dim=1)
    gone = torch.zeros(groups, dtype=torch.bool, device=weights.device)
    order: list[Tensor] = []
    costs: list[Tensor] = []
    spent = weights.new_zeros(())
    at_once = max(1, groups // ROUNDS)
    left = count
    while left > 0:
        scores = _costs(weights, inverse, size, gone)
        scores.masked_fill_(dead, -1.0).masked_fill_(gone, torch.inf)
        taken = min(at_once, left)
        chosen = scores.sort(stable=True).indices[:taken]
        columns = (chosen[:, None] * size + torch.arange(size, device=chosen.device)).flatten()
        order.append(chosen)
        costs += [spent + scores[chosen].clamp_min(0).cumsum(0)]
        spent = spent + _remove(weights, inverse, columns)
        costs[-1][-1] = spent
        gone[chosen] = True
        left -= taken
    if not order:
        return Order(torch.zeros(0, dtype=torch.int64, device=weights.device), weights.new_zeros(0))
    if not bool(torch.isfinite(spent)):
        raise UnusableStatisticsError("the costs of what could be removed are not finite")
    return Order(torch.cat(order), torch.cat(costs))


def compensated(weight: Tensor, gram: Tensor, kept: Tensor) -> Tensor:
    """Weights (out, kept) on the inputs ``kept`` alone, that change the outputs least: W_S + W_R H_RS (H_SS)⁻¹.

    S are the kept inputs, R the removed ones, and H is the dampened ``gram`` of all. Float64 stays, anything else
    becomes float32. Raises UnusableStatisticsError where H_SS is not positive definite however much it is dampened.
    """
    weights = working_copy(weight)
    gram = gram.to(weights)
    gone = torch.ones(weights.shape[1], dtype=torch.bool, device=weights.device)
    gone[kept] = False
    missing = weights[:, gone] @ gram[gone][:, kept]
    lower, _ = dampened_cholesky(gram[kept][:, kept], DAMPING, _mean(gram))
    result = weights[:, kept] + torch.cholesky_solve(missing.T, lower).T
    if not bool(torch.isfinite(result.sum())):
        raise UnusableStatisticsError("the least squares of the kept weights has no solution that is finite")
    return result


def _inverse(gram: Tensor) -> Tensor:
    lower, _ = dampened_cholesky(gram.clone(), DAMPING, _mean(gram))
    inverse: Tensor = torch.cholesky_inverse(lower)
    if not bool(torch.isfinite(inverse.sum())):
        raise UnusableStatisticsError("the inverse of the Gram matrix is not finite")
    return inverse


def _mean(gram: Tensor) -> Tensor:
    """The mean diagonal, or what makes the damping 1 where all inputs were always zero."""
    mean = gram.diagonal().mean()
    return torch.where(mean == 0, 1 / DAMPING, mean)


def _costs(weights: Tensor, inverse: Tensor, size: int, gone: Tensor) -> Tensor:
    """What each group would cost (groups,); anything for those that are ``gone``."""
    if size == 1:
        return weights.square().sum(dim=0) / inverse.diagonal()
    groups = len(gone)
    blocks = inverse.view(groups, size, groups, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()
    blocks[gone] = torch.eye(size, dtype=blocks.dtype, device=blocks.device)
    parts = weights.view(-1, groups, size).permute(1, 2, 0).contiguous()
    return (_solved(blocks, parts) * parts).sum(dim=(1, 2))


def _solved(matrix: Tensor, right: Tensor) -> Tensor:
    """matrix⁻¹ right, for parts of the inverse of a Gram matrix."""
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if bool(failed.any()):
        raise UnusableStatisticsError("rounding took more of the Gram matrix than removing inputs leaves of it")
    return torch.cholesky_solve(right, lower)


def _remove(weights: Tensor, inverse: Tensor, columns: Tensor) -> Tensor:
    """Remove ``columns`` of ``weights`` and of the ``inverse`` of their Gram matrix, in place; what it cost."""
    rows = inverse[columns]
    removed = weights[:, columns]
    both = _solved(rows[:, columns], torch.cat([rows, removed.T], dim=1))
    solved = both[:, : rows.shape[1]]
    cost = (both[:, rows.shape[1] :] * removed.T).sum()
    weights.addmm_(removed, solved, alpha=-1)
    inverse.addmm_(rows.T, solved, alpha=-1)
    weights[:, columns] = 0
    inverse[columns] = 0
    inverse[:, columns] = 0
    return cost
