"""Magnitude pruning within each output: no row loses more than its share (the baseline of Sun et al. 2023)."""

from torch import Tensor

from pruning.mask import lowest_in_groups, lowest_per_row, zeros_first
from pruning.methods.precision import working_copy
from pruning.recipe import Pattern


def prune(weight: Tensor, statistics: Tensor | None, sparsity: float, pattern: Pattern | None) -> Tensor:
    """A copy of ``weight`` (out, in) in which the smallest |W_ij| of every row are zero.

    Every row loses its share, rounded so that the matrix loses exactly the whole number nearest ``sparsity`` × out ×
    in; with ``pattern`` every M consecutive inputs lose all but N. ``statistics`` are not looked at. Float64 stays,
    anything else becomes float32.
    """
    pruned = working_copy(weight)
    scores = zeros_first(pruned.abs(), pruned)
    mask = lowest_per_row(scores, sparsity) if pattern is None else lowest_in_groups(scores, pattern)
    return pruned.masked_fill_(mask, 0)
