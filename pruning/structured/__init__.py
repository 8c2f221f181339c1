"""Pruning that gives a smaller ordinary model, faster everywhere: narrower blocks (width) or fewer (depth)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from pruning.report import LayerReport


@dataclass(frozen=True)
class Restructured:
    """A smaller model of the same class, of an ordinary smaller configuration, in eval mode, and how it came about.

    It has the dtype and the device of the model it was made from, whose parameters it took: that one is used up.
    ``removed`` says in words what went: the blocks, or per block the heads and the FFN channels. ``layers`` are those
    of the dense model, by its names and shapes; the ``sparsity`` of each is the share of its weights that is gone.
    ``resumed`` blocks were found finished, which had taken ``earlier`` seconds. ``note`` says how near the share comes
    to what was asked.
    """

    model: "nn.Module"
    removed: tuple[str, ...]
    layers: "list[LayerReport]"
    note: str | None
    resumed: int = 0
    earlier: float = 0.0
