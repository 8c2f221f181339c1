"""OWL: blocks with more outliers lose less (Yin et al. 2023, arXiv 2310.05175)."""

from collections.abc import Sequence

from pruning.anatomy import Block
from pruning.statistics import Observed
from pruning.transform import norms_of

FACTOR = 5.0
"""How many times the mean of its block an outlier is: M in the paper, which takes 5 or 7."""

SPREAD = 0.08
"""How far a block's sparsity is from the mean at most: lambda in the paper, which takes 0.08 for LLaMA."""


def outlier_ratio(block: Block, seen: dict[str, Observed]) -> float:
    """The share of a block's |W_ij|·‖x_j‖ that are above ``FACTOR`` times their mean (equation 2)."""
    scores = []
    for layer in block.layers:
        statistic = seen[layer.name].statistic
        if statistic is not None:
            scores.append(layer.weight().float().abs().mul_(norms_of(statistic).float()).flatten())
    if not scores:
        return 0.0
    total = sum(len(part) for part in scores)
    mean = sum(float(part.sum()) for part in scores) / total
    return sum(int((part > FACTOR * mean).sum()) for part in scores) / total


def wished_shares(ratios: Sequence[float], sparsity: float) -> list[float]:
    """The sparsity of each block: the more outliers the lower, over a range of twice ``SPREAD`` around the mean.

    The exact total is the caller's to keep.
    """
    lowest, highest = min(ratios), max(ratios)
    if highest == lowest:
        return [sparsity] * len(ratios)
    scaled = [(ratio - lowest) / (highest - lowest) * 2 * SPREAD for ratio in ratios]
    mean = sum(scaled) / len(scaled)
    return [sparsity - (value - mean) for value in scaled]
