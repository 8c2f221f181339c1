"""What a sweep will make, before it starts: how many variants, how many bytes, how long."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from app.runs.combinations import is_structured
from app.runs.spec import RunSpec
from app.wording import counted, duration, size

_BYTES_PER_WEIGHT = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
# One bit for each weight says which are kept.
_MASK = 1 / 8


@dataclass(frozen=True)
class Estimate:
    """``new`` of ``variants`` (dense included) are not there yet.

    ``bytes_on_disk`` is what the new ones will take, None when the size of the model is not known. ``seconds`` is
    for the ``measured`` ones of the new variants whose like was run here before, None when there is none.
    """

    variants: int
    new: int
    bytes_on_disk: float | None
    seconds: float | None
    measured: int


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
        earlier = results[results["model"] == title].dropna(subset=["dense16_bytes", "dense16_pruned_layer_bytes"])
        if not earlier.empty:
            row = earlier.iloc[0]
            auto = _BYTES_PER_WEIGHT.get(str(row["dtype"]), 2.0)
            # Those of the dense model, of which a variant may have fewer.
            return cls(int(row["dense16_bytes"] / 2), int(row["dense16_pruned_layer_bytes"] / 2), auto)
        return cls(parameters) if parameters else None


def estimate(
    specs: Sequence[RunSpec],
    there: Collection[str],
    model: ModelSize | None,
    expected: Callable[[RunSpec], Mapping[str, float | None]],
) -> Estimate:
    """Sum up ``specs``; ``there`` are ids of runs finished or on their way, ``expected`` the seconds of each phase."""
    asked = {spec.run_id: spec for spec in specs}
    missing = [spec for run_id, spec in asked.items() if run_id not in there]
    seconds = []
    for spec in missing:
        phases = list(expected(spec).values())
        known = [phase for phase in phases if phase is not None]
        if len(known) == len(phases):
            seconds.append(sum(known))
    return Estimate(
        variants=len(asked),
        new=len(missing),
        bytes_on_disk=sum(bytes_on_disk(spec, model) for spec in missing) if model is not None else None,
        seconds=sum(seconds) if seconds else None,
        measured=len(seconds),
    )


def bytes_on_disk(spec: RunSpec, model: ModelSize) -> float:
    """Bytes of the saved variant.

    Pruned layers take the smaller of all weights, and kept ones with a bitmask; of a smaller model they are dense.
    Groups of codes have a scale each, in the dtype of the weights.
    """
    plain = _BYTES_PER_WEIGHT.get(spec.dtype, model.auto)
    prune, quantize = spec.recipe.prune, spec.recipe.quantize
    prunable = model.prunable if model.prunable is not None else 0
    each = quantize.what.bits / 8 if quantize is not None else plain
    scales = plain / quantize.group if quantize is not None and quantize.group is not None else 0.0
    kept = 1 - prune.sparsity if prune is not None else 1.0
    if is_structured(spec.recipe):
        return plain * (model.parameters - prunable) + prunable * kept * (each + scales)
    return plain * (model.parameters - prunable) + prunable * (min(each, kept * each + _MASK) + scales)


def in_words(estimate: Estimate) -> str:
    """How many variants, how many are there, how much disk, how long where that was measured before."""
    there = estimate.variants - estimate.new
    if estimate.new == 0:
        return f"{counted(estimate.variants, 'variant')}, all made or waiting already."
    parts = [counted(estimate.variants, "variant")]
    if estimate.variants > 1:
        parts.append("one of them the dense model to compare with")
    if there:
        parts.append(f"{there:,} there already")
    if estimate.bytes_on_disk is not None:
        parts.append(f"about {size(estimate.bytes_on_disk)} on disk")
    if estimate.seconds is None:
        return f"{', '.join(parts)}. How long it takes is known once one like these was measured here."
    if estimate.measured < estimate.new:
        return (
            f"{', '.join(parts)}. About {duration(estimate.seconds)} for {estimate.measured:,} of them; "
            "nothing like the others was measured here yet."
        )
    return f"{', '.join(parts)}, about {duration(estimate.seconds)} on this machine."
