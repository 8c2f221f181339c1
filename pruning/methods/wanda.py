"""Wanda: weights times the norm of their input, compared within each output (Sun et al. 2023, arXiv 2306.11695)."""

from torch import Tensor

from pruning.mask import lowest_in_groups, lowest_per_row, zeros_first
from pruning.methods.precision import working_copy
from pruning.recipe import Pattern


def prune(weight: Tensor, statistics: Tensor | None, sparsity: float, pattern: Pattern | None) -> Tensor:
    """A copy of ``weight`` (out, in) without the lowest |W_ij|·‖x_j‖₂ (equation 1).

    ``statistics`` are the norms (in,) of the input features. Every row loses its share, rounded so that the matrix
    loses exactly the whole number nearest ``sparsity`` × out × in; with ``pattern``, every M consecutive inputs lose
    all but N. Float64 stays, anything else becomes float32. Raises ValueError without statistics.
    """
    if statistics is None:
        raise ValueError("Wanda needs the norms of the input features")
    pruned = working_copy(weight)
    scores = zeros_first(pruned.abs().mul_(statistics.to(pruned)), pruned)
    mask = lowest_per_row(scores, sparsity) if pattern is None else lowest_in_groups(scores, pattern)
    return pruned.masked_fill_(mask, 0)
