"""What a sweep will make, before it starts: how many variants, how many bytes, how long."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from app.runs.spec import RunSpec
from app.wording import counted, duration, size
from pruning.quantize import SCHEMES
from pruning.recipe import Recipe

_BYTES_PER_WEIGHT = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
# One bit for each weight says which are kept.
_MASK = 1 / 8


@dataclass(frozen=True)
class Estimate:
    """``to_make`` variants of ``asked`` are not there yet; ``dense_added`` when the dense model is one more.

    ``bytes_on_disk`` and ``seconds`` are None where nothing tells; ``seconds`` covers the whole sweep.
    """

    asked: int
    to_make: int
    dense_added: bool
    bytes_on_disk: float | None
    seconds: float | None


@dataclass(frozen=True)
class ModelSize:
    """Parameters of a model, and how many of them are in layers that can be pruned, None while nobody knows.

    ``auto`` is the bytes of one weight when the device chooses.
    """

    parameters: int
    prunable: int | None = None
    auto: float = 2.0

    @classmethod
    def known(cls, parameters: int | None, title: str, results: pd.DataFrame) -> "ModelSize | None":
        """From an earlier result of the model where there is one, else from its card."""
        earlier = results[results["model"] == title].dropna(subset=["parameters", "dense16_pruned_layer_bytes"])
        if not earlier.empty:
            row = earlier.iloc[0]
            auto = _BYTES_PER_WEIGHT.get(str(row["dtype"]), 2.0)
            return cls(int(row["parameters"]), int(row["dense16_pruned_layer_bytes"] / 2), auto)
        return cls(parameters) if parameters else None


def estimate(
    specs: Sequence[RunSpec],
    there: Collection[str],
    model: ModelSize | None,
    expected: Callable[[RunSpec], Mapping[str, float | None]],
) -> Estimate:
    """Sum up ``specs``; ``there`` are ids of runs finished or on their way, ``expected`` the seconds of each phase."""
    asked = {spec.run_id: spec for spec in specs}
    dense = [spec.dense() for spec in asked.values()]
    added = {spec.run_id: spec for spec in dense if spec.run_id not in asked and spec.run_id not in there}
    missing = [*added.values(), *(spec for run_id, spec in asked.items() if run_id not in there)]
    phases = [seconds for spec in missing for seconds in expected(spec).values()]
    known = [seconds for seconds in phases if seconds is not None]
    return Estimate(
        asked=len(asked),
        to_make=len(missing) - len(added),
        dense_added=bool(added),
        bytes_on_disk=sum(bytes_on_disk(spec, model) for spec in missing) if model is not None else None,
        seconds=sum(known) if len(known) == len(phases) else None,
    )


def bytes_on_disk(spec: RunSpec, model: ModelSize) -> float:
    """Bytes of the saved variant: pruned layers as the smaller of all weights and kept ones with a bitmask."""
    plain = _BYTES_PER_WEIGHT.get(spec.dtype, model.auto)
    prune, quantize = spec.recipe.prune, spec.recipe.quantize
    if spec.recipe == Recipe() or model.prunable is None:
        return plain * model.parameters
    each = SCHEMES[quantize.scheme].bits / 8 if quantize is not None else plain
    kept = 1 - prune.sparsity if prune is not None else 1.0
    return plain * (model.parameters - model.prunable) + model.prunable * min(each, kept * each + _MASK)


def said(estimate: Estimate) -> str:
    """The estimate in one or two sentences."""
    if estimate.asked == 0:
        return "Nothing is chosen yet: choose at least one method, or int8."
    there = estimate.asked - estimate.to_make
    if estimate.to_make == 0 and not estimate.dense_added:
        return f"{counted(estimate.asked, 'variant')}, all there already: see them on Compare."
    parts = [counted(estimate.asked, "variant")]
    if there:
        parts.append(f"{there:,} of them there already")
    if estimate.dense_added:
        parts.append("and the dense model to compare with")
    if estimate.bytes_on_disk is not None:
        parts.append(f"about {size(estimate.bytes_on_disk)} on disk")
    if estimate.seconds is not None:
        return f"{', '.join(parts)}, about {duration(estimate.seconds)} on this machine."
    return f"{', '.join(parts)}. How long is known once a run like these has been measured here."
