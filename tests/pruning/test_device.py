"""Devices that are here are chosen, those that are not are named, and the number format says why."""

import re
from typing import Any

import pytest
import torch

from pruning import device
from pruning.device import choose_device, choose_dtype
from pruning.errors import InputError

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def pretend(cuda: int = 0, mps: bool = False, capability: tuple[int, int] = (8, 0)) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: capability)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return pretend


def test_auto_takes_the_best_there_is(machine: Any) -> None:
    machine()
    assert choose_device("auto") == CPU
    machine(mps=True)
    assert choose_device("auto") == MPS
    machine(cuda=1, mps=True)
    assert choose_device("auto") == CUDA


def test_one_of_several_can_be_named(machine: Any) -> None:
    machine(cuda=2)
    assert choose_device("cuda") == CUDA
    assert choose_device(" CUDA:1 ") == torch.device("cuda", 1)
    assert choose_device("cpu") == CPU


@pytest.mark.parametrize(
    ("name", "cuda", "why"),
    [
        ("cuda", 0, "no CUDA device"),
        ("cuda:2", 2, "cuda:2 is not here: this machine has 2 CUDA"),
        ("mps", 0, "no Apple GPU"),
        ("toaster", 0, "'toaster' is no device: choose auto"),
        ("cuda:x", 1, "is no device"),
        ("", 0, "is no device"),
        ("meta", 0, "does not compute on meta"),
    ],
)
def test_what_is_not_here_is_named(machine: Any, name: str, cuda: int, why: str) -> None:
    machine(cuda=cuda)
    with pytest.raises(InputError, match=why):
        choose_device(name)


@pytest.mark.parametrize(
    ("capability", "dtype", "why"),
    [
        ((9, 0), torch.bfloat16, r"bfloat16.*9\.0\) multiplies fast"),
        ((8, 0), torch.bfloat16, "bfloat16"),
        ((7, 5), torch.float32, r"float32.*7\.5\) has no fast bfloat16"),
    ],
)
def test_a_gpu_gets_bfloat16_from_ampere_on(
    machine: Any, capability: tuple[int, int], dtype: torch.dtype, why: str
) -> None:
    machine(cuda=1, capability=capability)
    chosen, reason = choose_dtype("auto", CUDA)
    assert chosen == dtype
    assert re.search(why, reason)


@pytest.mark.parametrize("instruction", ["amx_bf16", "avx512_bf16"])
def test_a_cpu_gets_bfloat16_where_it_has_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, instruction: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, instruction: True})
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    dtype, reason = choose_dtype("auto", CPU)
    assert dtype == torch.bfloat16
    assert instruction in reason
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert choose_dtype("auto", CPU)[0] == torch.float32


def test_a_cpu_without_them_gets_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_bf16": False})
    dtype, reason = choose_dtype("auto", CPU)
    assert dtype == torch.float32
    assert "no instructions for bfloat16" in reason


def test_apples_gpu_says_that_some_operations_run_on_the_cpu() -> None:
    dtype, reason = choose_dtype("auto", MPS)
    assert dtype == torch.float32
    assert device.MPS_NOTE in reason
    assert device.MPS_NOTE in choose_dtype("float16", MPS)[1]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_what_was_asked_for_is_taken(name: str) -> None:
    assert choose_dtype(name, CPU) == (getattr(torch, name), f"{name} was asked for")


def test_other_number_formats_are_refused() -> None:
    with pytest.raises(InputError, match="'int8' is no number format: choose auto, float32, bfloat16, float16"):
        choose_dtype("int8", CPU)
