"""Which kernel a layer runs few tokens on: ours or ATen's, by timing both where both may be the faster one."""

import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from pruning.kernels.library import FORMATS, Kernels, kernels

Way = Literal["poda", "aten"]

SECONDS = 0.03
"""How long two kernels are timed against each other, once for every shape and dtype in a process."""

ROUNDS = 25
CALLS = 4

CLEARLY = 0.95
"""ATen's kernel is taken where its least time is below this share of ours: near a tie, noise shall not decide."""


def own_kernels(device_type: str, dtype: torch.dtype) -> Kernels | None:
    """Our own kernels, where they are for ``dtype`` and this kind of device."""
    return kernels() if device_type == "cpu" and dtype in FORMATS else None


def faster(own: Callable[[], Tensor], aten: Callable[[], Tensor]) -> Way:
    """The one of two calls that takes less time, timed in turns by the least of each."""
    least: dict[Callable[[], Tensor], float] = {}
    begun = time.perf_counter()
    for turn in range(ROUNDS):
        for call in (own, aten):
            started = time.perf_counter()
            for _ in range(CALLS if turn else 1):
                call()
            took = (time.perf_counter() - started) / (CALLS if turn else 1)
            least[call] = min(took, least.get(call, took))
        if time.perf_counter() - begun > SECONDS:
            break
    return "aten" if least[aten] < CLEARLY * least[own] else "poda"
