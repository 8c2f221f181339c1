"""Chooses the device to compute on and the number format that suits it, and says why."""

import os

# Read by torch when it is imported: on Apple's GPU, run what it does not support on the CPU instead of failing.
os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")

import torch

from pruning.errors import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MPS_NOTE = "operations that Apple's GPU does not support run on the CPU"

_BFLOAT16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "sve_bf16", "arm_bf16", "bf16")


def choose_device(name: str) -> torch.device:
    """The device called ``name``: "auto" (a GPU where there is one), "cpu", "cuda", "cuda:1", "mps".

    Raises InputError for one that is not in this machine.
    """
    name = name.strip().lower()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"{name!r} is no device: choose auto, cpu, cuda, cuda:1 or mps") from error
    if device.type == "cuda":
        index = device.index or 0
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if index >= count:
            here = f"{count} CUDA device(s), numbered from 0" if count else "no CUDA device that this torch can use"
            raise InputError(f"{name} is not here: this machine has {here}. Choose auto or cpu")
        return torch.device("cuda", index)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise InputError("mps is not here: this machine has no Apple GPU that torch can use. Choose auto or cpu")
    if device.type not in ("cpu", "mps"):
        raise InputError(f"Poda does not compute on {device.type}: choose auto, cpu, cuda or mps")
    return torch.device(device.type)


def choose_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype called ``name``, and in words why: "auto" is bfloat16 where ``device`` is good at it, else float32.

    Raises InputError for an unknown name.
    """
    note = f"; {MPS_NOTE}" if device.type == "mps" else ""
    if name != "auto":
        if name not in DTYPES:
            raise InputError(f"{name!r} is no number format: choose auto, {', '.join(DTYPES)}")
        return DTYPES[name], f"{name} was asked for{note}"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8:
            return torch.bfloat16, f"bfloat16, which this GPU (compute capability {major}.{minor}) multiplies fast"
        return torch.float32, f"float32, as this GPU (compute capability {major}.{minor}) has no fast bfloat16"
    if device.type == "mps":
        return torch.float32, f"float32, as not every Apple GPU is good at bfloat16{note}"
    instruction = _bfloat16_instruction()
    if instruction is not None:
        return torch.bfloat16, f"bfloat16, which this CPU multiplies fast ({instruction})"
    return torch.float32, "float32, as this CPU has no instructions for bfloat16"


def _bfloat16_instruction() -> str | None:
    """The instruction set by which this CPU multiplies bfloat16, where torch has the kernels to use it (oneDNN)."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch left it untyped
        return None
    capabilities = torch.cpu.get_capabilities()
    return next((name for name in _BFLOAT16_INSTRUCTIONS if capabilities.get(name)), None)
