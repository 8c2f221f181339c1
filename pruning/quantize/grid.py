"""The numbers that groups of weights may become: a scale for each group, and whole numbers of it."""

import torch
from torch import Tensor

from pruning.quantize.int4 import HIGHEST, LOWEST

SHRINK = tuple(1 - step / 32 for step in range(11))
"""Scales that are tried for a group, as shares of the one at which its largest magnitude becomes 7.

The last ones cut off what is largest for the sake of all the others; at 7/8 a negative one becomes -8.
"""


def best_scales(groups: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale (...) of each of ``groups`` (..., group) with the least squared error of those tried, never zero.

    It is rounded to ``dtype``, in which it will be stored, and comes in the dtype of ``groups``.
    """
    largest = groups.abs().amax(dim=-1)
    tiny = torch.finfo(dtype).tiny
    best = torch.empty_like(largest)
    least = torch.full_like(largest, torch.inf)
    for share in SHRINK:
        scale = (largest * (share / HIGHEST)).clamp_(min=tiny).to(dtype).to(groups.dtype)
        error = round_to(groups, scale[..., None]).mul_(scale[..., None]).sub_(groups).square_().sum(dim=-1)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, scale, best)
    return best


def round_to(values: Tensor, scale: Tensor) -> Tensor:
    """The nearest whole numbers from -8 to 7 to ``values`` / ``scale``, in the dtype of ``values``."""
    return (values / scale).round_().clamp_(LOWEST, HIGHEST)


def quantize_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes (out, in) int8 from -8 to 7 and scales (out, in / group) in the dtype of ``weight`` (out, in).

    Every weight becomes the nearest code. Zeros stay zero.
    """
    exact = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    groups = exact.view(exact.shape[0], -1, group)
    scale = best_scales(groups, weight.dtype)
    codes = round_to(groups, scale[..., None]).to(torch.int8)
    return codes.view(weight.shape), scale.to(weight.dtype)


class Grid:
    """Rounds the columns of one weight matrix as a walk over its inputs comes to them.

    ``group`` consecutive inputs share a scale, stored in ``dtype``. Matrices lie as (in, out) here.
    """

    def __init__(self, group: int, dtype: torch.dtype) -> None:
        self.group = group
        self.dtype = dtype
        self._codes = self._scale = torch.empty(0)

    def begin(self, columns: Tensor) -> None:
        """Make room for the codes of ``columns`` (in, out)."""
        inputs, outputs = columns.shape
        self._codes = torch.empty(inputs, outputs, dtype=torch.int8, device=columns.device)
        self._scale = columns.new_empty(inputs // self.group, outputs)

    def enter(self, start: int, values: Tensor) -> None:
        """Choose the scales of the group that begins at input ``start`` from its ``values`` (group, out)."""
        self._scale[start // self.group] = best_scales(values.t(), self.dtype)

    def settle(self, column: int, values: Tensor, removed: Tensor) -> Tensor:
        """What ``values`` (out,) of input ``column`` become, zero where ``removed`` (out,)."""
        scale = self._scale[column // self.group]
        codes = round_to(values, scale).masked_fill_(removed, 0)
        self._codes[column] = codes
        return codes.mul_(scale)

    def result(self) -> tuple[Tensor, Tensor]:
        """Codes (out, in) int8 and scales (out, in / group) in ``dtype``, once every column is settled."""
        return self._codes.t().contiguous(), self._scale.t().to(self.dtype).contiguous()
