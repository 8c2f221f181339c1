"""Times one int8 layer both ways beside a dense one, to choose FEW_TOKENS: python -m tests.bench.int8 [DEVICE]."""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pruning.device import choose_device
from pruning.quantize.int8 import Int8Linear, has_int8_kernel, quantize_rows

SHAPES = ((576, 576), (1536, 576), (576, 1536), (2048, 2048), (8192, 2048))
TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 128)


def _microseconds(call: Callable[[], Tensor], device: torch.device, calls: int = 20, rounds: int = 7) -> float:
    samples = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        samples.append((time.perf_counter() - started) / calls * 1e6)
    return statistics.median(samples)


def main() -> None:
    """Print microseconds a call in bfloat16."""
    device = choose_device(sys.argv[1] if len(sys.argv) > 1 else "auto")
    print(f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads, bfloat16, microseconds a call")
    print(f"{'out':>6}{'in':>6}{'tokens':>8}{'dense':>10}{'kernel':>10}{'dequantized':>13}")
    with torch.no_grad():
        for rows, columns in SHAPES:
            dense = nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16, device=device)
            layer = Int8Linear(*quantize_rows(dense.weight))
            known = has_int8_kernel(device.type, torch.bfloat16, rows, columns)
            for tokens in TOKENS:
                inputs = torch.randn(tokens, columns, device=device).bfloat16()
                kernel = (
                    _microseconds(lambda: torch._weight_int8pack_mm(inputs, layer.codes, layer.scale), device)  # noqa: B023
                    if known
                    else float("nan")
                )
                unpacked = _microseconds(lambda: nn.functional.linear(inputs, layer.dequantized()), device)  # noqa: B023
                plain = _microseconds(lambda: dense(inputs), device)  # noqa: B023
                print(f"{rows:>6}{columns:>6}{tokens:>8}{plain:>10.0f}{kernel:>10.0f}{unpacked:>13.0f}", flush=True)


if __name__ == "__main__":
    main()
