"""Packs a tensor with many zeros into a bitmask and its kept values, and back, bit for bit."""

import numpy as np
import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_patterns(tensor: Tensor) -> Tensor:
    """``tensor`` seen as whole numbers of the same size, so that -0.0 differs from 0.0 and NaN equals itself."""
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal in dtype, shape and every bit."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(bit_patterns(one), bit_patterns(other))


def pack(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The mask (ceil(n / 8),) uint8 and the kept values (kept,) of a tensor of n elements on the CPU."""
    patterns = bit_patterns(tensor).flatten()
    keep = patterns.numpy() != 0
    mask = torch.from_numpy(np.packbits(keep, bitorder="little"))
    values = torch.from_numpy(np.compress(keep, patterns.numpy()))
    return mask, values.view(tensor.dtype)


def unpack(mask: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor of ``shape`` that :func:`pack` made ``mask`` and ``values`` of.

    Raises ValueError when the mask does not have one bit for each value.
    """
    elements = int(np.prod(shape, dtype=np.int64))
    keep = np.unpackbits(mask.numpy(), bitorder="little")
    # Positions: to write by them is several times faster than by a mask of truth values.
    places = np.flatnonzero(keep)
    if len(places) != values.numel() or (len(places) and places[-1] >= elements):
        raise ValueError(f"a mask with {len(places):,} bits set for {values.numel():,} values")
    patterns = np.zeros(elements, dtype=f"i{values.element_size()}")
    patterns[places] = bit_patterns(values).numpy()
    return torch.from_numpy(patterns).view(values.dtype).reshape(shape)
