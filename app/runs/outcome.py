"""What a finished run hands to the store, and the flat row that pages compare runs by."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.runs.spec import CalibrationSpec, EvaluationSpec, RunSpec
from eval.figures import Figure
from pruning.allocation import UNIFORM

SEQUENTIAL = "sequential"


@dataclass(frozen=True)
class PhaseTime:
    """A phase took ``seconds`` for ``total`` units of work."""

    seconds: float
    total: int


@dataclass(frozen=True)
class Outcome:
    """A variant that was made, saved, loaded back and measured.

    ``provenance`` holds at least ``model`` (name, revision, file_hash), ``evaluation`` (text_sha256, windows,
    length), ``dtype``, ``device_name``, ``host`` and ``versions``; ``compression``, where something was compressed,
    says among others how many variants were made ``together`` and what of the time was common to them
    (``common_seconds``). ``phases`` are those whose time is not what went by, such as work done for several runs at
    once. ``sizes`` holds ``dense16_bytes``, ``dense16_pruned_layer_bytes``, ``source_bytes``, ``source_name`` and
    ``parameters``; sizes are in bytes.
    """

    figures: Mapping[str, Figure]
    provenance: Mapping[str, Any]
    collapsed: bool
    sizes: Mapping[str, Any]
    layers: Sequence[Mapping[str, Any]]
    runtime: str
    artifact_bytes: int
    phases: Mapping[str, PhaseTime] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """JSON-ready: the part of a run's record that the run itself found out."""
        found = {
            "figures": {name: figure.as_dict() for name, figure in self.figures.items()},
            "provenance": dict(self.provenance),
            "collapsed": self.collapsed,
            "sizes": dict(self.sizes),
            "layers": [dict(layer) for layer in self.layers],
        }
        return {name: _finite(value) for name, value in found.items()}


def flat_row(spec: RunSpec, outcome: Outcome) -> dict[str, Any]:
    """The columns of the results table, all but the key."""
    prune, quantize = spec.recipe.prune, spec.recipe.quantize
    provenance, sizes = outcome.provenance, outcome.sizes
    compression = provenance.get("compression") or {}
    return {
        "model": provenance["model"]["name"],
        "method": prune.method if prune is not None else "none",
        "sparsity_asked": prune.sparsity if prune is not None else 0.0,
        "pattern": str(prune.pattern) if prune is not None and prune.pattern is not None else "",
        "allocation": prune.allocation if prune is not None else UNIFORM,
        "statistics": prune.statistics if prune is not None else SEQUENTIAL,
        "made_together": compression.get("together"),
        "common_seconds": compression.get("common_seconds"),
        "quantize": quantize.scheme if quantize is not None else "none",
        "quantize_group": quantize.group if quantize is not None else None,
        "dtype": provenance["dtype"],
        "device": provenance["device_name"],
        "evaluation": describe_windows(spec.evaluation),
        "calibration": describe_windows(spec.calibration) if spec.calibration is not None else "",
        "protocol": protocol(provenance),
        "machine": provenance["host"],
        "runtime": outcome.runtime,
        "dense16_bytes": sizes.get("dense16_bytes"),
        "dense16_pruned_layer_bytes": sizes.get("dense16_pruned_layer_bytes"),
        "source_bytes": sizes.get("source_bytes"),
        "source_name": sizes.get("source_name"),
        "parameters": sizes.get("parameters"),
        "versions": json.dumps(provenance["versions"], sort_keys=True),
    }


def protocol(provenance: Mapping[str, Any]) -> str:
    """Twelve digits that two runs share only where their figures may be compared.

    Model by content, evaluation text by content, windows, dtype, device and library versions.
    """
    model, evaluation = provenance["model"], provenance["evaluation"]
    fields = [
        model.get("file_hash") or [model["name"], model.get("revision")],
        [evaluation.get("text_sha256"), evaluation.get("windows"), evaluation.get("length")],
        [provenance["dtype"], provenance["device_name"], provenance["versions"]],
    ]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


def describe_windows(text: CalibrationSpec | EvaluationSpec) -> str:
    """``"articles, 16 × 512 tokens"``."""
    source = text.source.replace("\\", "/").rsplit("/", 1)[-1] if text.text_hash is not None else text.source
    return f"{source}, {text.windows} × {text.length} tokens"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value
