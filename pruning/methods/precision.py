"""The precision that weights are pruned in."""

import torch
from torch import Tensor


def working_copy(weight: Tensor) -> Tensor:
    """A contiguous copy of ``weight`` in float32, or in float64 where it is that already."""
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return weight.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
