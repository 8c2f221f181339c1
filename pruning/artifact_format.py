"""The format of a variant on disk, and what can be read of it without torch.

A variant is a folder that needs no other file::

    variant.safetensors      every tensor, and the header in its metadata
    config.json              the model's configuration, as transformers writes it
    generation_config.json   where the model has one
    tokenizer files          as the tokenizer's own save_pretrained writes them

The metadata of ``variant.safetensors`` has two entries. ``sha256``, from version 3 on, is the digest of the file: 64
hexadecimal digits in lower case, the SHA-256 of all its bytes with these 64 taken as the digit 0. It is written as
``"sha256":"…"``, without spaces, the first entry, and nowhere else in the file's header. ``poda`` is a JSON object
(:class:`pruning.artifact_header.Layout`) with

``format``, ``version``
    "poda-variant" and 3. A reader takes versions 1, 2 and 3, and refuses every other.
``dtype``
    The dtype the model computes in: float32, bfloat16, float16 or float64.
``parameters``
    Parameters of the model, tied ones counted once, a code as one weight, scales of quantized layers not counted.
``layers``
    For every prunable layer by its module name, how its weights are stored: ``storage``, ``shape`` (out, in) and
    ``zeros``, the number of weights (or codes) whose bits are all zero. From version 2 on also for every tensor that
    holds the weights of all experts, by the name of the parameter: ``shape`` is then (experts, rows, columns) as it is
    stored, and ``storage`` is "dense" or "bitmask". From version 3 on also ``group``, the number of consecutive inputs
    that share a scale where the codes are int4, else null; and ``activations``, whether the layer rounds its inputs to
    the kind of its codes.
``masked``
    For every tensor of which only the kept elements are stored: ``shape``, ``dtype`` and ``kept``, how many they are.
    From version 3 on also ``slots``, the N of N:M or null for a bitmask; and ``transposed``, true for N:M of a tensor
    (in, out), whose elements are then taken in the order of its transpose.
``tied``
    Name of a tensor to the name of the one it shares its storage with, which alone is stored.
``dense``
    From version 2 on, where a variant has fewer parameters than the dense model it comes from, or null: that model's
    ``parameters``, and ``layer_weights``, those of its prunable layers.
``files``
    From version 3 on, the SHA-256 of every other file in the folder itself, by its name, in 64 digits as above.
``about``
    What the writer wanted to say: recipe, identity, specification.

``storage`` says what the weights became and which of them are stored, as in "bitmask+int4":

============  =========  =============  ============  ==========
..            weights    int8           int4          float8
============  =========  =============  ============  ==========
all           dense      int8           int4          float8
in a bitmask  bitmask    bitmask+int8   bitmask+int4  bitmask+float8
N of each 4   n:m        n:m+int8       n:m+int4
============  =========  =============  ============  ==========

Versions 1 and 2 have dense, bitmask, int8 and bitmask+int8. Each layer takes its smallest form in stored bytes; of
equal ones, all before N:M and N:M before the bitmask.

Tensors have the names and the shapes of the model's state dict (a layer of transformers' Conv1D keeps its (in, out)
order), and numbers of more than one byte are little-endian. A quantized layer L has in place of ``L.weight``

``L.codes``
    int8 (out, in); float8 E4M3 (out, in); or int4 in two's complement, from -8 to 7, as bytes (out, in / 2) of which
    each holds two, the code of the even input in the lower half.
``L.scale``
    (out,), or (out, in / group) for int4. Weights are codes × scale, computed in the dtype of the scale.

A tensor T in ``masked`` of n elements is stored as two. Elements are in row-major order; those of int4 codes are the
codes, so that ``shape`` is (out, in) and ``dtype`` "I4". Where ``slots`` is null:

``T.mask``
    n bits in order, the first in the lowest bit of the first byte, in ceil(n / 8) bytes (uint8); a bit is set where
    the element's bit pattern is not all zero. So +0.0 is dropped, and -0.0 is kept as the value it is.
``T.values``
    The kept elements in the same order, in the dtype of T, as many as there are bits set. Codes of int4 are packed two
    to a byte, the first in the lower half, in ceil(kept / 2) bytes (uint8), across the ends of rows.

With N ``slots`` of each 4 the elements are groups of 4 consecutive inputs of a row, and N of every group are kept.
What is not kept has all bits zero; of a group with fewer other elements, zeros are kept to make N.

``T.indices``
    For each kept element its place in its group, 0 to 3, in 2 bits, increasing within the group; four to a byte
    (uint8), the first in the lowest two bits, in ceil(kept / 4) bytes.
``T.values``
    As with a bitmask.

Bits after the last element, code or index are zero. Every other tensor, the tied ones once, is stored as it is. Buffers
that are not in the state dict follow from the configuration. Reading gives tensors equal bit for bit to those written.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pruning.artifact_header import (
    CODE_ELEMENTS,
    FLOATS,
    FORMAT,
    HEADER_KEY,
    OWN_FIELDS,
    VERSION,
    LayerRecord,
    Layout,
    MaskedTensor,
    dense_bytes,
    places_name,
    values_name,
    weight_name,
)
from pruning.errors import InputError
from pruning.headers import TensorEntry, read_safetensors
from pruning.sources import VARIANT


@dataclass(frozen=True)
class StoredSizes:
    """What a variant takes on disk, in bytes, beside what the dense model takes in 16 bits.

    ``pruned_layer_bytes`` counts weights, masks, indices, codes and scales of the prunable layers, and no biases;
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
                f"{path} has {place} {reprlib.repr(first['input'])}, and this Poda reads {FORMAT} versions 1 to "
                f"{VERSION}: use the Poda that wrote it, or make the variant again"
            ) from error
        raise _damaged(path, f"{place or 'its header'}: {first['msg']}") from error
    _check(path, layout, file.tensors)
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
        masked = layout.masked.get(name)
        layer_bytes += tensors[name].bytes if masked is None else masked.stored_bytes
        layer_bytes += tensors[f"{layer}.scale"].bytes if record.codes is not None else 0
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


def whole_tensors(layout: Layout, tensors: Mapping[str, TensorEntry]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type, as safetensors spells it, and shape of every tensor that reading gives, but those that are tied to one."""
    parts = {part for name, record in layout.masked.items() for part in (places_name(name, record), values_name(name))}
    whole = {name: (entry.dtype, entry.shape) for name, entry in tensors.items() if name not in parts}
    for name, record in layout.masked.items():
        packed = record.dtype == "I4"
        whole[name] = ("U8", (record.shape[0], record.shape[1] // 2)) if packed else (record.dtype, record.shape)
    return whole


def _check(path: Path, layout: Layout, tensors: Mapping[str, TensorEntry]) -> None:
    for name, record in layout.masked.items():
        _check_masked(path, name, record, tensors)
    for layer, layer_record in layout.layers.items():
        _check_layer(path, layer, layer_record, layout, tensors)
    for name in layout.masked.keys() - {weight_name(*layer) for layer in layout.layers.items()}:
        raise _damaged(path, f"{name} is stored as the weights of a layer, and is none's")
    whole = whole_tensors(layout, tensors)
    for alias, name in layout.tied.items():
        if name not in whole:
            raise _damaged(path, f"{alias} is tied to {name}, which is missing")
        if alias in whole:
            raise _damaged(path, f"{alias} is tied to {name}, and is stored itself")


def _check_masked(path: Path, name: str, record: MaskedTensor, tensors: Mapping[str, TensorEntry]) -> None:
    places, values = tensors.get(places_name(name, record)), tensors.get(values_name(name))
    kind = "mask" if record.slots is None else "indices"
    if places is None or values is None:
        raise _damaged(path, f"the {kind if places is None else 'values'} of {name} is missing")
    if name in tensors:
        raise _damaged(path, f"{name} is stored twice")
    if (places.dtype, places.shape) != ("U8", (record.places_bytes,)):
        raise _damaged(path, f"the {kind} of {name} does not cover its {record.elements:,} elements")
    packed = record.dtype == "I4"
    stored = ("U8", (dense_bytes(record.kept, "I4"),)) if packed else (record.dtype, (record.kept,))
    if (values.dtype, values.shape) != stored or record.kept > record.elements:
        raise _damaged(path, f"{name} keeps {record.kept:,} values in {record.dtype}, and others are stored")


def _check_layer(
    path: Path, layer: str, record: LayerRecord, layout: Layout, tensors: Mapping[str, TensorEntry]
) -> None:
    name = weight_name(layer, record)
    masked, stored = layout.masked.get(name), tensors.get(name)
    form = "dense" if masked is None else "bitmask" if masked.slots is None else "n:m"
    if form != record.form:
        raise _damaged(path, f"{layer} is stored as {record.storage}, and its tensors are not")
    if masked is None and stored is None:
        raise _damaged(path, f"{name} is missing")
    shape, dtype = _elements(record, masked, stored)
    # A layer of transformers' Conv1D is stored as (in, out).
    turned = record.codes is None and not record.experts
    if shape != record.shape and not (turned and shape == record.shape[::-1]):
        raise _damaged(path, f"{name} is of shape {shape} where {record.shape} was expected")
    if masked is not None and masked.slots is not None and masked.rows != record.shape:
        raise _damaged(path, f"{name} has its groups of inputs in rows of {masked.rows[1]:,}, not {record.shape[1]:,}")
    if dtype not in (FLOATS if record.codes is None else (CODE_ELEMENTS[record.codes],)):
        raise _damaged(path, f"{name} is stored in {dtype}, which is not {record.storage}")
    scale = tensors.get(f"{layer}.scale")
    if record.codes is not None and (scale is None or scale.shape != record.scales or scale.dtype not in FLOATS):
        groups = "" if record.group is None else f" and groups of {record.group:,} inputs"
        raise _damaged(path, f"{layer} has no scale for each of its {record.shape[0]} rows{groups}")
    if masked is None:
        return
    dropped = record.weights - masked.kept
    if record.zeros < dropped or (masked.slots is None and record.zeros != dropped):
        raise _damaged(path, f"{layer} is said to have {record.zeros:,} zeros, and {masked.kept:,} values are stored")


def _elements(
    record: LayerRecord, masked: MaskedTensor | None, stored: TensorEntry | None
) -> tuple[tuple[int, ...], str]:
    """Shape and type of the weights or codes of a layer that is stored in either way, packed ones as they are."""
    if masked is not None:
        return masked.shape, masked.dtype
    assert stored is not None
    if record.codes == "int4" and stored.dtype == "U8" and len(stored.shape) == 2:
        return (stored.shape[0], 2 * stored.shape[1]), "I4"
    return stored.shape, stored.dtype


def _damaged(path: Path, why: str) -> InputError:
    return InputError(f"{path} is damaged or cut short ({why}): make the variant again")
