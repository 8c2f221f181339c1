"""ADMM: mask and kept weights are optimised together (Boža 2024, 2401.02938), then refitted (Meng et al. 2024)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pruning.mask import lowest, lowest_in_groups, removal_count, zeros_first
from pruning.methods.factor import Memory, dampened_cholesky
from pruning.methods.precision import working_copy
from pruning.methods.sparsegpt import round_columns
from pruning.quantize.grid import Grid
from pruning.recipe import Pattern
from pruning.statistics import UnusableStatisticsError

ITERATIONS = 20
RAMP = 15
"""Iterations in which the mask is chosen; then it stays."""

PENALTY = 0.7
"""ρ: how strongly the dense iterate is drawn to the sparse one. On held-out text 0.7 gave less error than 1 and 2."""

DAMPING = 0.1
"""Added to the diagonal of the normalised Gram matrix, which is 1."""

FLOOR = 0.01
"""Share of the median norm below which an input counts as that strong.

Otherwise hardly used inputs could be given enormous weights for the sake of the calibration text.
"""

REFIT = 8
"""Most steps of conjugate gradients on the final mask."""

TOLERANCE = 1e-4
"""Residual, as a share of the right-hand side, at which the refit ends."""

_memory = Memory()


@dataclass(frozen=True)
class Problem:
    """The layer's inputs, normalised: ``hessian`` H (in, in) with 1 and the damping on its diagonal, ``norms`` (in,),
    which inputs are ``dead`` (in,), and ``inverse`` ρ(H + ρI)⁻¹ (in, in)."""

    hessian: Tensor
    norms: Tensor
    dead: Tensor
    inverse: Tensor


def prune(
    weight: Tensor, statistics: Tensor | None, sparsity: float, pattern: Pattern | None, *, grid: Grid | None = None
) -> Tensor:
    """A copy of ``weight`` (out, in) with exactly the whole number nearest ``sparsity`` × out × in removed.

    ``statistics`` is the Gram matrix XᵀX (in, in) of the layer's inputs. Mask and kept weights are those with which the
    layer's outputs on these inputs change least, as far as they are found; with ``pattern``, every M consecutive
    inputs lose all but N. With ``grid`` the kept ones are then rounded to it, each input's error made up for by later
    ones, and what is returned are the rounded ones. Float64 stays, anything else becomes float32. Raises ValueError
    without statistics and UnusableStatisticsError when the Gram matrix is not positive definite however much it is
    dampened.
    """
    if statistics is None:
        raise ValueError("ADMM needs the Gram matrix of the inputs")
    dense = working_copy(weight)
    zero = dense == 0
    count = removal_count(dense.numel(), sparsity)
    if pattern is None and count <= int(zero.sum()):
        return dense if grid is None else round_columns(dense, statistics, zero, grid)
    problem = _memory.get(statistics, normalise, dense)
    target = dense * problem.norms

    def choose(values: Tensor, share: float) -> Tensor:
        scores = zeros_first(values.abs().masked_fill_(problem.dead, 0), dense)
        if pattern is None:
            return lowest(scores, removal_count(dense.numel(), share)).logical_or_(zero)
        allowed = lowest_in_groups(scores, pattern)
        if share < sparsity:
            allowed = lowest(scores.masked_fill_(~allowed, torch.inf), removal_count(dense.numel(), share))
        return allowed.logical_or_(zero)

    kept, removed = alternate(target, problem.inverse, choose, sparsity)
    kept = refit(target, problem.hessian, kept, removed).div_(problem.norms)
    # What a dead input is multiplied by changes nothing: it stays what it was.
    kept = torch.where(problem.dead, dense, kept).masked_fill_(removed, 0)
    if not bool(torch.isfinite(kept.sum())):
        raise UnusableStatisticsError("the update of the kept weights is not finite")
    if grid is not None:
        return round_columns(kept, statistics, removed, grid)
    # A kept weight stays one that is not zero.
    return kept.masked_fill_((kept == 0) & ~removed, torch.finfo(kept.dtype).tiny)


def normalise(gram: Tensor) -> Problem:
    """The problem of a layer whose inputs have this Gram matrix (section 3.2 of Boža 2024).

    Raises UnusableStatisticsError when no damping makes the matrix positive definite.
    """
    norms = gram.diagonal().sqrt()
    dead = norms == 0
    alive = norms[~dead]
    norms = norms.clamp(min=FLOOR * float(alive.median()) if len(alive) else 1.0)
    hessian = gram / norms / norms[:, None]
    hessian.diagonal().add_(dead)
    _, hessian = dampened_cholesky(hessian, DAMPING, hessian.new_ones(()))
    shifted = hessian.clone()
    shifted.diagonal().add_(PENALTY)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(shifted)).mul_(PENALTY)
    return Problem(hessian, norms, dead, inverse)


def alternate(
    target: Tensor, inverse: Tensor, choose: Callable[[Tensor, float], Tensor], sparsity: float
) -> tuple[Tensor, Tensor]:
    """The sparse iterate Z (out, in) after all iterations, and the mask (out, in) of what is removed.

    ``target`` are the dense weights W₀ times the norms of their inputs and ``inverse`` is ρ(H + ρI)⁻¹. ``choose`` gives
    the mask for a share, which rises as 1 − (1 − t)³ (Zhu and Gupta 2017). The minimiser over the dense iterate,
    (H + ρI)⁻¹(HW₀ + ρ(Z − U)), is computed as W₀ − ρ(H + ρI)⁻¹(W₀ − Z + U), so that one product is all it takes.
    """
    total = target.clone()  # of the dense iterate W and the scaled dual U
    removed = torch.zeros_like(target, dtype=torch.bool)
    kept = target
    for iteration in range(1, ITERATIONS + 1):
        if iteration <= RAMP:
            share = sparsity if iteration == RAMP else sparsity * (1 - (1 - iteration / RAMP) ** 3)
            removed = choose(total, share)
        kept = total.masked_fill(removed, 0)
        if iteration == ITERATIONS:
            break
        dual = total.sub_(kept)
        distance = (target - kept).add_(dual)
        total = dual.add_(target).addmm_(distance, inverse, alpha=-1)
    return kept, removed


def refit(target: Tensor, hessian: Tensor, kept: Tensor, removed: Tensor) -> Tensor:
    """``kept`` (out, in), moved to where (Z − W₀)H(Z − W₀)ᵀ is least for every row with what is ``removed`` zero.

    Conjugate gradients on all rows at once (Meng et al. 2024, section 3.3). As H has an even diagonal their
    preconditioner, which is that diagonal, changes nothing and is left out.
    """
    residual = ((target - kept) @ hessian).masked_fill_(removed, 0)
    direction = residual.clone()
    size = residual.square().sum(dim=1, keepdim=True)
    least = TOLERANCE**2 * float((target @ hessian).square().sum())
    smallest = torch.finfo(target.dtype).tiny
    for _ in range(REFIT):
        if float(size.sum()) <= least:
            break
        image = (direction @ hessian).masked_fill_(removed, 0)
        step = size / (direction * image).sum(dim=1, keepdim=True).clamp_(min=smallest)
        kept = torch.addcmul(kept, step, direction)
        residual.addcmul_(step, image, value=-1)
        before, size = size, residual.square().sum(dim=1, keepdim=True)
        direction.mul_(size / before.clamp(min=smallest)).add_(residual)
    return kept
