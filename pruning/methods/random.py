"""Random pruning: the control that every other method has to beat."""

import torch
from torch import Tensor

from pruning.mask import lowest, lowest_in_groups, removal_count, zeros_first
from pruning.methods.precision import working_copy
from pruning.recipe import Pattern


def prune(
    weight: Tensor, statistics: Tensor | None, sparsity: float, pattern: Pattern | None, *, generator: torch.Generator
) -> Tensor:
    """A copy of ``weight`` (out, in) in which weights drawn with ``generator`` (on the CPU) are zero.

    Exactly the whole number nearest ``sparsity`` × out × in of them, those that are zero already first; with
    ``pattern`` all but N of each M consecutive inputs. ``statistics`` are not looked at. Float64 stays, anything else
    becomes float32.
    """
    pruned = working_copy(weight)
    scores = zeros_first(torch.rand(pruned.shape, generator=generator).to(pruned.device), pruned)
    if pattern is None:
        mask = lowest(scores, removal_count(weight.numel(), sparsity))
    else:
        mask = lowest_in_groups(scores, pattern)
    return pruned.masked_fill_(mask, 0)
