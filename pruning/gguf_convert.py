"""Turns a GGUF file into a plain transformers folder, once, so that it loads as fast as any other model."""

import copy
import functools
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, modeling_gguf_pytorch_utils
from transformers.utils import logging as transformers_logging

from pruning.disk import new_folder
from pruning.errors import InputError
from pruning.headers import read_gguf, read_safetensors
from pruning.progress import Progress, silent
from pruning.reading import reading
from pruning.sources import WEIGHTS, check_config, read_json

PHASE = "converting"
LAYOUT = 1
"""Raised when what is written changes, so that older copies are made again."""

_MAKER = f"layout {LAYOUT}, transformers {transformers.__version__}"
_ARRAY = gguf.GGUFValueType.ARRAY


def converted(path: Path, file_hash: str, cache: Path, progress: Progress = silent) -> Path:
    """The folder under ``cache`` that holds ``path`` (of SHA-256 ``file_hash``) in the transformers layout.

    It is made when it is missing, damaged, or from another version of transformers. Raises InputError for a file that
    transformers cannot read, RunError when the disk is full.
    """
    folder = cache / f"gguf-{file_hash[:16]}"
    if not _is_whole(folder):
        _convert(path, folder, progress)
    return folder


def discard(folder: Path) -> None:
    """Mark a converted copy as damaged, so that it is made again."""
    (folder / WEIGHTS).unlink(missing_ok=True)


def _is_whole(folder: Path) -> bool:
    try:
        check_config(read_json(folder / "config.json"), str(folder))
        return read_safetensors(folder / WEIGHTS).metadata.get("maker") == _MAKER and any(folder.glob("tokenizer*"))
    except InputError:
        return False


def _convert(path: Path, folder: Path, progress: Progress) -> None:
    transformers_logging.disable_progress_bar()
    header = read_gguf(path)
    elements = sum(tensor.elements for tensor in header.tensors.values())
    with new_folder(folder, 4 * elements, f"{path.name} converted to safetensors") as temporary:
        next_step = (
            "it is damaged, or of a kind that transformers does not read from GGUF; get the file again, or give the "
            "model as a folder"
        )
        with reading(str(path), next_step), _read_once(progress, elements):
            model, report = AutoModelForCausalLM.from_pretrained(
                str(path.parent),
                gguf_file=path.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
        if report["missing_keys"]:
            missing = ", ".join(sorted(report["missing_keys"])[:3])
            raise InputError(f"{path} lacks weights its model needs ({missing}): get the file again")
        model.config.name_or_path = ""
        model.config.save_pretrained(temporary)
        model.generation_config.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        save_file(_compact(model.state_dict()), temporary / WEIGHTS, {"format": "pt", "maker": _MAKER})


def _compact(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share storage once, and each in 16 bits where that loses nothing."""
    unique: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if unique.setdefault(tensor.data_ptr(), name) == name:
            tensors[name] = _narrowest(tensor.contiguous())
    return tensors


def _narrowest(tensor: Tensor) -> Tensor:
    for dtype in (torch.bfloat16, torch.float16):
        start = tensor.flatten()[:4096]
        if torch.equal(start.to(dtype).float(), start) and torch.equal(tensor.to(dtype).float(), tensor):
            return tensor.to(dtype)
    return tensor


@contextmanager
def _read_once(progress: Progress, elements: int) -> Iterator[None]:
    """Let transformers convert with the same results in a third of the time, and tell how far it is.

    It parses the file four times, with a view into the file for every token, and works out the table of tensor names
    anew for every submodule. Should its internals change, these replacements are not called, and it is merely slower.
    """
    load = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    parsed = functools.cache(load)

    def load_once(*arguments: Any, **options: Any) -> dict[str, Any]:
        if len(arguments) != 1 or options not in ({}, {"return_tensors": False}):
            anew: dict[str, Any] = load(*arguments, **options)
            return anew
        result = parsed(str(arguments[0]))
        # Callers change the configuration they get.
        return {**result, "config": copy.deepcopy(result["config"])}

    done = 0
    dequantize: Callable[..., Any] = gguf.dequantize

    def counted(data: Any, kind: Any) -> Any:
        nonlocal done
        values = dequantize(data, kind)
        done += values.size
        progress(PHASE, min(done, elements), elements, "weights")
        return values

    progress(PHASE, 0, elements, "weights")
    with ExitStack() as stack:
        stack.enter_context(_replaced(gguf, "GGUFReader", functools.cache(_Reader)))
        stack.enter_context(_replaced(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)))
        stack.enter_context(_replaced(gguf, "dequantize", counted))
        stack.enter_context(_replaced(modeling_gguf_pytorch_utils, "load_gguf_checkpoint", load_once))
        stack.enter_context(_replaced(modeling_gguf_pytorch_utils, "tqdm", lambda items, **_: items))
        yield
    progress(PHASE, elements, elements, "weights")


@contextmanager
def _replaced(module: ModuleType, name: str, replacement: object) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)


class _Reader(gguf.GGUFReader):
    """Reads lists, such as the tokens of a vocabulary, straight from the bytes."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != _ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        head = [self._get(orig_offs, "uint32"), self._get(orig_offs + 4, "uint64")]
        kind, count, place = gguf.GGUFValueType(int(head[0][0])), int(head[1][0]), orig_offs + 12
        items: list[Any] = []
        if kind == gguf.GGUFValueType.STRING:
            unpack = struct.Struct("=Q").unpack_from
            for _ in range(count):
                end = place + 8 + unpack(self.data, place)[0]
                items.append(self.data[place + 8 : end].tobytes())
                place = end
        elif kind in self.gguf_scalar_to_np:
            numbers = self._get(place, self.gguf_scalar_to_np[kind], count)
            items = list(numbers.view(np.ndarray).reshape(count, 1))
            place += numbers.nbytes
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        return place - orig_offs, [*head, *items], list(range(2, 2 + count)), [_ARRAY, kind][: 2 if count else 1]
