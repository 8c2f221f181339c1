"""What the header of a variant says of a model: how each prunable layer is stored best, and what is tied."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pruning.anatomy import ExpertLayer, all_expert_tensors, expert_tensors, prunable_layers
from pruning.artifact_format import DenseModel, LayerRecord, Layout, MaskedTensor, masked_bytes, weight_name
from pruning.packing import bit_patterns
from pruning.quantize.int8 import Int8Linear

_SPELLED = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
}


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
    for name, shape, int8 in _layers(model):
        record = LayerRecord.model_validate({"storage": "int8" if int8 else "dense", "shape": shape, "zeros": 0})
        tensor_name = weight_name(name, record)
        tensor = state[tied.get(tensor_name, tensor_name)]
        kept = int(bit_patterns(tensor).count_nonzero())
        elements, item = tensor.numel(), tensor.element_size()
        packed = masked_bytes(elements, kept, item) < elements * item and tensor_name in state
        if packed:
            masked[tensor_name] = MaskedTensor.model_validate(
                {"shape": tuple(tensor.shape), "dtype": _SPELLED[tensor.dtype], "kept": kept}
            )
        storage = "+".join(["bitmask"] * packed + ["int8"] * int8) or "dense"
        layers[name] = record.model_copy(update={"storage": storage, "zeros": elements - kept})
    quantized = [module for module in model.modules() if isinstance(module, Int8Linear)]
    return Layout.model_validate(
        {
            "dtype": str(_compute_dtype(model)).removeprefix("torch."),
            "parameters": sum(parameter.numel() for parameter in model.parameters())
            + sum(layer.codes.numel() + (layer.bias.numel() if layer.bias is not None else 0) for layer in quantized),
            "layers": layers,
            "masked": masked,
            "tied": tied,
            "dense": DenseModel(parameters=dense[0], layer_weights=dense[1]) if dense is not None else None,
            "about": about,
        }
    )


def _layers(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Name, shape (out, in) and whether it is int8 of every prunable layer; a quantized model has them all in int8.

    Experts that are kept in one tensor, which are never in int8, are one layer of the shape of that tensor.
    """
    quantized = [
        (name, (module.out_features, module.in_features), True)
        for name, module in model.named_modules()
        if isinstance(module, Int8Linear)
    ]
    if quantized:
        yield from quantized
        experts = all_expert_tensors(model)
    else:
        layers = prunable_layers(model)
        experts = expert_tensors(layers)
        yield from ((e.name, (e.out_features, e.in_features), False) for e in layers if not isinstance(e, ExpertLayer))
    for tensor in experts:
        yield tensor.name, tuple(tensor.tensor.shape), False


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
    return next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
