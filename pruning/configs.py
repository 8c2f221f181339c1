"""Reads a model's ``config.json`` as something that anyone may have written."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pruning.errors import InputError

CONFIG = "config.json"
MOST_PARTS = 65_536
"""No model has more layers, heads, experts or labels than this, and a list is made of some of them at once."""

MOST_BUFFER_BYTES = 1 << 30
"""What follows from a configuration and is in no file (rotary frequencies, masks) takes less than this."""

MOST_TIMES = 4
SMALL = 1 << 20
"""How many times as many parameters as its files hold, and how many more, a configuration may ask for to be read on."""

_PARTS = re.compile(r"(^|_)(num|n_layers?|n_heads?|layers|labels|heads|experts)(_|$)")
_KERNELS = ("_attn_implementation", "_experts_implementation")


def read_config(folder: Path) -> Any:
    """The configuration in ``folder``, as transformers reads it.

    Kernels that it asks for are left to transformers' own choice: a name may be a repository whose code would be
    downloaded and run. Raises InputError for counts that no model has, and lets through what transformers raises.
    """
    path = folder / CONFIG
    _check_counts(path, json.loads(path.read_text(encoding="utf-8")))
    config: Any = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for name in _KERNELS:
            if getattr(part, name, None) is not None:
                setattr(part, name, None)
    return config


def check_size(config: Any, dtype: torch.dtype, path: Path, elements: int) -> None:
    """Raise InputError where the model of ``config``, read from ``path``, takes memory that its files do not fill.

    ``elements`` is how many numbers they hold. A model of other shapes that is not many times as large passes.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    found = sum(buffer.nbytes for buffer in model.buffers())
    if found > MOST_BUFFER_BYTES:
        raise InputError(f"{path} describes a model with {found:,} bytes that are in no file: get its files again")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters > MOST_TIMES * elements + SMALL:
        raise InputError(
            f"{path} describes a model of {parameters:,} parameters, and its files hold {elements:,}: get them again"
        )


def _check_counts(path: Path, entries: Any) -> None:
    if isinstance(entries, list):
        for entry in entries:
            _check_counts(path, entry)
    if not isinstance(entries, dict):
        return
    for name, entry in entries.items():
        if isinstance(entry, int | float) and entry > MOST_PARTS and _PARTS.search(name):
            raise InputError(f"{path} says {name} is {entry:,}, more than any model has: get its files again")
        _check_counts(path, entry)
