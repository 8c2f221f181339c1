"""Compresses the model of one run: on from where it was stopped, and siblings along with it where they share."""

import hashlib
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from app import paths
from app.runs.checkpoints import BLOCKS_NOTE, checkpoint_folder
from app.runs.outcome import PhaseTime
from app.runs.siblings import shares_statistics
from app.runs.spec import RunSpec
from eval.figures import Figure
from pruning.errors import CancelledError, InputError
from pruning.progress import Progress

if TYPE_CHECKING:
    from torch import nn

    from pruning.anatomy import Unpruned
    from pruning.calibration import Windows
    from pruning.checkpoint import Checkpoint
    from pruning.models import LoadedModel
    from pruning.report import Compression, LayerReport
    from pruning.shared import Order

CHECKPOINT_FORMAT = 2
"""Counts up whenever the same recipe no longer gives the same bits as before, or notes are read otherwise."""

log = logging.getLogger("poda")


@dataclass(frozen=True)
class Made:
    """A compressed model, and what the record says of how it was made."""

    model: "nn.Module"
    layers: "tuple[LayerReport, ...]"
    figures: dict[str, Figure]
    provenance: dict[str, Any]
    phase: PhaseTime


def make(
    spec: RunSpec,
    loaded: "LoadedModel",
    windows: "Windows | None",
    siblings: Sequence[RunSpec],
    progress: Progress,
) -> Made:
    """Compress ``loaded`` by the recipe of ``spec``; imports torch.

    Where statistics are shared, blocks of ``siblings`` are made along with it and kept for their own runs. Raises what
    :func:`pruning.compress.compress` raises; what is finished by then is kept for the next attempt.
    """
    from eval.memory import PeakMemory
    from pruning.anatomy import decoder_blocks, unpruned
    from pruning.compress import compress
    from pruning.shared import Order

    total = len(decoder_blocks(loaded.model))
    left = unpruned(loaded.model)
    own = _checkpoint(spec, loaded, windows, total)
    found = sum(own.has(index) for index in range(total))
    with PeakMemory(loaded.device) as memory:
        if shares_statistics(spec) and not own.finished(total):
            orders = [Order(spec.recipe, own), *_orders(siblings, loaded, windows, total)]
            _make_blocks(loaded, orders, windows, progress)
            progress = _standing_still(progress)
        done = compress(loaded.model, spec.recipe, windows, device=loaded.device, checkpoint=own, progress=progress)
    figures = {f"compression_{name}": figure for name, figure in memory.figures().items()}
    return Made(
        model=done.model,
        layers=done.layers,
        figures={"compression_time": Figure(done.seconds, "s"), **figures},
        provenance=_provenance(spec, done, found, left),
        phase=PhaseTime(_own_share(done), total),
    )


def _checkpoint(spec: RunSpec, loaded: "LoadedModel", windows: "Windows | None", total: int) -> "Checkpoint":
    import torch

    from eval.provenance import device_name, library_versions
    from pruning.checkpoint import Checkpoint

    identity, versions = loaded.identity, library_versions()
    decides = {
        "format": CHECKPOINT_FORMAT,
        "run": spec.run_id,
        "model": identity.file_hash or [identity.name, identity.revision],
        "windows": hashlib.sha256(windows.ids.numpy().tobytes()).hexdigest() if windows is not None else None,
        "dtype": str(loaded.dtype),
        "device": device_name(loaded.device),
        "threads": torch.get_num_threads(),
        "versions": {name: versions.get(name) for name in ("torch", "transformers")},
    }
    kept = Checkpoint(checkpoint_folder(spec.run_id), json.dumps(decides, sort_keys=True))
    if kept.note(BLOCKS_NOTE) != total:
        kept.set_note(BLOCKS_NOTE, total)
    return kept


def _orders(siblings: Sequence[RunSpec], loaded: "LoadedModel", windows: "Windows | None", total: int) -> "list[Order]":
    """Those of ``siblings`` that fit the model, as many as the disk has room for; the others say why in their turn."""
    from pruning.shared import Order
    from pruning.walk import check

    each = loaded.identity.prunable_parameters * loaded.dtype.itemsize
    room = _free_bytes() // each - 2  # this run's own blocks, and its variant
    fitting = []
    for one in siblings:
        try:
            check(loaded.model, one.recipe, windows)
        except InputError:
            continue
        fitting.append(one)
    return [Order(one.recipe, _checkpoint(one, loaded, windows, total)) for one in fitting[: max(0, room)]]


def _free_bytes() -> int:
    return shutil.disk_usage(paths.home()).free


def _make_blocks(
    loaded: "LoadedModel", orders: "Sequence[Order]", windows: "Windows | None", progress: Progress
) -> None:
    from pruning.shared import compress_shared

    try:
        compress_shared(loaded.model, orders, windows, device=loaded.device, progress=progress)
        return
    except CancelledError:
        raise
    except Exception:
        if len(orders) == 1:
            raise
        log.warning("the variants could not be made together; this one is made alone", exc_info=True)
    compress_shared(loaded.model, orders[:1], windows, device=loaded.device, progress=progress)


def _standing_still(progress: Progress) -> Progress:
    """Putting finished blocks together must not look as if the work began anew."""

    def report(phase: str, done: int, total: int, unit: str) -> None:
        progress(phase, total if phase == "compressing" else done, total, unit)

    return report


def _own_share(done: "Compression") -> float:
    """Seconds of this variant alone, and its part of what was done once for several."""
    common = done.common_seconds or 0.0
    return done.seconds - common + common / max(done.together or 1, 1)


def _provenance(spec: RunSpec, done: "Compression", found: int, left: "Sequence[Unpruned]") -> dict[str, Any]:
    prune = spec.recipe.prune
    return {
        "allocation": prune.allocation if prune is not None else None,
        "statistics": prune.statistics if prune is not None and spec.recipe.needs_calibration else None,
        "together": done.together,
        "common_seconds": done.common_seconds,
        "blocks_found_finished": found,
        "removed": list(done.removed),
        "note": done.note,
        "unpruned": [asdict(entry) for entry in left],
    }
