"""float8: 8-bit floating-point weights and inputs, with one scale per output channel and per token."""

from functools import cache

import torch
from torch import Tensor

from pruning.quantize import probe
from pruning.quantize.layer import QuantizedLinear, check_codes

FORMAT = torch.float8_e4m3fn
LARGEST = 448.0
STEP = 16
"""Rows and columns of the weights must be multiples of this for CUDA's kernel."""


def to_float8(values: Tensor, scale: Tensor) -> Tensor:
    """``values`` / ``scale`` in float8, what is above the largest number there is made the largest."""
    return (values / scale).clamp_(-LARGEST, LARGEST).to(FORMAT)


def quantize_rows_float8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (out, in) float8 (E4M3) and scales (out,) in the dtype of ``weight`` (out, in), all finite.

    The scale of a row is its largest magnitude over 448, the largest float8, rounded to the dtype it is stored in
    before the codes are computed. Zeros stay zero, of positive sign.
    """
    exact = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    scale = (exact.abs().amax(dim=1) / LARGEST).to(weight.dtype)
    scale = torch.where(scale > 0, scale, torch.finfo(weight.dtype).tiny)
    codes = to_float8(exact, scale.to(exact.dtype)[:, None])
    return torch.where(codes.float() == 0, 0.0, codes.float()).to(FORMAT), scale


class Float8Linear(QuantizedLinear):
    """A linear layer that keeps its weights as float8 ``codes`` (out, in), ``scale`` (out,) and ``bias`` or None.

    Inputs are rounded to float8, each token with a scale of its own, and multiplied by CUDA's float8 kernel where the
    card has one; elsewhere the very same rounded numbers are multiplied in the dtype of ``scale``.
    """

    kind = "float8"

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None = None, *, activations: bool = True) -> None:
        super().__init__(codes, scale, bias, activations=activations)
        check_codes(codes, scale, FORMAT)

    @property
    def runtime(self) -> str:
        """Which kernels a call uses on the device and in the dtype the layer has now."""
        if has_float8_kernel(self.codes.device.type, self.scale.dtype, *self.codes.shape):
            return "aten float8 × float8"
        return f"dequantized float8 to {str(self.scale.dtype).removeprefix('torch.')}, inputs rounded to float8"

    def forward(self, inputs: Tensor) -> Tensor:
        """``inputs`` (..., in) to (..., out)."""
        rows, columns = self.codes.shape
        flat = inputs.reshape(-1, columns).float()
        scale = (flat.abs().amax(dim=1, keepdim=True) / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
        rounded = to_float8(flat, scale)
        if len(flat) and has_float8_kernel(inputs.device.type, inputs.dtype, rows, columns):
            output = _product(rounded, scale, self.codes, self.scale, inputs.dtype)
        else:
            output = ((rounded.float() @ self.codes.float().t()) * scale).mul_(self.scale)
        if self.bias is not None:
            output.add_(self.bias)
        return output.to(inputs.dtype).view(*inputs.shape[:-1], rows)


def _product(inputs: Tensor, scale: Tensor, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return torch._scaled_mm(
        inputs, codes.t(), scale_a=scale, scale_b=scales.float()[None, :], out_dtype=dtype, use_fast_accum=False
    )


@cache
def has_float8_kernel(device_type: str, dtype: torch.dtype, rows: int, columns: int) -> bool:
    """Whether the card multiplies float8 codes (rows, columns) into ``dtype``, rightly; asked of the card itself."""
    if device_type != "cuda" or dtype != torch.bfloat16 or rows % STEP or columns % STEP:
        return False
    codes, inputs, scale = probe.drawn(rows, columns, -2, 2), probe.drawn(3, columns, -1, 1), probe.powers(rows, 1)
    try:
        output = _product(
            inputs.to(device_type).to(FORMAT),
            torch.ones(3, 1, device=device_type),
            codes.to(device_type).to(FORMAT),
            scale.flatten().to(device_type),
            dtype,
        )
    except (RuntimeError, NotImplementedError):
        return False
    return torch.equal(output.cpu(), (inputs @ (codes * scale).t()).to(dtype))
