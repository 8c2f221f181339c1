"""Writes a variant as one GGUF file, which llama.cpp and what is built on it run.

Zeros are stored as any weight and codes are dequantized first: GGUF has no sparse tensors and none of Poda's codes.
"""

import errno
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from pruning.artifact import dequantized_model
from pruning.errors import InputError
from pruning.export.card import title
from pruning.export.files import Export, weights_notes
from pruning.export.gguf_vocabulary import LEVER, add_vocabulary
from pruning.models import load_tokenizer

_KIND = gguf.GGMLQuantizationType
_LARGEST = {_KIND.F16: 65504.0, _KIND.Q8_0: 65504.0 * 127, _KIND.F32: 3.4e38}
"""Numbers beyond it have no place in a kind: of a block of Q8_0 the largest is 127 times a scale in 16 bits."""

_BLOCK = 32
"""Inputs that share a scale in Q8_0."""

_ROUNDED = {
    _KIND.F16: "Matrices are rounded to 16-bit floats (F16) here; vectors stay in 32 bits.",
    _KIND.Q8_0: (
        "Matrices, embeddings among them, are rounded to 8 bits in blocks of 32 inputs (Q8_0) here. What that costs in "
        "quality was not measured."
    ),
}
_UNREAD = (
    "transformers, and so Poda, leaves out scaled positions, and biases of a Llama, when it reads a GGUF file: run "
    "this one with llama.cpp."
)

_ROWS = 1024
"""How many rows of a tensor are turned into bytes at once, so that there is no whole copy of one in 32 bits."""


@dataclass(frozen=True)
class _Family:
    """The architecture llama.cpp runs a class of transformers as.

    ``interleaved`` says whether it takes the rows of each head of query and key in pairs: row 2i is row i of the first
    half, row 2i + 1 row i of the second. ``any_heads`` says whether all heads together may be wider or narrower than
    the model.
    """

    architecture: gguf.MODEL_ARCH
    interleaved: bool
    any_heads: bool = True


_FAMILIES = {
    "LlamaForCausalLM": _Family(gguf.MODEL_ARCH.LLAMA, interleaved=True),
    "MistralForCausalLM": _Family(gguf.MODEL_ARCH.LLAMA, interleaved=True),
    "Qwen2ForCausalLM": _Family(gguf.MODEL_ARCH.QWEN2, interleaved=False, any_heads=False),
    "Qwen3ForCausalLM": _Family(gguf.MODEL_ARCH.QWEN3, interleaved=False),
}


def f16(variant: Path) -> Export:
    """``variant`` with matrices in 16 bits and vectors in 32. Raises InputError where GGUF cannot hold it."""
    return _prepare(variant, _KIND.F16)


def q8_0(variant: Path) -> Export:
    """``variant`` with matrices rounded to 8 bits in blocks of 32 inputs. Raises InputError as :func:`f16` does."""
    return _prepare(variant, _KIND.Q8_0)


def _prepare(variant: Path, kind: gguf.GGMLQuantizationType) -> Export:
    loaded, layout = dequantized_model(variant)
    model: Any = loaded
    family = _FAMILIES.get(type(model).__name__)
    if family is None:
        names = ", ".join(name.removesuffix("ForCausalLM") for name in _FAMILIES)
        raise InputError(f"a {type(model).__name__} is not written as GGUF, only {names}: {LEVER}")
    _check(model.config, family)
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[family.architecture])
    name = title(layout)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if kind == _KIND.F16 else gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_hyperparameters(writer, model.config)
    factors = _add_rope(writer, model, family)
    rows = model.get_input_embeddings().weight.shape[0]
    notes = [_ROUNDED[kind], *weights_notes(layout)]
    notes += add_vocabulary(writer, load_tokenizer(variant), rows, _ends(model))
    tensors = list(_tensors(model, family, kind))
    biased = family.interleaved and any(tensor.name.endswith(".bias") for tensor in tensors)
    if biased or model.config.rope_parameters["rope_type"] != "default":
        notes.append(_UNREAD)
    if factors is not None:
        tensors.append(_Stored("rope_freqs.weight", _KIND.F32, factors))
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, tensor.kind)
    uneven = sum(tensor.values.ndim > 1 and tensor.kind != kind for tensor in tensors)
    if uneven:
        notes.append(f"{uneven} of the matrices have inputs that are no multiple of {_BLOCK}: they are in 16 bits.")
    file = re.sub(r"[^A-Za-z0-9]+", "-", name)[:100].strip("-") or "model"

    def put(folder: Path) -> None:
        _write(writer, tensors, folder / f"{file}-{kind.name}.gguf")

    return Export(sum(tensor.nbytes for tensor in tensors), put, tuple(notes))


@dataclass(frozen=True)
class _Stored:
    """A tensor of the file: ``values`` as the model has them, what they become, and of how many ``heads`` the rows go
    in pairs."""

    name: str
    kind: gguf.GGMLQuantizationType
    values: Tensor
    heads: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def nbytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return self.values.numel() // int(block) * int(size)

    def data(self) -> np.ndarray:
        """Its ``nbytes`` bytes. Raises InputError for numbers that the kind cannot hold."""
        values = self.values if self.heads is None else _in_pairs(self.values, self.heads)
        data, place = np.empty(self.nbytes, np.uint8), 0
        for start in range(0, len(values), _ROWS):
            part = self._converted(values[start : start + _ROWS])
            data[place : place + part.nbytes] = part.reshape(-1).view(np.uint8)
            place += part.nbytes
        return data

    def _converted(self, rows: Tensor) -> np.ndarray:
        numbers = rows.float().numpy()
        if not (np.abs(numbers) <= _LARGEST[self.kind]).all():
            raise InputError(f"{self.name} has numbers that {self.kind.name} in GGUF cannot hold: {LEVER}")
        converted: np.ndarray = gguf.quantize(numbers, self.kind)
        return converted


def _tensors(model: Any, family: _Family, kind: gguf.GGMLQuantizationType) -> Iterator[_Stored]:
    """Every parameter once, tied ones by the name of the first."""
    names = gguf.get_tensor_name_map(family.architecture, model.config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise InputError(f"llama.cpp has no place for {name}: {LEVER}")
        blocks = parameter.ndim > 1 and (kind != _KIND.Q8_0 or parameter.shape[-1] % _BLOCK == 0)
        stored = kind if blocks else _KIND.F16 if parameter.ndim > 1 else _KIND.F32
        rotated = family.interleaved and name.split(".")[-2] in ("q_proj", "k_proj")
        heads = len(parameter) // _head_width(model.config) if rotated else None
        yield _Stored(target, stored, parameter.detach(), heads)


def _in_pairs(rows: Tensor, heads: int) -> Tensor:
    """``rows`` (heads × 2 × half, …) with row i of a head's second half after row i of its first."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def _check(config: Any, family: _Family) -> None:
    """Raise InputError for what llama.cpp does not compute, or otherwise, in these families."""
    heads, width = config.num_attention_heads, _head_width(config)
    if not family.any_heads and heads * width != config.hidden_size:
        raise InputError(
            f"{heads} heads of {width} in a model {config.hidden_size} wide are more or less than llama.cpp runs in "
            f"models of this kind: {LEVER}"
        )
    if config.hidden_act != "silu":
        raise InputError(f"llama.cpp has no {config.hidden_act} in models of this kind: {LEVER}")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        raise InputError(f"attention within a window of {window:,} tokens is not written as GGUF: {LEVER}")


def _add_hyperparameters(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_width(config))
    writer.add_value_length(_head_width(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_rope(writer: gguf.GGUFWriter, model: Any, family: _Family) -> Tensor | None:
    """Add how positions are told, and give what each frequency is divided by (head_dim / 2,) where they differ.

    Raises InputError for a scaling that llama.cpp would do otherwise.
    """
    rope, width = model.config.rope_parameters, _head_width(model.config)
    kind, theta = rope["rope_type"], rope["rope_theta"]
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(theta)
    used = model.model.rotary_emb.inv_freq.double()
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind not in ("default", "llama3") or (kind == "llama3" and family.architecture != gguf.MODEL_ARCH.LLAMA):
        raise InputError(f"positions scaled as {kind!r} are not written as GGUF: {LEVER}")
    if len(used) != width // 2:
        raise InputError(f"positions told by a part of each head are not written as GGUF: {LEVER}")
    plain = theta ** -(torch.arange(0, width, 2).double() / width)
    return (plain / used).float() if kind == "llama3" else None


def _head_width(config: Any) -> int:
    """Rows of query and key in one head: not hidden / heads where heads were removed."""
    width: int | None = getattr(config, "head_dim", None)
    return width or int(config.hidden_size // config.num_attention_heads)


def _ends(model: Any) -> Sequence[int]:
    """The tokens that end a text, by the configuration of generation."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def _write(writer: gguf.GGUFWriter, tensors: Sequence[_Stored], path: Path) -> None:
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor.data())
    except OSError as error:
        if error.errno is not None:
            raise
        # numpy says without a number that fewer bytes were written than there are.
        raise OSError(errno.ENOSPC, str(error)) from error
    finally:
        writer.close()
