"""Reads what safetensors and GGUF files say of their tensors, from their headers alone and without torch."""

import json
import math
import mmap
import reprlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pruning.errors import InputError

GGUF_MAGIC = b"GGUF"
HEADER_LIMIT = 100_000_000
"""The safetensors format allows no header longer than this."""

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}

_TOO_MANY = 2**63
"""Elements that no tensor of torch's can have."""

_DIMENSIONS = 32

_GGUF_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_GGUF_STRING = 8
_GGUF_ARRAY = 9


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: its dtype as the file spells it, its shape, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FileHeader:
    """The tensors of a file by name, and what else the file says of itself."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, Any]


def read_safetensors(path: Path) -> FileHeader:
    """The header of a safetensors file, checked against its length.

    Raises InputError for one that is cut short, that no safetensors writer could have made, or that is not there.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little") if len(start) == 8 else -1
            if not 2 <= length <= min(HEADER_LIMIT, size - 8):
                raise _damaged(path, f"its header would be {max(length, 0):,} bytes of a file of {size:,}")
            parsed = json.loads(file.read(length).decode())
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): check that the file is there") from error
    except InputError:
        raise
    # ValueError is for text that is no JSON and for numbers of more digits than Python reads.
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "its header is no JSON") from error
    if not isinstance(parsed, dict):
        raise _damaged(path, "its header is no JSON object")
    metadata = parsed.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise _damaged(path, "its metadata is no JSON object")
    data_bytes = size - 8 - length
    tensors: dict[str, TensorEntry] = {}
    reached = 0
    for name, entry in sorted(parsed.items(), key=lambda item: _offsets(path, *item)):
        first, last = _offsets(path, name, entry)
        tensors[name] = _entry(path, name, entry, last - first)
        if first != reached:
            raise _damaged(path, f"tensor {name} does not begin where the one before it ends")
        reached = last
    if reached != data_bytes:
        raise _damaged(path, f"it holds {data_bytes:,} bytes of tensors where its header lists {reached:,}")
    return FileHeader(tensors, metadata)


def read_gguf(path: Path) -> FileHeader:
    """The header of a GGUF file: single values and strings as metadata, and the tensors.

    Lists (the tokens of the vocabulary) are skipped. Shapes have the order of torch, rows first. ``bytes`` are the
    distance to the next tensor. Raises InputError for a file that is not GGUF or cut short. Format:
    https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != GGUF_MAGIC:
                raise InputError(f"{path} is no GGUF file: it does not begin with the letters GGUF")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse_gguf(path, data)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): check that the file is there") from error
    except (struct.error, UnicodeDecodeError, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is damaged or cut short: get the GGUF file again") from error


def _parse_gguf(path: Path, data: mmap.mmap) -> FileHeader:
    version, tensor_count, value_count = struct.unpack_from("<IQQ", data, 4)
    if version not in (2, 3):
        raise InputError(f"{path} is GGUF of version {version}, and versions 2 and 3 are read: convert it again")
    place = 24
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key, place = _string(data, place)
        (kind,) = struct.unpack_from("<I", data, place)
        value, place = _value(data, place + 4, kind)
        if value is not None:
            metadata[key.decode()] = value
    found: list[tuple[str, int, tuple[int, ...], int]] = []
    for _ in range(tensor_count):
        name, place = _string(data, place)
        (dimensions,) = struct.unpack_from("<I", data, place)
        shape = struct.unpack_from(f"<{dimensions}Q", data, place + 4)
        kind, offset = struct.unpack_from("<IQ", data, place + 4 + 8 * dimensions)
        place += 4 + 8 * dimensions + 12
        found.append((name.decode(), kind, shape[::-1], offset))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"alignment of {alignment} bytes")
    begin = -(-place // alignment) * alignment
    found.sort(key=lambda item: item[3])
    ends = [offset for _, _, _, offset in found[1:]]
    tensors: dict[str, TensorEntry] = {}
    for (tensor, kind, shape, offset), end in zip(found, [*ends, len(data) - begin], strict=True):
        if end <= offset:
            raise InputError(f"{path} is cut short: it ends before its tensor {tensor}; get the GGUF file again")
        tensors[tensor] = TensorEntry(str(kind), shape, end - offset)
    return FileHeader(tensors, metadata)


def _string(data: mmap.mmap, place: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from("<Q", data, place)
    end = place + 8 + length
    if end > len(data):
        raise ValueError("a string ends after the file")
    return data[place + 8 : end], end


def _value(data: mmap.mmap, place: int, kind: int) -> tuple[Any, int]:
    if kind == _GGUF_STRING:
        text, place = _string(data, place)
        return text.decode(errors="replace"), place
    if kind != _GGUF_ARRAY:
        form = _scalar(kind)
        return struct.unpack_from(form, data, place)[0], place + struct.calcsize(form)
    item, count = struct.unpack_from("<IQ", data, place)
    place += 12
    if item == _GGUF_STRING:
        unpack, limit = struct.Struct("<Q").unpack_from, len(data)
        for _ in range(count):
            place += 8 + unpack(data, place)[0]
            if place > limit:
                raise ValueError("a list ends after the file")
        return None, place
    if item == _GGUF_ARRAY:
        for _ in range(count):
            _, place = _value(data, place, item)
        return None, place
    return None, place + count * struct.calcsize(_scalar(item))


def _scalar(kind: int) -> str:
    if kind not in _GGUF_SCALARS:
        raise ValueError(f"unknown kind of value {kind}")
    return _GGUF_SCALARS[kind]


def _offsets(path: Path, name: str, entry: Any) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or [type(offset) for offset in offsets] != [int, int]:
        raise _damaged(path, f"tensor {name} has no place in it")
    first, last = offsets
    if not 0 <= first <= last:
        raise _damaged(path, f"tensor {name} ends before it begins")
    if last >= _TOO_MANY:
        raise _damaged(path, f"tensor {name} ends after every file")
    return first, last


def _entry(path: Path, name: str, entry: dict[str, Any], extent: int) -> TensorEntry:
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _damaged(path, f"tensor {name} is of an unknown type {reprlib.repr(dtype)}")
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < _TOO_MANY for size in shape):
        raise _damaged(path, f"tensor {name} has no shape")
    if len(shape) > _DIMENSIONS or math.prod(size for size in shape if size) >= _TOO_MANY:
        raise _damaged(path, f"tensor {name} is of a shape that no tensor has")
    found = TensorEntry(dtype, tuple(shape), extent)
    if found.elements * ITEM_BYTES[dtype] != extent:
        raise _damaged(path, f"tensor {name} of shape {found.shape} in {dtype} does not take {extent:,} bytes")
    return found


def _damaged(path: Path, why: str) -> InputError:
    return InputError(f"{path} is damaged or cut short: {why}. Get or make it again")
