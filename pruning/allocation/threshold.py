"""One magnitude threshold over all layers of a model, found without holding their weights twice."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pruning.anatomy import LinearLayer
from pruning.mask import removal_count

_HALF = 1 << 16


def shares_below_one_threshold(layers: Sequence[LinearLayer], sparsity: float) -> dict[str, float]:
    """The share of each layer's weights among the smallest |W_ij| of all layers together.

    Exactly the whole number nearest ``sparsity`` of all weights; of equals, those of the first layers. Compared in
    float32, whose magnitudes are ordered as their bit patterns are, so that two counts of 16 bits find the threshold.
    """
    total = sum(layer.weight().numel() for layer in layers)
    count = removal_count(total, sparsity)
    if count == 0:
        return {layer.name: 0.0 for layer in layers}
    upper = sum(torch.bincount(_patterns(layer) // _HALF, minlength=_HALF) for layer in layers)
    assert isinstance(upper, Tensor)
    high, below = _bin_of(upper, count)
    lower = sum(torch.bincount(_within(layer, high), minlength=_HALF) for layer in layers)
    assert isinstance(lower, Tensor)
    low, _ = _bin_of(lower, count - below)
    border = high * _HALF + low
    counts = {layer.name: int((_patterns(layer) < border).sum()) for layer in layers}
    left = count - sum(counts.values())
    for layer in layers:
        equal = min(left, int((_patterns(layer) == border).sum()))
        counts[layer.name] += equal
        left -= equal
    return {layer.name: counts[layer.name] / layer.weight().numel() for layer in layers}


def _patterns(layer: LinearLayer) -> Tensor:
    """The bits of |W_ij| in float32, as whole numbers."""
    return layer.weight().float().abs().flatten().contiguous().view(torch.int32)


def _within(layer: LinearLayer, high: int) -> Tensor:
    patterns = _patterns(layer)
    return patterns[patterns // _HALF == high] % _HALF


def _bin_of(histogram: Tensor, count: int) -> tuple[int, int]:
    """The bin that the ``count``-th smallest is in, and how many are in the bins below."""
    running = histogram.cumsum(0)
    place = int(torch.searchsorted(running, count))
    return place, int(running[place - 1]) if place else 0
