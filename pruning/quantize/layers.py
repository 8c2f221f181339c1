"""Which layer runs which kind of codes."""

import torch
from torch import Tensor

from pruning.quantize import Codes
from pruning.quantize.float8 import Float8Linear
from pruning.quantize.int4 import Int4Linear
from pruning.quantize.int8 import Int8Linear
from pruning.quantize.layer import QuantizedLinear

_KINDS: dict[torch.dtype, type[Int8Linear | Float8Linear]] = {
    torch.int8: Int8Linear,
    torch.float8_e4m3fn: Float8Linear,
}

STORED: dict[Codes, torch.dtype] = {"int8": torch.int8, "int4": torch.uint8, "float8": torch.float8_e4m3fn}
"""The dtype in which codes are stored."""


def quantized_linear(
    codes: Tensor, scale: Tensor, bias: Tensor | None = None, *, activations: bool = False
) -> QuantizedLinear:
    """The layer that runs on ``codes`` as they are stored: int8 or float8 (out, in), or uint8 (out, in / 2) for int4.

    ``scale`` is (out,), or (out, in / group) for int4. Raises ValueError for anything else.
    """
    if codes.dtype == torch.uint8:
        if activations:
            raise ValueError("int4 layers do not round their inputs")
        return Int4Linear(codes, scale, bias)
    kind = _KINDS.get(codes.dtype)
    if kind is None:
        raise ValueError(f"codes must be int8, float8 or packed int4: got {codes.dtype}")
    return kind(codes, scale, bias, activations=activations)
