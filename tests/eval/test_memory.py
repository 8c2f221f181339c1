"""Peak memory, against allocations of known size."""

import mmap
import time
from pathlib import Path

import psutil
import pytest
import torch

from eval import memory
from eval.memory import PeakMemory

MEGABYTE = 2**20
CPU = torch.device("cpu")


def touch(size: int) -> mmap.mmap:
    """``size`` bytes of fresh pages, all resident; closing gives them back at once."""
    pages = mmap.mmap(-1, size)
    for offset in range(0, size, mmap.PAGESIZE):
        pages[offset] = 1
    return pages


@pytest.mark.parametrize("sampled", [False, True])
def test_peak_is_what_was_there_plus_what_was_allocated(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if sampled:
        monkeypatch.setattr(memory, "_CLEAR_REFS", Path("/nowhere/clear_refs"))
    touch(200 * MEGABYTE).close()  # an earlier, higher peak must not count
    before = psutil.Process().memory_info().rss
    with PeakMemory(CPU) as peak:
        pages = touch(64 * MEGABYTE)
        time.sleep(0.1)
        pages.close()
    assert peak.host_bytes - before == pytest.approx(64 * MEGABYTE, abs=4 * MEGABYTE)
    assert ("samples" in peak.method) == (sampled or not Path("/proc/self/clear_refs").exists())


def test_on_a_cpu_the_peak_is_that_of_the_host() -> None:
    with PeakMemory(CPU) as peak:
        pass
    figures = peak.figures()
    assert set(figures) == {"peak_memory"}
    assert figures["peak_memory"].value == peak.host_bytes > 0
    assert figures["peak_memory"].unit == "bytes"


def test_an_error_inside_passes_through_and_ends_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CLEAR_REFS", Path("/nowhere/clear_refs"))
    peak = PeakMemory(CPU)
    with pytest.raises(KeyError), peak:
        raise KeyError
    assert peak.host_bytes > 0
    assert peak._sampler is not None
    assert not peak._sampler.is_alive()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_peak_is_that_of_the_device() -> None:
    device = torch.device("cuda")
    before = torch.cuda.memory_allocated(device)
    with PeakMemory(device) as peak:
        tensor = torch.empty(64 * MEGABYTE, dtype=torch.uint8, device=device)
        del tensor
    assert peak.figures()["peak_memory"].value == before + 64 * MEGABYTE
    assert peak.figures()["peak_host_memory"].value == peak.host_bytes
