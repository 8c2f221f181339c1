"""int8 weight-only: symmetric round-to-nearest with one scale per output channel, and the layer that runs on it."""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

LEVELS = 127

FEW_TOKENS = 16
"""Up to this many tokens at once the int8 kernel is used where it is there.

Measured on a 2-core Xeon with AMX, bfloat16, layers of 576x576 to 2048x2048 (``python -m tests.bench.int8``): the
kernel takes 0.3 to 0.6 of the time of a bfloat16 linear for 1 to 4 tokens, the same at 6 to 8 and twice it at 16,
where dequantizing first still takes 2 to 3 times as long as the kernel; the two meet between 20 and 32 tokens.
In float32 and float16 the CPU kernel is slower than dequantizing from 4 tokens on and never faster than a dense linear.
"""


COLUMN_STEP = 32


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


class Int8Linear(nn.Module):
    """A linear layer that keeps its weights as int8 ``codes`` (out, in), ``scale`` (out,) and ``bias`` (out,) or None.

    It computes in the dtype of ``scale``. Few tokens go through ATen's int8 kernel where the device has one that is
    faster; more tokens through the dequantized weights, which are bit-equal to a dense layer with :meth:`dequantized`.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        if codes.dtype != torch.int8 or codes.ndim != 2 or scale.shape != codes.shape[:1]:
            raise ValueError(
                f"codes must be int8 of shape (out, in) with one scale per row: got {codes.dtype} "
                f"{tuple(codes.shape)} and scales {tuple(scale.shape)}"
            )
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    @property
    def out_features(self) -> int:
        """Rows of ``codes``."""
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        """Columns of ``codes``."""
        return self.codes.shape[1]

    @property
    def runtime(self) -> str:
        """Which kernels a call uses on the device and in the dtype the layer has now."""
        name = str(self.scale.dtype).removeprefix("torch.")
        if has_int8_kernel(self.scale.device.type, self.scale.dtype, *self.codes.shape):
            return f"aten int8 up to {FEW_TOKENS} tokens, dequantized to {name} above"
        return f"int8 dequantized to {name}"

    def dequantized(self) -> Tensor:
        """The weights (out, in) as the dtype of ``scale`` holds them."""
        # In place: a second buffer of this size costs more in page faults than the multiplication itself.
        return self.codes.to(self.scale.dtype).mul_(self.scale[:, None])

    def forward(self, inputs: Tensor) -> Tensor:
        """``inputs`` (..., in) to (..., out)."""
        tokens = inputs.numel() // self.in_features
        if 0 < tokens <= FEW_TOKENS and has_int8_kernel(inputs.device.type, inputs.dtype, *self.codes.shape):
            flat = inputs.reshape(tokens, self.in_features).contiguous()
            output = torch._weight_int8pack_mm(flat, self.codes, self.scale)
            output = output.view(*inputs.shape[:-1], self.out_features)
            return output if self.bias is None else output.add_(self.bias)
        return functional.linear(inputs, self.dequantized(), self.bias)

    def extra_repr(self) -> str:
        """The shape, as torch prints it for a linear layer."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


@cache
def has_int8_kernel(device_type: str, dtype: torch.dtype, rows: int, columns: int) -> bool:
    """Whether ATen multiplies ``dtype`` by int8 codes (rows, columns) fast on this kind of device, and rightly.

    Asked once of the device itself, as releases of torch differ in the devices and the shapes they have a kernel for.
    """
    # The CPU kernel goes through the columns in steps and reads past their end where they are no multiple.
    if dtype != torch.bfloat16 or device_type not in ("cpu", "cuda") or columns % COLUMN_STEP:
        return False
    probed = COLUMN_STEP + rows % COLUMN_STEP
    pattern = 7 * torch.arange(probed)[:, None] + 3 * torch.arange(columns)
    codes = (pattern % (2 * LEVELS + 1) - LEVELS).to(torch.int8)
    ones = torch.ones(3, columns, dtype=dtype, device=device_type)
    try:
        output = torch._weight_int8pack_mm(ones, codes.to(device_type), ones.new_ones(probed))
    except (RuntimeError, NotImplementedError):
        return False
    # Sums of whole numbers below 2^24 are exact in float32 and are rounded once.
    exact = codes.sum(dim=1).float().to(dtype)
    return torch.equal(output.cpu(), exact.expand(3, probed))
