"""int4 weight-only: packed codes with a scale for each group of inputs, and the layer that runs on them."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from pruning.kernels.choice import Way, faster, own_kernels
from pruning.kernels.library import INT4_STEP, kernels
from pruning.quantize import probe
from pruning.quantize.layer import FEW_TOKENS, QuantizedLinear

LOWEST, HIGHEST = -8, 7

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

    Once prepared, few tokens go through an int4 kernel where there is one, on a CPU our own or ATen's, whichever is
    faster; more tokens on a CPU through the dequantized weights.
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
        self._is_ordered = False
        """Whether the codes lie as ATen's kernel reads them, which prepares for it."""

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
        if self._product is not None:
            return self._few_and_many(self._product.name)
        if not self._has_aten(self.scale.dtype):
            return f"dequantized int4 to {str(self.scale.dtype).removeprefix('torch.')}"
        return self._few_and_many("aten int4") if self.codes.device.type == "cpu" else "aten int4"

    def prepare(self) -> None:
        """Take the fastest kernel for this device, dtype and shape; codes are brought into the order of ATen's.

        Our own reads them as they are.
        """
        if self._product is not None or self._is_ordered:
            return
        way = int4_way(self.codes.device.type, self.scale.dtype, self.out_features, self._inputs, self._group)
        own = kernels()
        if way == "poda" and own is not None:
            self._product = own.int4(self.codes, self.scale)
        elif way == "aten":
            self.register_buffer("scale_and_zero", _scale_and_zero(self.scale), persistent=False)
            self.codes = _in_kernel_order(unpack4(self.codes))
            self.scale = self.scale_and_zero[..., 0].t()  # the same memory
            self._is_ordered = True

    def whole_codes(self) -> Tensor:
        """The codes (out, in) int8, one element each."""
        if not self._is_ordered:
            return unpack4(self.codes)
        if self.codes.device.type == "cpu":
            tile = _cpu_tile()
            assert tile, "no layer is prepared where the order is not known"
            return _out_of_cpu_order(self.codes, self.out_features, self._inputs, tile)
        return _through_kernel(self.codes, self.out_features, self._inputs, self._group)

    def forward(self, inputs: Tensor) -> Tensor:
        """``inputs`` (..., in) to (..., out)."""
        output = self.few_tokens(inputs)
        if output is not None:
            return output
        flat = inputs.reshape(-1, self._inputs)
        if not len(flat) or not self._has_aten(inputs.dtype) or (inputs.is_cpu and len(flat) > FEW_TOKENS):
            return functional.linear(inputs, self.dequantized(), self.bias)
        output = _multiply(flat, self.codes, self._group, self.scale_and_zero).view(*inputs.shape[:-1], -1)
        return output if self.bias is None else output.add_(self.bias)

    def _has_aten(self, dtype: torch.dtype) -> bool:
        """Whether the layer, prepared for ATen's kernel, has not been cast to another dtype since."""
        return self._is_ordered and dtype == torch.bfloat16


def _scale_and_zero(scale: Tensor) -> Tensor:
    """``scale`` (out, in / group) as ATen's kernels read it, (in / group, out, 2), and no zero points."""
    turned = scale.t()
    return torch.stack([turned, torch.zeros_like(turned)], dim=-1)


@cache
def int4_way(device_type: str, dtype: torch.dtype, rows: int, columns: int, group: int) -> Way | None:
    """Whose kernel multiplies few tokens in ``dtype`` by int4 codes (rows, columns) fastest here; None: there is none.

    Where both are there they are timed for one token, once.
    """
    own = own_kernels(device_type, dtype) if group % INT4_STEP == 0 else None
    aten = has_int4_kernel(device_type, dtype, rows, columns, group)
    if own is None or not aten:
        return "poda" if own is not None else "aten" if aten else None
    inputs, scale = torch.ones(1, columns, dtype=dtype), torch.ones(rows, columns // group, dtype=dtype)
    codes = torch.ones(rows, columns // 2, dtype=torch.uint8)
    ordered, pairs = _in_kernel_order(unpack4(codes)), _scale_and_zero(scale)
    product = own.int4(codes, scale)
    return faster(lambda: product(inputs), lambda: _multiply(inputs, ordered, group, pairs))


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
    codes = probe.drawn(MOST_ROWS, 32, LOWEST, HIGHEST).to(torch.int8)
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
    # In float32 and float16 the CPU's kernel is a plain loop, ten times slower than a dense layer.
    if device_type not in ("cpu", "cuda") or dtype != torch.bfloat16:
        return False
    probed = MOST_ROWS + rows % MOST_ROWS
    exact, inputs = probe.drawn(probed, columns, LOWEST, HIGHEST), probe.drawn(3, columns, -2, 2)
    codes, scale = exact.to(torch.int8), probe.powers(probed, columns // group)
    pairs = _scale_and_zero(scale.to(dtype)).to(device_type)
    try:
        ordered = _in_kernel_order(codes.to(device_type))
        output = _multiply(inputs.to(dtype).to(device_type), ordered, group, pairs).cpu()
        if device_type == "cpu":
            tile = _cpu_tile()
            if tile is None or not torch.equal(_out_of_cpu_order(ordered, probed, columns, tile), codes):
                return False
    except (RuntimeError, NotImplementedError, AttributeError, StopIteration):
        return False
    # Sums of whole numbers below 2^24 are exact in float32 and are rounded once.
    weights = exact * scale.repeat_interleave(group, dim=1)
    return torch.equal(output, (inputs @ weights.t()).to(dtype))
