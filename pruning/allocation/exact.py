"""Turns wished-for sparsities into whole numbers of weights that add up to the total that was asked for."""

from collections.abc import Mapping

from pruning.mask import removal_count

HIGHEST = 0.99
"""No layer loses more than this of its weights."""


def exact_shares(wished: Mapping[str, float], sizes: Mapping[str, int], sparsity: float) -> dict[str, float]:
    """The sparsity of each layer, as near as can be to ``wished`` plus one constant, within 0 and ``HIGHEST``.

    Rounding may take a layer one weight beyond. ``sizes`` are the layers' weights. What layers lose adds up to exactly
    the whole number nearest ``sparsity`` of all weights; a share is a whole number of weights over the layer's.
    """
    total = removal_count(sum(sizes.values()), sparsity)
    low, high = -1.0 - max(wished.values()), 1.0 - min(wished.values())
    for _ in range(100):
        middle = (low + high) / 2
        if sum(sizes[name] * _clip(share + middle) for name, share in wished.items()) < total:
            low = middle
        else:
            high = middle
    due = {name: sizes[name] * _clip(share + high) for name, share in wished.items()}
    counts = {name: int(count) for name, count in due.items()}
    left = total - sum(counts.values())
    # Largest remainders first; a layer that is at its bound already gives way to one that has room.
    order = sorted(due, key=lambda name: counts[name] - due[name])
    while left > 0:
        for name in order:
            if left > 0 and counts[name] < sizes[name]:
                counts[name] += 1
                left -= 1
    return {name: counts[name] / sizes[name] for name in wished}


def _clip(share: float) -> float:
    return min(max(share, 0.0), HIGHEST)
