"""The format of a variant on disk, and what can be read of it without torch.

A variant is a folder that needs no other file::

    variant.safetensors      every tensor, and the header in its metadata
    config.json              the model's configuration, as transformers writes it
    generation_config.json   where the model has one
    tokenizer files          as the tokenizer's own save_pretrained writes them

The metadata of ``variant.safetensors`` has one entry, ``poda``: a JSON object (:class:`Layout`) with

``format``, ``version``
    "poda-variant" and 2. A reader takes versions 1 and 2, and refuses every other.
``dtype``
    The dtype the model computes in: float32, bfloat16, float16 or float64.
``parameters``
    Parameters of the model, tied ones counted once, scales of quantized layers not counted.
``layers``
    For every prunable layer by its module name, how its weights are stored: ``storage`` ("dense", "bitmask", "int8" or
    "bitmask+int8"), ``shape`` (out, in) and ``zeros``, the number of weights (or codes) whose bits are all zero. From
    version 2 on also for every tensor that holds the weights of all experts, by the name of the parameter: ``shape`` is
    then (experts, rows, columns) as it is stored, and ``storage`` is "dense" or "bitmask".
``masked``
    For every tensor that is stored as a bitmask and its kept values: ``shape``, ``dtype`` and ``kept``.
``tied``
    Name of a tensor to the name of the one it shares its storage with, which alone is stored.
``dense``
    From version 2 on, where a variant has fewer parameters than the dense model it comes from, or null: that model's
    ``parameters``, and ``layer_weights``, those of its prunable layers.
``about``
    What the writer wanted to say: recipe, identity, specification.

Tensors have the names and the shapes of the model's state dict (a layer of transformers' Conv1D keeps its (in, out)
order). An int8 layer L has ``L.codes`` (out, in) int8 and ``L.scale`` (out,) in place of ``L.weight``; its weights are
codes × scale, computed in the dtype of the scale. A tensor T in ``masked`` of n elements is stored as two:

``T.mask``
    n bits in row-major order, the first in the lowest bit of the first byte, in ceil(n / 8) bytes (uint8); a bit is
    set where the element's bit pattern is not all zero. So +0.0 is dropped, and -0.0 is kept as the value it is.
``T.values``
    The kept elements in the same order, in the dtype of T; as many as there are bits set.

Of dense and bitmask each layer takes the smaller. Every other tensor, the tied ones once, is stored as it is. Buffers
that are not in the state dict follow from the configuration. Reading gives tensors equal bit for bit to those written.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from pruning.errors import InputError
from pruning.headers import ITEM_BYTES, TensorEntry, read_safetensors
from pruning.recipe import Frozen
from pruning.sources import VARIANT

FORMAT = "poda-variant"
VERSION = 2
HEADER_KEY = "poda"
OWN_FIELDS = frozenset({"format", "version", "dtype", "parameters", "layers"})
"""What a header says beside what the writer wanted to say."""

Storage = Literal["dense", "bitmask", "int8", "bitmask+int8"]


class MaskedTensor(Frozen):
    """A tensor stored as a bitmask and its kept values; ``dtype`` as safetensors spells it."""

    shape: tuple[NonNegativeInt, ...]
    dtype: Literal["F64", "F32", "F16", "BF16", "I8"]
    kept: NonNegativeInt


class LayerRecord(Frozen):
    """How a prunable layer of ``shape`` (out, in) is stored, and how many of its weights are zero.

    All experts that are kept in one tensor are one record, of ``shape`` (experts, rows, columns) as stored.
    """

    storage: Storage
    shape: tuple[PositiveInt, PositiveInt] | tuple[PositiveInt, PositiveInt, PositiveInt]
    zeros: NonNegativeInt

    @model_validator(mode="after")
    def _experts_are_not_quantized(self) -> Self:
        if self.experts and self.int8:
            raise ValueError("experts in one tensor are not stored in int8")
        return self

    @property
    def experts(self) -> bool:
        """Whether it is one tensor that holds the weights of all experts."""
        return len(self.shape) == 3

    @property
    def int8(self) -> bool:
        """Whether it is quantized."""
        return self.storage.endswith("int8")

    @property
    def weights(self) -> int:
        """How many weights it has."""
        return math.prod(self.shape)


class DenseModel(Frozen):
    """How many parameters the dense model has, tied ones counted once, and how many weights its prunable layers."""

    parameters: PositiveInt
    layer_weights: PositiveInt


class Layout(Frozen):
    """The header of a variant."""

    format: Literal["poda-variant"] = "poda-variant"
    version: Literal[1, 2] = 2
    dtype: Literal["float64", "float32", "bfloat16", "float16"]
    parameters: PositiveInt
    layers: dict[str, LayerRecord] = Field(min_length=1)
    masked: dict[str, MaskedTensor] = Field(default_factory=dict)
    tied: dict[str, str] = Field(default_factory=dict)
    dense: DenseModel | None = None
    about: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_of_its_version(self) -> Self:
        if self.version == 1 and (self.dense is not None or any(record.experts for record in self.layers.values())):
            raise ValueError("version 1 has no experts in one tensor and no dense model")
        return self


@dataclass(frozen=True)
class StoredSizes:
    """What a variant takes on disk, in bytes, beside what the dense model takes in 16 bits.

    ``pruned_layer_bytes`` counts weights, masks, codes and scales of the prunable layers, and no biases;
    ``dense16`` is 2 bytes for every parameter of the dense model, tied ones once. ``parameters`` and
    ``pruned_layer_weights`` are those of the variant, fewer than the dense model's where its structure was pruned.
    """

    total_bytes: int
    weight_file_bytes: int
    pruned_layer_bytes: int
    pruned_layer_weights: int
    dense16_bytes: int
    dense16_pruned_layer_bytes: int
    parameters: int


def weight_name(layer: str, record: LayerRecord) -> str:
    """The tensor that holds the weights of ``layer``: its codes where it is quantized."""
    if record.experts:
        return layer
    return f"{layer}.codes" if record.int8 else f"{layer}.weight"


def mask_name(tensor: str) -> str:
    """Where the bitmask of ``tensor`` is stored."""
    return f"{tensor}.mask"


def values_name(tensor: str) -> str:
    """Where the kept values of ``tensor`` are stored."""
    return f"{tensor}.values"


def masked_bytes(elements: int, kept: int, item_bytes: int) -> int:
    """Bytes of a bitmask over ``elements`` and ``kept`` values of ``item_bytes`` each."""
    return -(-elements // 8) + kept * item_bytes


def read_layout(folder: Path) -> tuple[Layout, dict[str, TensorEntry]]:
    """The header of the variant in ``folder`` and its stored tensors, checked against each other.

    Raises InputError naming what is wrong: no variant, another version, damage, tensors that do not fit together.
    """
    path = folder / VARIANT
    if not path.is_file():
        raise InputError(
            f"{folder} is no variant: it has no {VARIANT}. Its files were removed, or it is another folder"
        )
    file = read_safetensors(path)
    text = file.metadata.get(HEADER_KEY)
    if text is None:
        raise InputError(f"{path} was not written by Poda: give the folder of a variant")
    try:
        layout = Layout.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        if place in ("format", "version"):
            raise InputError(
                f"{path} has {place} {first['input']!r}, and this Poda reads {FORMAT} versions 1 and {VERSION}: "
                "use the Poda that wrote it, or make the variant again"
            ) from error
        raise _damaged(path, f"{place or 'its header'}: {first['msg']}") from error
    for name, record in layout.masked.items():
        _check_masked(path, name, record, file.tensors)
    for layer, layer_record in layout.layers.items():
        _check_layer(path, layer, layer_record, layout, file.tensors)
    for alias, name in layout.tied.items():
        if name not in layout.masked and name not in file.tensors:
            raise _damaged(path, f"{alias} is tied to {name}, which is missing")
    return layout, file.tensors


def read_header(folder: Path) -> dict[str, Any]:
    """What the writer said of the variant (recipe, identity, ...), and ``format``, ``version``, ``dtype``, ``layers``.

    Raises InputError as :func:`read_layout` does.
    """
    layout, _ = read_layout(folder)
    own = layout.model_dump(mode="json", include=set(OWN_FIELDS))
    return {**layout.about, **own}


def stored_sizes(folder: Path) -> StoredSizes:
    """Bytes of the variant in ``folder``. Raises InputError as :func:`read_layout` does."""
    layout, tensors = read_layout(folder)
    layer_bytes = 0
    for layer, record in layout.layers.items():
        name = weight_name(layer, record)
        stored = [mask_name(name), values_name(name)] if name in layout.masked else [name]
        stored += [f"{layer}.scale"] if record.int8 else []
        layer_bytes += sum(tensors[part].bytes for part in stored)
    weights = sum(record.weights for record in layout.layers.values())
    return StoredSizes(
        total_bytes=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        weight_file_bytes=(folder / VARIANT).stat().st_size,
        pruned_layer_bytes=layer_bytes,
        pruned_layer_weights=weights,
        dense16_bytes=2 * (layout.dense.parameters if layout.dense is not None else layout.parameters),
        dense16_pruned_layer_bytes=2 * (layout.dense.layer_weights if layout.dense is not None else weights),
        parameters=layout.parameters,
    )


def _check_masked(path: Path, name: str, record: MaskedTensor, tensors: dict[str, TensorEntry]) -> None:
    mask, values = tensors.get(mask_name(name)), tensors.get(values_name(name))
    if mask is None or values is None:
        raise _damaged(path, f"the {'mask' if mask is None else 'values'} of {name} is missing")
    elements = math.prod(record.shape)
    if (mask.dtype, mask.shape) != ("U8", (-(-elements // 8),)):
        raise _damaged(path, f"the mask of {name} does not cover its {elements:,} elements")
    if (values.dtype, values.shape) != (record.dtype, (record.kept,)) or record.kept > elements:
        raise _damaged(path, f"{name} keeps {record.kept:,} values in {record.dtype}, and others are stored")
    assert values.bytes == record.kept * ITEM_BYTES[record.dtype]


def _check_layer(path: Path, layer: str, record: LayerRecord, layout: Layout, tensors: dict[str, TensorEntry]) -> None:
    name = weight_name(layer, record)
    masked = layout.masked.get(name)
    if (masked is not None) != record.storage.startswith("bitmask"):
        raise _damaged(path, f"{layer} is stored as {record.storage}, and its tensors are not")
    shape = masked.shape if masked is not None else tensors[name].shape if name in tensors else None
    if shape is None:
        raise _damaged(path, f"{name} is missing")
    # A layer of transformers' Conv1D is stored as (in, out).
    if record.shape != shape and (record.int8 or record.experts or record.shape != shape[::-1]):
        raise _damaged(path, f"{name} is of shape {shape} where {record.shape} was expected")
    scale = tensors.get(f"{layer}.scale")
    if record.int8 and (scale is None or scale.shape != record.shape[:1]):
        raise _damaged(path, f"{layer} has no scale for each of its {record.shape[0]} rows")
    if masked is not None and record.zeros != record.weights - masked.kept:
        raise _damaged(path, f"{layer} is said to have {record.zeros:,} zeros, and {masked.kept:,} values are stored")


def _damaged(path: Path, why: str) -> InputError:
    return InputError(f"{path} is damaged or cut short ({why}): make the variant again")
