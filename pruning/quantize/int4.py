"""int4 weight-only: packed codes with a scale for each group of inputs, and the layer that runs on them."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from pruning.quantize.layer import QuantizedLinear

LOWEST, HIGHEST = -8, 7

FEW_TOKENS = 16
"""Up to this many tokens at once the CPU's int4 kernel is used; for more, dequantizing first is faster.

Measured by ``python -m tests.bench.int4`` on a 2-core EPYC with AVX-512 in bfloat16.
"""

MOST_ROWS = 64
"""Rows that a CPU kernel reads together at most: 64 with AVX-512, 32 with AVX2."""


def pack4(codes: Tensor) -> Tensor:
    """(out, in / 2) uint8 of ``codes`` (out, in) int8 from -8 to 7, two's complement, even inputs in the low halves."""
    nibbles = codes.contiguous().view(torch.uint8) & 15
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)


def unpack4(packed: Tensor) -> Tensor:
    """The codes (out, in) int8 that :func:`pack4` made ``packed`` (out, in / 2) uint8 of."""
    both = torch.stack([packed << 4, packed & 0xF0], dim=-1).flatten(-2)
    return both.view(torch.int8) >> 4


class Int4Linear(QuantizedLinear):
    """A linear layer that keeps its weights as two 4-bit codes a byte (out, in / 2), and ``scale`` (out, in / group).

    Once prepared, few tokens go through ATen's int4 kernel where the device has one; more tokens on a CPU through the
    dequantized weights.
    """

    kind = "int4"

    scale_and_zero: Tensor

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(codes, scale, bias)
        inputs = 2 * codes.shape[1] if codes.ndim == 2 else 0
        groups = scale.shape[1] if scale.ndim == 2 and len(scale) == len(codes) else 0
        if codes.dtype != torch.uint8 or not groups or inputs % groups:
            raise ValueError(
                f"codes must be uint8 of shape (out, in / 2) with a scale for each group of inputs: got {codes.dtype} "
                f"{tuple(codes.shape)} and scales {tuple(scale.shape)}"
            )
        self._inputs = inputs
        self._group = inputs // groups
        self._few = 0
        """Up to how many tokens the kernel is used; none before the layer is prepared."""

    @property
    def out_features(self) -> int:
        """Rows of the weights."""
        return self.scale.shape[0]

    @property
    def in_features(self) -> int:
        """Columns of the weights, two to a byte."""
        return self._inputs

    @property
    def group(self) -> int:
        """How many consecutive inputs share a scale."""
        return self._group

    @property
    def runtime(self) -> str:
        """Which kernels a call uses on the device and in the dtype the layer has now."""
        name = str(self.scale.dtype).removeprefix("torch.")
        if not self._few:
            return f"dequantized int4 to {name}"
        if self.codes.device.type == "cpu":
            return f"aten int4 up to {self._few} tokens, dequantized to {name} above"
        return "aten int4"

    def prepare(self) -> None:
        """Bring the codes into the order of the device's kernel, where it has one for this dtype and shape."""
        device = self.codes.device.type
        if self._few or not has_int4_kernel(device, self.scale.dtype, self.out_features, self._inputs, self._group):
            return
        scale = self.scale.t()
        self.register_buffer("scale_and_zero", torch.stack([scale, torch.zeros_like(scale)], dim=-1), persistent=False)
        self.codes = _in_kernel_order(unpack4(self.codes))
        self.scale = self.scale_and_zero[..., 0].t()  # the same memory
        self._few = FEW_TOKENS if device == "cpu" else 1 << 62

    def whole_codes(self) -> Tensor:
        """The codes (out, in) int8, one element each."""
        if not self._few:
            return unpack4(self.codes)
        if self.codes.device.type == "cpu":
            tile = _cpu_tile()
            assert tile, "no layer is prepared where the order is not known"
            return _out_of_cpu_order(self.codes, self.out_features, self._inputs, tile)
        return _through_kernel(self.codes, self.out_features, self._inputs, self._group)

    def forward(self, inputs: Tensor) -> Tensor:
        """``inputs`` (..., in) to (..., out)."""
        flat = inputs.reshape(-1, self._inputs)
        if not 0 < len(flat) <= self._few:
            return functional.linear(inputs, self.dequantized(), self.bias)
        output = _multiply(flat, self.codes, self._group, self.scale_and_zero)
        output = output.view(*inputs.shape[:-1], -1)
        return output if self.bias is None else output.add_(self.bias)


def _in_kernel_order(codes: Tensor) -> Tensor:
    """``codes`` (out, in) int8 as the kernel of their device reads them, in as many bytes as :func:`pack4` takes."""
    raised = codes + 8
    if codes.device.type == "cpu":
        ordered: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(raised.int(), 2)
        return ordered
    nibbles = raised.view(torch.uint8)
    inner = next(tiles for tiles in (8, 4, 2) if codes.shape[1] % (16 * tiles) == 0)
    ordered = torch.ops.aten._convert_weight_to_int4pack((nibbles[:, 0::2] << 4) | nibbles[:, 1::2], inner)
    return ordered


def _multiply(inputs: Tensor, codes: Tensor, group: int, scale_and_zero: Tensor) -> Tensor:
    aten = torch.ops.aten
    kernel = aten._weight_int4pack_mm_for_cpu if inputs.device.type == "cpu" else aten._weight_int4pack_mm
    output: Tensor = kernel(inputs, codes, group, scale_and_zero)
    return output


def _out_of_cpu_order(codes: Tensor, rows: int, columns: int, tile: int) -> Tensor:
    """The codes (rows, columns) int8 that :func:`_in_kernel_order` brought into the order of the CPU.

    That reads ``tile`` rows together, a byte holding rows r and r + tile / 2 of them; rows left over go by twos.
    """
    low, high = codes.flatten() & 15, codes.flatten() >> 4
    whole = rows - rows % tile
    end = whole * columns // 2
    # A tile is (columns, tile / 2) bytes: the low halves are its first rows.
    tiles = [half[:end].view(whole // tile, columns, tile // 2) for half in (low, high)]
    parts = [torch.cat(tiles, dim=2).transpose(1, 2).reshape(whole, columns)]
    if whole < rows:
        rest = [half[end:].view(columns, (rows - whole) // 2) for half in (low, high)]
        parts.append(torch.stack(rest, dim=2).view(columns, rows - whole).t())
    return torch.cat(parts).view(torch.int8) - 8


@cache
def _cpu_tile() -> int | None:
    """How many rows this CPU's kernel reads together; None when its order is none that is known here."""
    codes = ((5 * torch.arange(MOST_ROWS)[:, None] + 3 * torch.arange(32)) % 16 - 8).to(torch.int8)
    ordered = _in_kernel_order(codes)
    tiles = (MOST_ROWS, MOST_ROWS // 2, MOST_ROWS // 4)
    return next((tile for tile in tiles if torch.equal(_out_of_cpu_order(ordered, MOST_ROWS, 32, tile), codes)), None)


def _through_kernel(codes: Tensor, rows: int, columns: int, group: int) -> Tensor:
    """The codes (rows, columns) int8 as the kernel multiplies by them: its products with the unit vectors."""
    one = torch.ones(columns // group, rows, 1, dtype=torch.bfloat16, device=codes.device)
    scale_and_zero = torch.cat([one, torch.zeros_like(one)], dim=-1)
    units = torch.eye(columns, dtype=torch.bfloat16, device=codes.device)
    strips = (units[start : start + 1024] for start in range(0, columns, 1024))
    return torch.cat([_multiply(strip, codes, group, scale_and_zero).to(torch.int8) for strip in strips]).t()


@cache
def has_int4_kernel(device_type: str, dtype: torch.dtype, rows: int, columns: int, group: int) -> bool:
    """Whether ATen multiplies ``dtype`` by int4 codes (rows, columns) on this kind of device, and rightly.

    Asked once of the device itself, as releases of torch differ in the devices and the shapes they have a kernel for.
    """
    if device_type not in ("cpu", "cuda") or (device_type == "cuda" and dtype != torch.bfloat16):
        return False
    probed = MOST_ROWS + rows % MOST_ROWS
    pattern = 5 * torch.arange(probed)[:, None] + 3 * torch.arange(columns)
    codes = (pattern % (HIGHEST - LOWEST + 1) + LOWEST).to(torch.int8)
    numbers = (torch.arange(columns) % 5 - 2).to(dtype)
    inputs = torch.stack([numbers, numbers.flip(0), torch.ones_like(numbers)]).to(device_type)
    scale_and_zero = torch.zeros(columns // group, probed, 2, dtype=dtype, device=device_type)
    scale_and_zero[..., 0] = 1
    try:
        ordered = _in_kernel_order(codes.to(device_type))
        output = _multiply(inputs, ordered, group, scale_and_zero).cpu()
        if device_type == "cpu":
            tile = _cpu_tile()
            if tile is None or not torch.equal(_out_of_cpu_order(ordered, probed, columns, tile), codes):
                return False
    except (RuntimeError, NotImplementedError, AttributeError, StopIteration):
        return False
    # Sums of whole numbers below 2^24 are exact in float32 and are rounded once.
    exact = inputs.cpu().float() @ codes.float().t()
    return torch.equal(output, exact.to(dtype))
