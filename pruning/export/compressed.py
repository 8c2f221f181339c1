"""Writes int4 and int8 codes as compressed-tensors, which vLLM runs on and transformers loads.

The format is that of the compressed-tensors library, 0.15 and newer: ``pack-quantized`` where inputs stay as they are,
codes in offset binary, the first in the lowest bits of an int32; ``int-quantized`` where inputs are rounded too.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from pruning.artifact import rebuild
from pruning.artifact_header import LayerRecord, Layout
from pruning.artifact_layout import unique_tensors
from pruning.configs import CONFIG
from pruning.errors import InputError
from pruning.export.files import Export, copy_companions, zeros_notes
from pruning.quantize.layer import QuantizedLinear
from pruning.sources import WEIGHTS

BITS = {"int4": 4, "int8": 8}
SIGN = {"int4": 0x88, "int8": 0x80}
"""The sign bits of a byte of codes: flipped, two's complement is offset binary."""

LEVER = "choose --format transformers"

_ROUNDED = {
    False: (),
    True: ("Inputs of layers are rounded to 256 levels here, and to 255 by Poda: results differ a little.",),
}


def prepare(variant: Path) -> Export:
    """``variant``, every layer of which has codes of one kind. Raises InputError where the format has no place."""
    model, layout = rebuild(variant)
    kind = _kind(layout)
    if _has_conv1d(model):
        raise InputError(f"compressed-tensors has no layers of this model's kind, Conv1D: {LEVER}")
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, _Stored(module))
    state, _ = unique_tensors(model.state_dict())

    def put(folder: Path) -> None:
        copy_companions(variant, folder)
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        config |= {
            "architectures": [type(model).__name__],
            "dtype": layout.dtype,
            "quantization_config": _quantization(kind, model),
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / WEIGHTS, {"format": "pt"})

    return Export(
        sum(tensor.nbytes for tensor in state.values()), put, (*zeros_notes(layout), *_ROUNDED[kind.activations])
    )


def _has_conv1d(model: Any) -> bool:
    """Whether transformers makes the model with its Conv1D, in the place of which layers with codes now stand."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    return any(isinstance(module, Conv1D) for module in empty.modules())


class _Stored(nn.Module):
    """The tensors of one layer under the names of the format."""

    def __init__(self, layer: QuantizedLinear) -> None:
        super().__init__()
        if layer.activations:
            self.register_buffer("weight", layer.codes)
        else:
            self.register_buffer("weight_packed", _packed(layer.codes, SIGN[layer.kind]))
            self.register_buffer("weight_shape", torch.tensor([layer.out_features, layer.in_features]))
        self.register_buffer("weight_scale", layer.scale if layer.scale.ndim == 2 else layer.scale[:, None])
        self.register_buffer("bias", layer.bias)


def _packed(codes: Tensor, sign: int) -> Tensor:
    """``codes`` as Poda stores them, (out, bytes), as int32 (out, ceil(bytes / 4)) in offset binary."""
    raised = codes.view(torch.uint8) ^ sign
    return functional.pad(raised, (0, -raised.shape[1] % 4)).view(torch.int32)


def _kind(layout: Layout) -> LayerRecord:
    """A layer that stands for all in how its codes are. Raises InputError where the format has no place for them."""
    records = list(layout.layers.values())
    if any(record.experts for record in records):
        raise InputError(f"compressed-tensors is not written for experts in one tensor: {LEVER}")
    if all(record.codes is None for record in records):
        raise InputError(f"this variant is not quantized, and compressed-tensors is for codes: {LEVER}")
    kinds = {(record.codes, record.group, record.activations) for record in records if record.codes is not None}
    foreign = {codes for codes, _, _ in kinds} - BITS.keys()
    if foreign:
        raise InputError(f"{min(map(str, foreign))} is not written as compressed-tensors: {LEVER}")
    if len(kinds) > 1:
        raise InputError(f"the layers of this variant have codes of several kinds: {LEVER}")
    return next(record for record in records if record.codes is not None)


def _quantization(kind: LayerRecord, model: nn.Module) -> dict[str, Any]:
    assert kind.codes is not None
    weights: dict[str, Any] = {
        "num_bits": BITS[kind.codes],
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if kind.group is None else "group",
        "group_size": kind.group,
        "dynamic": False,
    }
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    name = "int-quantized" if kind.activations else "pack-quantized"
    scheme = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs if kind.activations else None,
        "output_activations": None,
        "format": name,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": [name for name, module in model.named_modules() if isinstance(module, nn.Linear)],
        "kv_cache_scheme": None,
    }
