"""A variant loaded from disk, ready to score and to decode."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pruning.artifact import StoredSizes, read_header, rebuild, stored_sizes
from pruning.device import MPS_NOTE, choose_device
from pruning.models import load_tokenizer
from pruning.quantize.layer import QuantizedLinear
from pruning.reading import reading
from pruning.semi_structured import NONE_TRIED, Tried, use_where_faster


@dataclass
class Variant:
    """A model as it was saved, on its device in eval mode. ``runtime`` names the kernels its layers run on."""

    model: nn.Module
    tokenizer: Any
    header: dict[str, Any]
    sizes: StoredSizes
    folder: Path
    device: torch.device
    dtype: torch.dtype
    runtime: str


def load_variant(folder: Path, *, device: torch.device | str) -> Variant:
    """The variant in ``folder``, which is all that is needed, on ``device``.

    Raises InputError for a folder that is no whole variant or a device that is not here, RunError when it does not
    fit in memory.
    """
    place = choose_device(str(device))
    model, layout = rebuild(folder)
    with reading(f"the variant {folder.name}", "choose another --device"):
        model = model.to(place)
        for module in model.modules():
            if isinstance(module, QuantizedLinear):
                module.prepare()
        tried = use_where_faster(model) if place.type == "cuda" else NONE_TRIED
    dtype: torch.dtype = getattr(torch, layout.dtype)
    return Variant(
        model=model,
        tokenizer=load_tokenizer(folder),
        header=read_header(folder),
        sizes=stored_sizes(folder),
        folder=folder,
        device=place,
        dtype=dtype,
        runtime=runtime_of(model, dtype, place, tried),
    )


def runtime_of(model: nn.Module, dtype: torch.dtype, device: torch.device, tried: Tried = NONE_TRIED) -> str:
    """In words, the kernels the prunable layers of ``model`` run on."""
    kernels = {module.runtime for module in model.modules() if isinstance(module, QuantizedLinear)}
    named = "; ".join(sorted(kernels)) or f"torch {str(dtype).removeprefix('torch.')}"
    named = f"{named}; {tried.words}" if tried.words else named
    return f"{named}; {MPS_NOTE}" if device.type == "mps" else named
