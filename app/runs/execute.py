"""The job: load a model, compress it, save it, load back what was saved, and measure that."""

import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app import paths
from app.runs.combinations import against_storing, is_structured
from app.runs.outcome import Outcome
from app.runs.queue import folder_bytes
from app.runs.spec import RunSpec
from app.runs.sweep import reference_of
from eval.figures import Figure
from pruning.errors import InputError
from pruning.progress import Progress
from pruning.recipe import Recipe
from pruning.sources import ModelReference
from pruning.texts import load_text, text_identity

if TYPE_CHECKING:
    from pruning.calibration import Windows
    from pruning.models import LoadedModel


def execute(spec: RunSpec, folder: Path, progress: Progress, siblings: Sequence[RunSpec] = ()) -> Outcome:
    """Make the variant of ``spec`` in ``folder`` and measure what is there.

    What was finished of it by an attempt before, or along with another run of the same statistics, is taken up;
    blocks of ``siblings`` may be made along with it. Imports torch. Raises InputError for what cannot be done, RunError
    for what went wrong while doing it, and lets through what ``progress`` raises.
    """
    reference = reference_of(spec)
    _use_network(_needs_network(spec, reference))
    progress("loading", 0, 1, "models")

    import torch

    from app.runs.compressing import make
    from eval.measure import measure
    from pruning.artifact import save_artifact
    from pruning.device import choose_device
    from pruning.models import load_model
    from pruning.runtime import load_variant

    place = choose_device(spec.device)
    against = against_storing(spec.recipe.prune, spec.recipe.quantize, place.type, ())
    if against is not None:
        raise InputError(against)
    seed = _seed(spec)
    torch.manual_seed(seed)
    loaded = load_model(
        reference,
        device=spec.device,
        dtype=spec.dtype,
        cache=paths.model_cache(),
        # Blocks are taken to the device one by one, each in its turn.
        resident=False,
        progress=progress,
    )
    if spec.model_hash is not None and loaded.identity.file_hash != spec.model_hash:
        raise InputError(f"{spec.model} has changed since this run was asked for: ask for it anew")
    calibration, evaluation = _windows(spec, loaded)
    made = make(spec, loaded, calibration, siblings, progress) if spec.recipe != Recipe() else None
    if made is not None:
        loaded.model = made.model
    progress("saving", 0, 1, "variants")
    header: dict[str, Any] = {
        "recipe": str(spec.recipe),
        "spec": spec.model_dump(mode="json"),
        "identity": asdict(loaded.identity),
    }
    whole = (loaded.identity.parameters, loaded.identity.prunable_parameters)
    save_artifact(loaded.model, loaded.tokenizer, folder, header, dense=whole if is_structured(spec.recipe) else None)
    layers = [asdict(layer) for layer in made.layers] if made is not None else []
    compression = made.provenance if made is not None else None
    figures = made.figures if made is not None else {"compression_time": Figure(0.0, "s")}
    phases = {"compressing": made.phase} if made is not None else {}
    identity, device, reason = loaded.identity, loaded.device, loaded.dtype_reason
    # What is measured is what was saved: the model it came from must not be in memory beside it.
    del loaded, made
    _free_memory()
    variant = load_variant(folder, device=device)
    progress("saving", 1, 1, "variants")
    measurement = measure(variant, evaluation, progress=progress)
    sizes, runtime = variant.sizes, variant.runtime
    del variant
    _free_memory()
    provenance = {
        **measurement.provenance,
        "model": {**asdict(identity), "kind": "language model", "source_kind": identity.kind},
        "calibration": calibration.provenance if calibration is not None else None,
        "compression": compression,
        "dtype_reason": reason,
        "seed": seed,
        "host": socket.gethostname(),
    }
    return Outcome(
        figures={**measurement.figures, **figures},
        provenance=provenance,
        collapsed=measurement.collapsed,
        sizes={**asdict(sizes), "source_bytes": identity.source_bytes, "source_name": identity.source_file},
        layers=layers,
        runtime=runtime,
        artifact_bytes=folder_bytes(folder),
        phases=phases,
    )


def _seed(spec: RunSpec) -> int:
    """Of the calibration windows, or of a method that draws numbers and looks at no text."""
    if spec.calibration is not None:
        return spec.calibration.seed
    return spec.recipe.prune.seed if spec.recipe.prune is not None else 0


def _windows(spec: RunSpec, loaded: "LoadedModel") -> "tuple[Windows | None, Windows]":
    """Calibration and evaluation windows. Raises InputError when they are too long, or their text has changed."""
    from pruning.calibration import calibration_windows, evaluation_windows

    longest = getattr(loaded.model.config, "max_position_embeddings", None)
    for text, option in ((spec.calibration, "calibration"), (spec.evaluation, "evaluation")):
        if text is not None and isinstance(longest, int) and text.length > longest:
            raise InputError(
                f"{loaded.identity.name} reads at most {longest} tokens at once: lower the {option} length "
                f"of {text.length}"
            )
        if text is not None and text.text_hash is not None and text_identity(text.source) != text.text_hash:
            raise InputError(f"{text.source} has changed since this run was asked for: ask for it anew")
    evaluated = spec.evaluation
    evaluation = evaluation_windows(
        loaded.tokenizer, load_text(evaluated.source, "evaluation"), evaluated.windows, evaluated.length
    )
    if spec.calibration is None:
        return None, evaluation
    asked = spec.calibration
    calibration = calibration_windows(
        loaded.tokenizer, load_text(asked.source, "calibration"), asked.windows, asked.length, asked.seed
    )
    return calibration, evaluation


def _needs_network(spec: RunSpec, reference: ModelReference) -> bool:
    texts = [text for text in (spec.calibration, spec.evaluation) if text is not None]
    named = any(text.text_hash is None and text.source != "articles" for text in texts)
    return reference.kind == "hub" or named


def _use_network(wanted: bool) -> None:
    """Keep the hub's libraries from calling home where nothing has to come from there.

    They read HF_HUB_OFFLINE once, when they are imported; a worker goes on to other models afterwards. A person who
    set it keeps the network off.
    """
    from huggingface_hub import constants

    offline = _offline_by_choice() or not wanted
    constants.HF_HUB_OFFLINE = offline
    if "datasets.config" in sys.modules:
        sys.modules["datasets.config"].HF_HUB_OFFLINE = offline  # type: ignore[attr-defined]  # read at its import


@cache
def _offline_by_choice() -> bool:
    """What the environment says: asked first before :func:`_use_network` changes anything."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _free_memory() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
