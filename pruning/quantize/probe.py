"""Whole numbers to ask a kernel whether it computes rightly: their sums are exact in float32."""

import torch
from torch import Tensor


def drawn(rows: int, columns: int, lowest: int, highest: int) -> Tensor:
    """Float32 whole numbers (rows, columns), the same in every call, that follow no pattern a sum could hide."""
    generator = torch.Generator().manual_seed(1000 * rows + columns)
    return torch.randint(lowest, highest + 1, (rows, columns), generator=generator).float()


def powers(rows: int, columns: int) -> Tensor:
    """Float32 scales (rows, columns), powers of two from 1/2 to 4, so that products with them are exact as well."""
    return 2.0 ** drawn(rows, columns, -1, 2)
