"""What the header of a variant says of a model: how each prunable layer is stored best, and what is tied."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pruning.anatomy import ExpertLayer, all_expert_tensors, expert_tensors, prunable_layers
from pruning.artifact_header import (
    CODE_ELEMENTS,
    GROUP,
    STORAGES,
    DenseModel,
    Element,
    LayerRecord,
    Layout,
    MaskedTensor,
    dense_bytes,
    weight_name,
)
from pruning.packing import bit_patterns, most_in_a_group
from pruning.quantize import Codes
from pruning.quantize.int4 import unpack4
from pruning.quantize.layer import QuantizedLinear

_SPELLED: dict[torch.dtype, Element] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def layout_of(
    model: nn.Module,
    state: dict[str, Tensor],
    tied: dict[str, str],
    about: dict[str, Any],
    dense: tuple[int, int] | None,
) -> Layout:
    """What there is to say of ``model``, whose ``state`` and ``tied`` are those of :func:`unique_tensors`.

    ``about`` and ``dense`` are the caller's, as in :func:`pruning.artifact.save_artifact`.
    """
    layers: dict[str, LayerRecord] = {}
    masked: dict[str, MaskedTensor] = {}
    for layer in _layers(model):
        record = layer.record()
        tensor_name = weight_name(layer.name, record)
        tensor = state[tied.get(tensor_name, tensor_name)]
        elements = unpack4(tensor) if layer.codes == "int4" else tensor
        zeros = elements.numel() - int(bit_patterns(elements).count_nonzero())
        best = _smallest(elements, zeros, layer) if tensor_name in state else None
        if best is not None:
            masked[tensor_name] = best
        layers[layer.name] = layer.record(_form(best), zeros)
    quantized = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    return Layout.model_validate(
        {
            "dtype": str(_compute_dtype(model)).removeprefix("torch."),
            "parameters": sum(parameter.numel() for parameter in model.parameters())
            + sum(layer.out_features * layer.in_features for layer in quantized)
            + sum(layer.bias.numel() for layer in quantized if layer.bias is not None),
            "layers": layers,
            "masked": masked,
            "tied": tied,
            "dense": DenseModel(parameters=dense[0], layer_weights=dense[1]) if dense is not None else None,
            "about": about,
        }
    )


@dataclass(frozen=True)
class _Layer:
    """A prunable layer: its ``shape`` (out, in), and whether its tensor is (in, out); or all experts of one tensor."""

    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    codes: Codes | None = None
    group: int | None = None
    activations: bool = False

    def storage(self, form: str) -> str:
        """What the format calls it."""
        if self.codes is None:
            return form
        return self.codes if form == "dense" else f"{form}+{self.codes}"

    def record(self, form: str = "dense", zeros: int = 0) -> LayerRecord:
        """What the header says of it."""
        return LayerRecord.model_validate(
            {
                "storage": self.storage(form),
                "shape": self.shape,
                "zeros": zeros,
                "group": self.group,
                "activations": self.activations,
            }
        )


def _form(masked: MaskedTensor | None) -> str:
    return "dense" if masked is None else "bitmask" if masked.slots is None else "n:m"


def _smallest(elements: Tensor, zeros: int, layer: _Layer) -> MaskedTensor | None:
    """The form in which ``elements`` take the fewest bytes; None for all of them as they are."""
    count = elements.numel()
    dtype = CODE_ELEMENTS[layer.codes] if layer.codes is not None else _SPELLED[elements.dtype]
    found: list[MaskedTensor] = []
    if len(layer.shape) == 2 and layer.shape[1] % GROUP == 0 and layer.storage("n:m") in STORAGES:
        slots = max(1, most_in_a_group(elements.T if layer.transposed else elements))
        if slots < GROUP:
            found.append(
                MaskedTensor.model_validate(
                    {
                        "shape": tuple(elements.shape),
                        "dtype": dtype,
                        "kept": count // GROUP * slots,
                        "slots": slots,
                        "transposed": layer.transposed,
                    }
                )
            )
    found.append(MaskedTensor(shape=tuple(elements.shape), dtype=dtype, kept=count - zeros))
    best = min(found, key=lambda masked: masked.stored_bytes)
    return best if best.stored_bytes < dense_bytes(count, dtype) else None


def _layers(model: nn.Module) -> Iterator[_Layer]:
    """Every prunable layer; a quantized model has them all quantized.

    Experts that are kept in one tensor, which are never quantized, are one layer of the shape of that tensor.
    """
    quantized = [
        _Layer(
            name,
            (module.out_features, module.in_features),
            codes=module.kind,
            group=module.group,
            activations=module.activations,
        )
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    ]
    if quantized:
        yield from quantized
        experts = all_expert_tensors(model)
    else:
        layers = prunable_layers(model)
        experts = expert_tensors(layers)
        for layer in layers:
            if not isinstance(layer, ExpertLayer):
                shape = (layer.out_features, layer.in_features)
                yield _Layer(layer.name, shape, transposed=isinstance(layer.module, Conv1D))
    for tensor in experts:
        yield _Layer(tensor.name, tuple(tensor.tensor.shape))


def unique_tensors(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a state dict, those that are one in memory once, and the other names of those."""
    first: dict[tuple[Any, ...], str] = {}
    unique: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in state.items():
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in first:
            tied[name] = first[key]
        else:
            first[key] = name
            unique[name] = tensor.detach()
    return unique, tied


def _compute_dtype(model: nn.Module) -> torch.dtype:
    state: dict[str, Tensor] = model.state_dict()
    return next(tensor.dtype for tensor in state.values() if tensor.dtype in _FLOATS)
