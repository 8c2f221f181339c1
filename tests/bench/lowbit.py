"""One int8 or int4 layer every way there is beside dense ones: python -m tests.bench.lowbit [DEVICE] [--dtype NAME].

Each figure is how many times as fast as the faster dense layer, of float32 and bfloat16, a way is, timed in turns; more
layers than the cache holds are gone through, as in a model. By it FEW_TOKENS is chosen: where dequantizing gets faster
than the kernels.
"""

import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from pruning.device import choose_device
from pruning.kernels.choice import own_kernels
from pruning.quantize.int4 import Int4Linear, has_int4_kernel, pack4
from pruning.quantize.int8 import Int8Linear, has_int8_kernel
from pruning.quantize.layer import QuantizedLinear
from tests.pruning.kernels.ways import forced

SHAPES = ((192, 576), (576, 576), (1536, 576), (576, 1536), (2048, 2048), (4096, 4096))
TOKENS = (1, 2, 4, 8, 16, 24, 32, 64)
GROUP = 64
ROUNDS = 7
WEIGHTS = 1 << 26
"""Weights of the layers of one way together."""

Call = Callable[[Tensor], Tensor]


def quantized(bits: int, way: str | None, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Call:
    """A layer of random codes that few tokens go through in that way, or, for None, dequantized."""
    layer: QuantizedLinear
    if bits == 8:
        codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
        layer = Int8Linear(codes, torch.rand(rows, dtype=dtype))
    else:
        codes = torch.randint(-8, 8, (rows, columns), dtype=torch.int8)
        layer = Int4Linear(pack4(codes), torch.rand(rows, columns // GROUP, dtype=dtype))
    layer = layer.to(device)
    if way is None:
        return lambda inputs: functional.linear(inputs, layer.dequantized())
    with forced(way):
        layer.prepare()
    return layer


def dense(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Call:
    """A dense layer."""
    weight = torch.randn(rows, columns, device=device, dtype=dtype)
    return lambda inputs: functional.linear(inputs.to(dtype), weight)


def ways(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], Call]]:
    """What makes a layer, by its name, for all that run here."""
    found: dict[str, Callable[[], Call]] = {
        "dense float32": partial(dense, rows, columns, device, torch.float32),
        "dense bfloat16": partial(dense, rows, columns, device, torch.bfloat16),
    }
    has_aten = {
        8: has_int8_kernel(device.type, dtype, rows, columns),
        4: has_int4_kernel(device.type, dtype, rows, columns, GROUP),
    }
    for bits in (8, 4):
        kinds = [("poda", own_kernels(device.type, dtype) is not None), ("aten", has_aten[bits]), (None, True)]
        for way, runs in kinds:
            if runs:
                name = f"int{bits} {way or 'dequantized'}"
                found[name] = partial(quantized, bits, way, rows, columns, device, dtype)
    return found


def times(layers: dict[str, list[Call]], inputs: Tensor) -> dict[str, float]:
    """Least seconds a layer of each way, the ways in turns."""
    least = dict.fromkeys(layers, float("inf"))
    for _ in range(ROUNDS):
        for name, calls in layers.items():
            started = time.perf_counter()
            for call in calls:
                call(inputs)
            if inputs.is_cuda:
                torch.cuda.synchronize()
            least[name] = min(least[name], (time.perf_counter() - started) / len(calls))
    return least


def main() -> int:
    """Print a line for each shape and number of tokens."""
    words = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    words.add_argument("device", nargs="?", default="auto")
    words.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    asked = words.parse_args()
    device, dtype = choose_device(asked.device), getattr(torch, asked.dtype)
    print(f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads, {asked.dtype}, groups of {GROUP}")
    with torch.inference_mode():
        for rows, columns in SHAPES:
            copies = max(2, WEIGHTS // (rows * columns))
            layers = {
                name: [made() for _ in range(copies)] for name, made in ways(rows, columns, device, dtype).items()
            }
            for tokens in TOKENS:
                found = times(layers, torch.randn(tokens, columns, device=device, dtype=dtype))
                fastest = min(took for name, took in found.items() if name.startswith("dense"))
                told = "  ".join(f"{name} {fastest / took:5.2f}" for name, took in found.items())
                print(f"{rows:>5}×{columns:<5}{tokens:>3} tokens {fastest * 1e6:8.0f} µs dense   {told}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
