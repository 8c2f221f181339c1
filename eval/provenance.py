"""Where a figure comes from: the machine, the versions and the time it was measured with."""

import platform
import re
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "safetensors")
_CPU_INFO = Path("/proc/cpuinfo")


def environment(device: torch.device) -> dict[str, object]:
    """JSON-ready: versions of libraries and Python, the system, the device by name, threads, and the date in UTC."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": library_versions(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": str(device),
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),
    }


def library_versions() -> dict[str, str]:
    """Installed version of each library that can change a figure; one that is not installed is left out."""
    found = {}
    for library in _LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def device_name(device: torch.device) -> str:
    """The product name of ``device`` as its maker gives it, where the system tells; else the kind of machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu_name(_CPU_INFO) or platform.processor() or platform.machine()


def _cpu_name(info: Path) -> str | None:
    """The first "model name" of a Linux ``cpuinfo`` file."""
    try:
        text = info.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found is not None else None
