"""Packs a tensor with many zeros into its kept values and their places, and back, bit for bit.

The layouts are specified in :mod:`pruning.artifact_format`.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from pruning.artifact_header import GROUP
from pruning.quantize.int4 import pack4, unpack4

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

    Raises ValueError when the mask does not have one bit for each value, or has bits for more elements.
    """
    elements = int(np.prod(shape, dtype=np.int64))
    keep = np.unpackbits(mask.numpy(), bitorder="little")
    # Positions: to write by them is several times faster than by a mask of truth values.
    places = np.flatnonzero(keep)
    if len(places) and places[-1] >= elements:
        raise ValueError(f"a mask with bits set after its {elements:,} elements")
    if len(places) != values.numel():
        raise ValueError(f"a mask with {len(places):,} bits set for {values.numel():,} values")
    return _scatter(values, places, elements).reshape(shape)


def most_in_a_group(tensor: Tensor) -> int:
    """How many elements of any 4 consecutive ones of a row (out, in) have a bit set; ``in`` is a multiple of 4."""
    kept = bit_patterns(tensor).view(-1, GROUP) != 0
    return int(kept.sum(dim=1, dtype=torch.uint8).max())


def pack_groups(tensor: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """The indices (ceil(kept / 4),) uint8 and the values (kept,) of ``slots`` in each 4 inputs of a tensor (out, in).

    The tensor is on the CPU and has no more than ``slots`` elements with a bit set in a group; of a group with fewer,
    the first zeros are kept too.
    """
    patterns = bit_patterns(tensor).view(-1, GROUP).numpy()
    keep = patterns != 0
    missing = slots - keep.sum(axis=1)
    for place in range(GROUP):
        filled = ~keep[:, place] & (missing > 0)
        keep[:, place] |= filled
        missing -= filled
    places = np.flatnonzero(keep) % GROUP
    padded = np.zeros(-(-len(places) // 4) * 4, dtype=np.uint8)
    padded[: len(places)] = places
    indices = padded[0::4] | padded[1::4] << 2 | padded[2::4] << 4 | padded[3::4] << 6
    return torch.from_numpy(indices), torch.from_numpy(patterns[keep]).view(tensor.dtype)


def unpack_groups(indices: Tensor, values: Tensor, slots: int, shape: tuple[int, ...]) -> Tensor:
    """The tensor of ``shape`` (out, in) that :func:`pack_groups` made ``indices`` and ``values`` of.

    Raises ValueError for indices that do not increase within each group, or bits set after the last.
    """
    kept = values.numel()
    bits = indices.numpy()
    pairs = np.stack([bits >> shift & 3 for shift in (0, 2, 4, 6)], axis=1).flatten()
    if pairs[kept:].any():
        raise ValueError(f"bits set after its {kept:,} indices")
    places = pairs[:kept].reshape(-1, slots)
    if (places[:, 1:] <= places[:, :-1]).any():
        raise ValueError("indices that do not increase within a group")
    elements = int(np.prod(shape, dtype=np.int64))
    first = np.arange(0, elements, GROUP)[:, None]
    return _scatter(values, (first + places).flatten(), elements).reshape(shape)


def pack_halves(codes: Tensor) -> Tensor:
    """(ceil(n / 2),) uint8 of ``codes`` (n,) int8 from -8 to 7, two's complement, the first in the lower half."""
    return pack4(functional.pad(codes, (0, codes.numel() % 2))[None])[0]


def unpack_halves(packed: Tensor, count: int) -> Tensor:
    """The ``count`` codes int8 that :func:`pack_halves` made ``packed`` of. Raises ValueError for bits after them."""
    codes = unpack4(packed[None])[0]
    if codes[count:].any():
        raise ValueError(f"bits set after its {count:,} codes")
    return codes[:count]


def _scatter(values: Tensor, places: npt.NDArray[np.int64], elements: int) -> Tensor:
    """``elements`` elements, ``values`` at ``places`` and the rest of all bits zero."""
    patterns = np.zeros(elements, dtype=f"i{values.element_size()}")
    patterns[places] = bit_patterns(values).numpy()
    return torch.from_numpy(patterns).view(values.dtype)
