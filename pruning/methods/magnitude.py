"""Magnitude pruning: the smallest weights of a matrix go (Han et al. 2015, arXiv 1506.02626)."""

from torch import Tensor

from pruning.mask import lowest, lowest_in_groups, removal_count
from pruning.methods.precision import working_copy
from pruning.recipe import Pattern


def prune(weight: Tensor, statistics: Tensor | None, sparsity: float, pattern: Pattern | None) -> Tensor:
    """A copy of ``weight`` (out, in) in which the smallest |W_ij| of the whole matrix are zero.

    Exactly the whole number nearest ``sparsity`` × out × in of them, or with ``pattern`` all but N of each M
    consecutive inputs. ``statistics`` are not looked at. Float64 stays, anything else becomes float32.
    """
    pruned = working_copy(weight)
    scores = pruned.abs()
    if pattern is None:
        mask = lowest(scores, removal_count(weight.numel(), sparsity))
    else:
        mask = lowest_in_groups(scores, pattern)
    return pruned.masked_fill_(mask, 0)
