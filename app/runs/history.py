"""How long phases took in earlier runs, so that the next run can say how long it will take."""

from collections.abc import Mapping

from sqlalchemy import select

from app.runs import tables
from app.runs.combinations import is_structured
from app.runs.siblings import shares_statistics
from app.runs.spec import RunSpec
from app.runs.store import Store
from pruning.allocation import UNIFORM

PHASES = ("loading", "compressing", "saving", "scoring", "timing")


def phases_of(spec: RunSpec) -> tuple[str, ...]:
    """The phases a run goes through, in order."""
    return tuple(phase for phase in PHASES if phase != "compressing" or spec.recipe != type(spec.recipe)())


def work_of(phase: str, spec: RunSpec) -> str:
    """A key that two runs share where this phase takes them the same time a unit of work."""
    parts: list[object] = [phase, spec.model_hash or f"{spec.model}@{spec.revision}", spec.device, spec.dtype]
    prune = spec.recipe.prune
    quantize = spec.recipe.quantize.scheme if spec.recipe.quantize is not None else "none"
    if phase == "compressing":
        calibration = spec.calibration
        parts += [prune.method if prune is not None else "none", quantize]
        parts += [calibration.windows, calibration.length] if calibration is not None else []
        if prune is not None and prune.allocation != UNIFORM:
            parts.append(prune.allocation)
        if shares_statistics(spec):
            parts.append("shared")
    elif phase in ("saving", "scoring", "timing"):
        parts.append(quantize)
        if prune is not None and is_structured(spec.recipe):
            # A smaller model is read and run in less time, which goes by how much smaller it is.
            parts += [prune.method, prune.sparsity]
    if phase == "scoring":
        parts.append(spec.evaluation.length)
    return "/".join(str(part) for part in parts)


def expected_seconds(store: Store, spec: RunSpec) -> Mapping[str, float | None]:
    """Seconds each phase should take, in order, from the latest run of the same work; None where never measured."""
    return {phase: _expected(store, phase, spec) for phase in phases_of(spec)}


def _expected(store: Store, phase: str, spec: RunSpec) -> float | None:
    table = tables.phases
    latest = (
        select(table.c.seconds, table.c.total)
        .where(table.c.work == work_of(phase, spec))
        .order_by(table.c.run_key.desc())
        .limit(1)
    )
    with store.engine.connect() as connection:
        found = connection.execute(latest).first()
    if found is None:
        return None
    seconds, total = float(found[0]), int(found[1])
    if phase == "scoring":
        # Tokens are the only unit whose number differs between runs of the same work.
        return seconds / max(total, 1) * spec.evaluation.windows * spec.evaluation.length
    return seconds
