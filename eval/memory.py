"""The most memory a piece of work needed, on the host and on an accelerator."""

import re
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import torch

from eval.figures import Figure

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"  # proc_pid_clear_refs(5): resets the peak resident set size to the current one
_SAMPLING_SECONDS = 0.01


class PeakMemory:
    """Watches this process while a ``with`` block runs.

    ``host_bytes`` is the largest resident set of the whole process, libraries included: the kernel's own high-water
    mark where it can be reset (Linux), else the largest of samples every 10 ms. ``device_bytes`` is the most that
    torch had allocated on a CUDA ``device``, and None on any other. ``method`` says in words how the host was watched.
    """

    def __init__(self, device: torch.device) -> None:
        self.host_bytes = 0
        self.device_bytes: int | None = None
        self.method = ""
        self._device = device
        self._sampler: _Sampler | None = None

    def __enter__(self) -> Self:
        if _reset_high_water_mark():
            self.method = "high-water mark of the resident set, from the kernel"
        else:
            self.method = f"largest resident set of samples every {_SAMPLING_SECONDS * 1000:g} ms"
            self._sampler = _Sampler()
            self._sampler.start()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.host_bytes = self._sampler.stop() if self._sampler is not None else _high_water_mark()
        if self._device.type == "cuda":
            self.device_bytes = torch.cuda.max_memory_allocated(self._device)

    def figures(self) -> dict[str, Figure]:
        """``peak_memory`` of where the model runs, and ``peak_host_memory`` beside it when that is a CUDA device."""
        host = Figure(value=self.host_bytes, unit="bytes")
        if self.device_bytes is None:
            return {"peak_memory": host}
        return {"peak_memory": Figure(value=self.device_bytes, unit="bytes"), "peak_host_memory": host}


class _Sampler(threading.Thread):
    """Keeps the largest resident set seen until stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._process = psutil.Process()
        self._largest = self._process.memory_info().rss
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(_SAMPLING_SECONDS):
            self._sample()

    def stop(self) -> int:
        self._stopped.set()
        self.join()
        self._sample()
        return self._largest

    def _sample(self) -> None:
        self._largest = max(self._largest, self._process.memory_info().rss)


def _reset_high_water_mark() -> bool:
    """Whether the kernel keeps a high-water mark and let it be reset."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
        return _high_water_mark() > 0
    except OSError:
        return False


def _high_water_mark() -> int:
    found = re.search(r"^VmHWM:\s*(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found is not None else 0
