"""int8: symmetric round-to-nearest with one scale per output channel, and the layer that runs on it."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from pruning.kernels.choice import Way, faster, own_kernels
from pruning.kernels.library import kernels
from pruning.quantize import probe
from pruning.quantize.layer import FEW_TOKENS, QuantizedLinear, check_codes

LEVELS = 127

COLUMN_STEP = 32

CUDA_ROWS = 17
"""Fewest rows that CUDA's int8 product takes; fewer are filled up with zeros."""


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (out, in) int8 from -127 to 127 and scales (out,) in the dtype of ``weight`` (out, in), all finite.

    The scale of a row is its largest magnitude over 127, rounded to the dtype it is stored in before the codes are
    computed, so that ``codes * scale`` is the nearest there is to ``weight`` with the scale that will be used. Zeros
    stay zero. A row whose scale would be zero takes the smallest normal number, so an all-zero row has zero codes.
    """
    exact = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    scale = (exact.abs().amax(dim=1) / LEVELS).to(weight.dtype)
    scale = torch.where(scale > 0, scale, torch.finfo(weight.dtype).tiny)
    codes = (exact / scale.to(exact.dtype)[:, None]).round_().clamp_(-LEVELS, LEVELS)
    return codes.to(torch.int8), scale


class Int8Linear(QuantizedLinear):
    """A linear layer that keeps its weights as int8 ``codes`` (out, in), ``scale`` (out,) and ``bias`` (out,) or None.

    It computes in the dtype of ``scale``. Few tokens go through an int8 kernel where there is one, on a CPU, once
    prepared, our own or ATen's, whichever is faster; more tokens through the dequantized weights, which are bit-equal
    to a dense layer with :meth:`dequantized`.
    With ``activations`` inputs are rounded to int8 as well, token by token, and the products are those of whole numbers
    wherever the device has such a product.
    """

    kind = "int8"

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None = None, *, activations: bool = False) -> None:
        super().__init__(codes, scale, bias, activations=activations)
        check_codes(codes, scale, torch.int8)

    @property
    def runtime(self) -> str:
        """Which kernels a call uses on the device and in the dtype the layer has now."""
        name = str(self.scale.dtype).removeprefix("torch.")
        if self.activations:
            if has_int8_product(self.codes.device.type, *self.codes.shape):
                return "aten int8 × int8"
            return f"dequantized int8 to {name}, inputs rounded to int8"
        if self._product is not None:
            return self._few_and_many(self._product.name)
        if has_int8_kernel(self.scale.device.type, self.scale.dtype, *self.codes.shape):
            return self._few_and_many("aten int8")
        return f"dequantized int8 to {name}"

    def prepare(self) -> None:
        """Take our own kernel for few tokens where it is the fastest; it reads the codes as they are."""
        own = kernels()
        if own is None or self.activations or self._product is not None:
            return
        if int8_way(self.codes.device.type, self.scale.dtype, *self.codes.shape) == "poda":
            self._product = own.int8(self.codes, self.scale)

    def forward(self, inputs: Tensor) -> Tensor:
        """``inputs`` (..., in) to (..., out)."""
        output = self.few_tokens(inputs)
        if output is not None:
            return output
        if self.activations:
            return self._dynamic(inputs)
        rows, columns = self.codes.shape
        flat = inputs.reshape(-1, columns)
        if 0 < len(flat) <= FEW_TOKENS and has_int8_kernel(inputs.device.type, inputs.dtype, rows, columns):
            output = torch._weight_int8pack_mm(flat.contiguous(), self.codes, self.scale)
            output = output.view(*inputs.shape[:-1], rows)
            return output if self.bias is None else output.add_(self.bias)
        return functional.linear(inputs, self.dequantized(), self.bias)

    def _dynamic(self, inputs: Tensor) -> Tensor:
        rows, columns = self.codes.shape
        rounded, scale = round_tokens(inputs.reshape(-1, columns))
        if len(rounded) and has_int8_product(inputs.device.type, rows, columns):
            sums = _int8_product(rounded, self.codes)
        else:
            # In float32, whole numbers up to 2^24 are exact; beyond that they are rounded as any sum is.
            sums = rounded.float() @ self.codes.float().t()
        output = (sums * scale).mul_(self.scale)
        if self.bias is not None:
            output.add_(self.bias)
        return output.to(inputs.dtype).view(*inputs.shape[:-1], rows)


@cache
def int8_way(device_type: str, dtype: torch.dtype, rows: int, columns: int) -> Way | None:
    """Whose kernel multiplies few tokens in ``dtype`` by int8 codes (rows, columns) fastest here; None: there is none.

    Where both are there they are timed for one token, once.
    """
    aten, own = has_int8_kernel(device_type, dtype, rows, columns), own_kernels(device_type, dtype)
    if own is None or not aten:
        return "poda" if own is not None else "aten" if aten else None
    inputs, scale = torch.ones(1, columns, dtype=dtype), torch.ones(rows, dtype=dtype)
    codes = torch.ones(rows, columns, dtype=torch.int8)
    product = own.int8(codes, scale)
    return faster(lambda: product(inputs), lambda: torch._weight_int8pack_mm(inputs, codes, scale))


def round_tokens(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """``inputs`` (tokens, in) as int8 from -127 to 127, and the float32 scale (tokens, 1) of each, never zero."""
    exact = inputs.float()
    scale = (exact.abs().amax(dim=1, keepdim=True) / LEVELS).clamp_(min=torch.finfo(torch.float32).tiny)
    return (exact / scale).round_().to(torch.int8), scale


def _int8_product(inputs: Tensor, codes: Tensor) -> Tensor:
    """Inputs (tokens, in) times codesᵀ, both int8, as int32 (tokens, out)."""
    tokens = len(inputs)
    if inputs.device.type == "cuda" and tokens < CUDA_ROWS:
        inputs = functional.pad(inputs, (0, 0, 0, CUDA_ROWS - tokens))
    return torch._int_mm(inputs, codes.t())[:tokens]


@cache
def has_int8_product(device_type: str, rows: int, columns: int) -> bool:
    """Whether ATen multiplies int8 by int8 codes (rows, columns) on this kind of device, and rightly."""
    if device_type not in ("cpu", "cuda"):
        return False
    codes = probe.drawn(COLUMN_STEP + rows % COLUMN_STEP, columns, -LEVELS, LEVELS).to(torch.int8)
    inputs = probe.drawn(3, columns, -LEVELS, LEVELS).to(torch.int8)
    try:
        output = _int8_product(inputs.to(device_type), codes.to(device_type))
    except (RuntimeError, NotImplementedError):
        return False
    return torch.equal(output.cpu(), inputs.int() @ codes.int().t())


@cache
def has_int8_kernel(device_type: str, dtype: torch.dtype, rows: int, columns: int) -> bool:
    """Whether ATen multiplies ``dtype`` by int8 codes (rows, columns) fast on this kind of device, and rightly.

    Asked once of the device itself, as releases of torch differ in the devices and the shapes they have a kernel for.
    """
    # The CPU kernel goes through the columns in steps and reads past their end where they are no multiple.
    if dtype != torch.bfloat16 or device_type not in ("cpu", "cuda") or columns % COLUMN_STEP:
        return False
    probed = COLUMN_STEP + rows % COLUMN_STEP
    codes, inputs = probe.drawn(probed, columns, -LEVELS, LEVELS), probe.drawn(3, columns, -2, 2)
    scale = probe.powers(probed, 1)
    given = inputs.to(dtype), codes.to(torch.int8), scale.flatten().to(dtype)
    try:
        output = torch._weight_int8pack_mm(*(tensor.to(device_type) for tensor in given))
    except (RuntimeError, NotImplementedError):
        return False
    # Sums of whole numbers below 2^24 are exact in float32 and are rounded once.
    return torch.equal(output.cpu(), (inputs @ (codes * scale).t()).to(dtype))
