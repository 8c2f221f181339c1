"""Variants on disk: written in the smallest faithful form, verified, rebuilt bit for bit (see artifact_format)."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]  # it has no type hints
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.pytorch_utils import Conv1D

from pruning.artifact_format import StoredSizes, read_header, read_layout, stored_sizes, whole_tensors
from pruning.artifact_header import (
    HEADER_KEY,
    OWN_FIELDS,
    LayerRecord,
    Layout,
    MaskedTensor,
    places_name,
    values_name,
)
from pruning.artifact_layout import layout_of, unique_tensors
from pruning.artifact_seal import BLANK, SEAL_KEY, check_seal, file_digests, seal
from pruning.configs import CONFIG, check_size, read_config
from pruning.disk import new_folder
from pruning.errors import InputError, RunError
from pruning.headers import TensorEntry
from pruning.packing import pack, pack_groups, pack_halves, same_bits, unpack, unpack_groups, unpack_halves
from pruning.quantize.int4 import pack4, unpack4
from pruning.quantize.layer import QuantizedLinear
from pruning.quantize.layers import STORED, quantized_linear
from pruning.reading import reading
from pruning.sources import VARIANT

__all__ = [
    "StoredSizes",
    "dequantized_model",
    "read_header",
    "rebuild",
    "save_artifact",
    "stored_sizes",
]


def save_artifact(
    model: nn.Module,
    tokenizer: Any,
    folder: Path,
    header: dict[str, Any],
    *,
    dense: tuple[int, int] | None = None,
) -> None:
    """Write ``model`` with its tokenizer to ``folder``, which appears when it is whole and verified.

    ``header`` is JSON of the caller's: recipe, identity, specification. ``dense`` is given where the model has fewer
    parameters than the one it was made from: how many that had, and how many weights in its prunable layers. Every
    tensor is read back and compared in every bit. Raises RunError when the disk is full or what was read back differs,
    and ValueError when ``header`` uses a name of the format's own.
    """
    taken = set(header) & OWN_FIELDS
    if taken:
        raise ValueError(f"{', '.join(sorted(taken))} in the header would hide what the format says itself")
    state, tied = unique_tensors(model.state_dict())
    layout = layout_of(model, state, tied, header, dense)
    stored: dict[str, Tensor] = {}
    for name, tensor in state.items():
        record = layout.masked.get(name)
        if record is not None:
            stored[places_name(name, record)], stored[values_name(name)] = _packed(tensor.cpu(), record)
        else:
            stored[name] = tensor.cpu().contiguous()
    needed = sum(tensor.nbytes for tensor in stored.values())
    with new_folder(folder, needed, f"the variant {folder.name}") as temporary:
        config: Any = model.config
        config.save_pretrained(temporary)
        generation: Any = getattr(model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        layout = layout.model_copy(update={"files": file_digests(temporary)})
        save_file(stored, temporary / VARIANT, {HEADER_KEY: layout.model_dump_json(), SEAL_KEY: BLANK})
        del stored
        seal(temporary / VARIANT)
        _verify(temporary, state)


def rebuild(folder: Path) -> tuple[nn.Module, Layout]:
    """The model of the variant in ``folder``, on the CPU, in eval mode, and its header.

    Every tensor equals the one saved bit for bit; quantized layers are :class:`QuantizedLinear`. Raises InputError
    naming what is wrong with the folder.
    """
    layout, tensors = read_layout(folder)
    check_seal(folder, layout)
    model = _empty(folder, layout, tensors)
    for name, record in layout.layers.items():
        if record.codes is not None:
            _replace(model, name, _empty_quantized(record, layout, has_bias=_has_bias(model, name)))
    _assign(model, dict(_tensors(folder, layout)), layout, folder)
    return model, layout


def dequantized_model(folder: Path) -> tuple[nn.Module, Layout]:
    """The model of the variant in ``folder`` with weights in place of codes, in the classes that transformers has.

    Raises InputError as :func:`rebuild` does.
    """
    layout, tensors = read_layout(folder)
    check_seal(folder, layout)
    model = _empty(folder, layout, tensors)
    state = dict(_tensors(folder, layout))
    for name, record in layout.layers.items():
        if record.codes is not None:
            weight = quantized_linear(state.pop(f"{name}.codes"), state.pop(f"{name}.scale")).dequantized()
            transposed = isinstance(model.get_submodule(name), Conv1D)
            state[f"{name}.weight"] = weight.T.contiguous() if transposed else weight
    _assign(model, state, layout, folder)
    return model, layout


def _verify(folder: Path, state: dict[str, Tensor]) -> None:
    """Compare what was written with what was to be written, one tensor at a time."""
    layout, _ = read_layout(folder)
    left = set(state)
    for name, tensor in _tensors(folder, layout, aliases=False):
        if name not in left or not same_bits(tensor, state[name].cpu()):
            raise RunError(f"{name} was read back from {folder.parent} other than it was written: check the disk")
        left.discard(name)
    if left:
        raise RunError(f"{min(left)} was not found in what was written to {folder.parent}: check the disk")


def _tensors(folder: Path, layout: Layout, aliases: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by its name, in memory of its own, and then the tied ones by their other names."""
    path = folder / VARIANT
    masked = layout.masked.items()
    parts = {part for name, record in masked for part in (places_name(name, record), values_name(name))}
    sources = set(layout.tied.values()) if aliases else set()
    shared: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in [*(key for key in file.keys() if key not in parts), *layout.masked]:  # noqa: SIM118 (no dict)
                record = layout.masked.get(name)
                if record is None:
                    # Not the file's own pages: the file may be removed while the model is used.
                    tensor = file.get_tensor(name).clone()
                else:
                    places, values = file.get_tensor(places_name(name, record)), file.get_tensor(values_name(name))
                    tensor = _unpacked(places, values, record)
                if name in sources:
                    shared[name] = tensor
                yield name, tensor
    except (SafetensorError, ValueError, OSError) as error:
        raise InputError(f"{path} is damaged ({error}): make the variant again") from error
    for alias, name in layout.tied.items() if aliases else ():
        yield alias, shared[name]


def _empty(folder: Path, layout: Layout, tensors: dict[str, TensorEntry]) -> nn.Module:
    """The model that ``config.json`` describes: parameters without memory, buffers as the configuration has them."""
    with reading(str(folder / "config.json"), "make the variant again"):
        config = read_config(folder)
        blocks = getattr(config, "num_hidden_layers", 0)
        if isinstance(blocks, int) and blocks > len(layout.layers):
            raise InputError(
                f"{folder / 'config.json'} describes {blocks:,} blocks and the variant has {len(layout.layers):,} "
                "layers in all: make the variant again"
            )
        elements = sum(math.prod(shape) for _, shape in whole_tensors(layout, tensors).values())
        check_size(config, getattr(torch, layout.dtype), folder / CONFIG, elements)
        with init_empty_weights(include_buffers=False):
            model: nn.Module = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, layout.dtype), trust_remote_code=False
            )
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    return model


def _empty_quantized(record: LayerRecord, layout: Layout, has_bias: bool) -> QuantizedLinear:
    assert record.codes is not None
    rows, columns = record.shape[:2]
    dtype = getattr(torch, layout.dtype)
    scale = torch.empty(record.scales, dtype=dtype, device="meta")
    stored = (rows, columns // 2) if record.codes == "int4" else (rows, columns)
    codes = torch.empty(stored, dtype=STORED[record.codes], device="meta")
    bias = scale.new_empty(rows) if has_bias else None
    return quantized_linear(codes, scale, bias, activations=record.activations)


def _packed(tensor: Tensor, record: MaskedTensor) -> tuple[Tensor, Tensor]:
    """The places and the values that are stored for ``tensor``, which is on the CPU."""
    elements = unpack4(tensor) if record.dtype == "I4" else tensor
    if record.slots is None:
        places, values = pack(elements)
    else:
        places, values = pack_groups(elements.T if record.transposed else elements, record.slots)
    return places, pack_halves(values) if record.dtype == "I4" else values


def _unpacked(places: Tensor, values: Tensor, record: MaskedTensor) -> Tensor:
    """The tensor that :func:`_packed` made ``places`` and ``values`` of. Raises ValueError where they do not fit."""
    if record.dtype == "I4":
        values = unpack_halves(values, record.kept)
    if record.slots is None:
        elements = unpack(places, values, record.shape)
    else:
        elements = unpack_groups(places, values, record.slots, record.rows)
        elements = elements.T.contiguous() if record.transposed else elements
    return pack4(elements) if record.dtype == "I4" else elements


def _has_bias(model: nn.Module, layer: str) -> bool:
    try:
        return getattr(model.get_submodule(layer), "bias", None) is not None
    except AttributeError as error:
        raise InputError(f"config.json describes no layer {layer}, which the variant has: make it again") from error


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _assign(model: nn.Module, state: dict[str, Tensor], layout: Layout, folder: Path) -> None:
    """Put ``state`` in the place of the empty parameters, tied ones together, and make the model ready to run."""
    path = folder / VARIANT
    expected = model.state_dict()
    for name in sorted(expected.keys() ^ state.keys()):
        raise InputError(
            f"{path} {'lacks' if name in expected else 'has'} {name}, which config.json "
            f"{'asks for' if name in expected else 'does not know'}: make the variant again"
        )
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise InputError(
                f"{path} has {name} of shape {tuple(tensor.shape)} where config.json asks for "
                f"{tuple(expected[name].shape)}: make the variant again"
            )
    model.load_state_dict(state, assign=True)
    for alias, name in layout.tied.items():
        _tie(model, alias, name)
    model.eval().requires_grad_(False)


def _tie(model: nn.Module, alias: str, name: str) -> None:
    """Make ``alias`` the very parameter ``name`` is, so that it stays one when the model moves to a device."""
    owners = []
    for full in (alias, name):
        path, _, leaf = full.rpartition(".")
        owners.append((model.get_submodule(path), leaf))
    (other, leaf), (owner, source) = owners
    if leaf in other._parameters and source in owner._parameters:
        other._parameters[leaf] = owner._parameters[source]
