"""Which runs can be made from the same statistics of the dense model."""

from collections.abc import Sequence

from app.runs.combinations import can_share
from app.runs.spec import RunSpec


def shares_statistics(spec: RunSpec) -> bool:
    """Whether the variant is made from statistics that other variants can share."""
    prune = spec.recipe.prune
    return prune is not None and prune.statistics == "shared" and can_share(spec.recipe)


def siblings_of(spec: RunSpec, others: Sequence[RunSpec]) -> list[RunSpec]:
    """Those of ``others``, each once and in their order, whose statistics are those of ``spec``; itself excluded.

    The same model, calibration, dtype and device, and statistics that are shared.
    """
    if not shares_statistics(spec):
        return []
    found = {other.run_id: other for other in others if shares_statistics(other) and _source(other) == _source(spec)}
    found.pop(spec.run_id, None)
    return list(found.values())


def _source(spec: RunSpec) -> tuple[object, ...]:
    """What decides the statistics, files by content."""
    calibration = spec.calibration
    if calibration is not None and calibration.text_hash is not None:
        calibration = calibration.model_copy(update={"source": ""})
    model = spec.model_hash if spec.model_hash is not None else (spec.model, spec.revision)
    return model, calibration, spec.dtype, spec.device
