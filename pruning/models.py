"""Loads a model, wherever it comes from, into one result type: model, tokenizer and identity."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from pruning.anatomy import prunable_layers
from pruning.configs import read_config
from pruning.device import choose_device, choose_dtype
from pruning.errors import InputError
from pruning.hub import download
from pruning.progress import Progress, silent
from pruning.reading import reading
from pruning.sources import (
    ModelReference,
    check_folder,
    content_hash,
    gguf_note,
    source_file,
    title_of,
    weight_files,
)

__all__ = ["LoadedModel", "ModelIdentity", "choose_device", "choose_dtype", "load_model", "load_tokenizer"]

PHASE = "loading"


@dataclass(frozen=True)
class ModelIdentity:
    """Which model it was, to the bit.

    ``revision`` is a commit of the hub, ``file_hash`` the SHA-256 of a file or folder. ``parameters`` counts tied
    weights once. ``source_bytes`` is what the person started from on disk.
    """

    name: str
    kind: str
    revision: str | None
    file_hash: str | None
    architecture: str
    parameters: int
    prunable_parameters: int
    source_file: str
    source_bytes: int
    note: str | None


@dataclass
class LoadedModel:
    """A model in eval mode, without gradients, and the ``device`` it is to compute on."""

    model: nn.Module
    tokenizer: Any
    identity: ModelIdentity
    device: torch.device
    dtype: torch.dtype
    dtype_reason: str


def load_model(
    reference: ModelReference,
    *,
    device: str,
    dtype: str,
    cache: Path,
    resident: bool = True,
    progress: Progress = silent,
) -> LoadedModel:
    """Load ``reference`` on ``device`` in ``dtype`` (both may be "auto").

    What is not ``resident`` stays in the host's memory, for work that takes it to the device block by block.

    Bundled and GGUF models are converted once into a folder under ``cache``. Only the hub uses the network, and no
    code that comes with a model is run. Raises InputError for what cannot be loaded, RunError for a full disk or too
    little memory.
    """
    place = choose_device(device)
    number_format, reason = choose_dtype(dtype, place)
    folder = _folder(reference, cache, progress)
    try:
        model = _load(folder, str(reference), number_format)
    except InputError:
        if reference.kind not in ("bundled", "gguf"):
            raise
        # The copy in the cache is damaged in a way its header does not tell: make it again.
        from pruning.gguf_convert import discard

        discard(folder)
        folder = _folder(reference, cache, progress)
        model = _load(folder, str(reference), number_format)
    if resident:
        with reading(str(reference), "choose another --device"):
            model = model.to(place)
    tokenizer = load_tokenizer(folder)
    progress(PHASE, 1, 1, "models")
    files = weight_files(folder)
    file = source_file(reference)
    in_one_file = file is not None and file.is_file()
    identity = ModelIdentity(
        name=title_of(reference),
        kind=reference.kind,
        revision=_commit(folder) if reference.kind == "hub" else None,
        file_hash=content_hash(reference),
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        prunable_parameters=sum(layer.weight().numel() for layer in prunable_layers(model)),
        source_file=file.name if file is not None and in_one_file else ", ".join(part.name for part in files),
        source_bytes=sum(part.stat().st_size for part in ([file] if file is not None and in_one_file else files)),
        note=gguf_note(file) if file is not None and in_one_file else None,
    )
    return LoadedModel(model, tokenizer, identity, place, number_format, reason)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in ``folder``. Raises InputError when there is none that transformers can read."""
    with reading(f"the tokenizer in {folder}", "add the model's tokenizer.json and tokenizer_config.json to it"):
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def _folder(reference: ModelReference, cache: Path, progress: Progress) -> Path:
    if reference.kind == "hub":
        folder = download(reference, progress)
        check_folder(folder)
        return folder
    path = source_file(reference)
    assert path is not None
    if reference.kind == "folder":
        check_folder(path)
        return path
    from pruning.gguf_convert import converted

    file_hash = content_hash(reference)
    assert file_hash is not None
    return converted(path, file_hash, cache, progress)


def _load(folder: Path, name: str, dtype: torch.dtype) -> nn.Module:
    transformers_logging.disable_progress_bar()
    # What it would print of missing weights is raised below.
    transformers_logging.set_verbosity_error()
    with reading(name, "check its files, or get the model again"):
        config = read_config(folder)
        if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise InputError(f"{name} is a {config.model_type} and no causal language model: choose one that is")
        model, report = AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            # So that they are in the report, by which they are refused.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    wrong = sorted(report["missing_keys"]) + sorted(key[0] for key in report["mismatched_keys"])
    if wrong:
        raise InputError(
            f"{name} does not hold the weights its config.json asks for: {len(wrong)} are missing or of another shape, "
            f"such as {wrong[0]}; get the model again"
        )
    loaded: nn.Module = model.eval().requires_grad_(False)
    return loaded


def _commit(folder: Path) -> str | None:
    """The commit of a folder in the hub's cache, which is named after it."""
    return folder.name if folder.parent.name == "snapshots" else None
