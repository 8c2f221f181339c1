"""The header of a variant as validated types, and the names of what is stored for it (specified in artifact_format)."""

import math
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from pruning.quantize import Codes
from pruning.recipe import Frozen

FORMAT = "poda-variant"
VERSION = 3
HEADER_KEY = "poda"
OWN_FIELDS = frozenset({"format", "version", "dtype", "parameters", "layers"})
"""What a header says beside what the writer wanted to say."""

GROUP = 4
"""Inputs in a group of N:M."""

Form = Literal["dense", "n:m", "bitmask"]
Storage = Literal[
    "dense",
    "bitmask",
    "n:m",
    "int8",
    "bitmask+int8",
    "n:m+int8",
    "int4",
    "bitmask+int4",
    "n:m+int4",
    "float8",
    "bitmask+float8",
]
STORAGES: frozenset[str] = frozenset(get_args(Storage))
BEFORE_3 = frozenset({"dense", "bitmask", "int8", "bitmask+int8"})
"""Storages of versions 1 and 2."""

Element = Literal["F64", "F32", "F16", "BF16", "I8", "I4", "F8_E4M3"]
ELEMENT_BITS: dict[Element, int] = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I8": 8, "I4": 4, "F8_E4M3": 8}
CODE_ELEMENTS: dict[Codes, Element] = {"int8": "I8", "int4": "I4", "float8": "F8_E4M3"}
FLOATS = ("F64", "F32", "F16", "BF16")
"""What weights and scales are stored in, as safetensors spells it."""

_SCALED_INPUTS = ("int8", "float8")

Size = Annotated[int, Field(ge=1, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
FileName = Annotated[str, Field(pattern=r"^[^/\\]+$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class MaskedTensor(Frozen):
    """A tensor of which ``kept`` elements are stored, and where they were: in a bitmask, or N:M with ``slots`` a group.

    ``shape`` and ``dtype`` are those of the elements, as safetensors spells them; codes of int4 are of "I4". With
    ``transposed`` the tensor is (in, out), and groups and order are those of its transpose.
    """

    shape: Annotated[tuple[Count, ...], Field(min_length=1, max_length=3)]
    dtype: Element
    kept: Count
    slots: Literal[1, 2, 3] | None = None
    transposed: bool = False

    @model_validator(mode="after")
    def _has_whole_groups(self) -> Self:
        if self.slots is None:
            if self.transposed:
                raise ValueError("a bitmask follows the order of its tensor")
            return self
        if len(self.shape) != 2 or self.rows[1] % GROUP:
            raise ValueError(f"{self.shape} has no groups of {GROUP} inputs")
        if self.kept != self.elements // GROUP * self.slots:
            raise ValueError(f"{self.slots} of {GROUP} are not {self.kept:,} of {self.elements:,} elements")
        return self

    @property
    def elements(self) -> int:
        """How many elements the whole tensor has."""
        return math.prod(self.shape)

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape in which elements are in order: (out, in) for N:M."""
        return self.shape[::-1] if self.transposed else self.shape

    @property
    def places_bytes(self) -> int:
        """Bytes of the bitmask, or of the indices."""
        return -(-self.elements // 8) if self.slots is None else -(-self.kept * 2 // 8)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all that is stored for it."""
        return self.places_bytes + dense_bytes(self.kept, self.dtype)


class LayerRecord(Frozen):
    """How a prunable layer of ``shape`` (out, in) is stored, and how many of its weights are zero.

    ``group`` is the number of consecutive inputs that share a scale, None where a row has one or none; ``activations``
    says whether inputs are rounded too. All experts that are kept in one tensor are one record, of ``shape`` (experts,
    rows, columns) as stored.
    """

    storage: Storage
    shape: tuple[Size, Size] | tuple[Size, Size, Size]
    zeros: Count
    group: Size | None = None
    activations: bool = False

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Self:
        if self.experts and self.storage not in ("dense", "bitmask"):
            raise ValueError(f"experts in one tensor are not stored as {self.storage}")
        if self.zeros > self.weights:
            raise ValueError(f"{self.zeros:,} of {self.weights:,} weights cannot be zero")
        if (self.group is not None) != (self.codes == "int4"):
            raise ValueError(f"{self.storage} has {'a' if self.codes == 'int4' else 'no'} group of inputs for a scale")
        if self.group is not None and (self.shape[1] % self.group or self.shape[1] % 2):
            raise ValueError(f"a group of {self.group:,} does not divide {self.shape[1]:,} inputs, packed two a byte")
        if self.activations and self.codes not in _SCALED_INPUTS:
            raise ValueError(f"inputs are not rounded beside {self.storage}")
        return self

    @property
    def experts(self) -> bool:
        """Whether it is one tensor that holds the weights of all experts."""
        return len(self.shape) == 3

    @property
    def form(self) -> Form:
        """Whether all of its weights or codes are stored, or some of them and where they were."""
        return "bitmask" if self.storage.startswith("bitmask") else "n:m" if self.storage.startswith("n:m") else "dense"

    @property
    def codes(self) -> Codes | None:
        """What its weights became; None where they are what they were."""
        return next((codes for codes in CODE_ELEMENTS if self.storage.endswith(codes)), None)

    @property
    def weights(self) -> int:
        """How many weights it has."""
        return math.prod(self.shape)

    @property
    def scales(self) -> tuple[int, ...]:
        """The shape of its scales where it is quantized."""
        return self.shape[:1] if self.group is None else (self.shape[0], self.shape[1] // self.group)


class DenseModel(Frozen):
    """How many parameters the dense model has, tied ones counted once, and how many weights its prunable layers."""

    parameters: Size
    layer_weights: Size


class Layout(Frozen):
    """The header of a variant."""

    format: Literal["poda-variant"] = "poda-variant"
    version: Literal[1, 2, 3] = 3
    dtype: Literal["float64", "float32", "bfloat16", "float16"]
    parameters: Size
    layers: dict[str, LayerRecord] = Field(min_length=1)
    masked: dict[str, MaskedTensor] = Field(default_factory=dict)
    tied: dict[str, str] = Field(default_factory=dict)
    dense: DenseModel | None = None
    files: dict[FileName, Digest] = Field(default_factory=dict)
    about: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_of_its_version(self) -> Self:
        layers = self.layers.values()
        if self.version == 1 and (self.dense is not None or any(record.experts for record in layers)):
            raise ValueError("version 1 has no experts in one tensor and no dense model")
        newer = {record.storage for record in layers} - BEFORE_3
        if self.version < 3 and (newer or self.files or any(record.activations for record in layers)):
            raise ValueError(f"version {self.version} has no {min(newer, default='digests and no rounded inputs')}")
        return self


def weight_name(layer: str, record: LayerRecord) -> str:
    """The tensor that holds the weights of ``layer``: its codes where it is quantized."""
    if record.experts:
        return layer
    return f"{layer}.codes" if record.codes is not None else f"{layer}.weight"


def places_name(tensor: str, record: MaskedTensor) -> str:
    """Where it is stored which elements of ``tensor`` are kept."""
    return f"{tensor}.mask" if record.slots is None else f"{tensor}.indices"


def values_name(tensor: str) -> str:
    """Where the kept values of ``tensor`` are stored."""
    return f"{tensor}.values"


def dense_bytes(elements: int, dtype: Element) -> int:
    """Bytes of so many elements one after the other."""
    return -(-elements * ELEMENT_BITS[dtype] // 8)
