"""How long phases took in earlier runs, so that the next run can say how long it will take."""

from collections.abc import Mapping

from sqlalchemy import select

from app.runs import tables
from app.runs.spec import RunSpec
from app.runs.store import Store

PHASES = ("loading", "compressing", "saving", "scoring", "timing")
LATEST = 3


def phases_of(spec: RunSpec) -> tuple[str, ...]:
    """The phases a run goes through, in order."""
    return tuple(phase for phase in PHASES if phase != "compressing" or spec.recipe != type(spec.recipe)())


def work_of(phase: str, spec: RunSpec) -> str:
    """A key that two runs share where this phase takes them the same time a unit of work."""
    parts: list[object] = [phase, spec.model_hash or f"{spec.model}@{spec.revision}", spec.device, spec.dtype]
    quantize = spec.recipe.quantize.scheme if spec.recipe.quantize is not None else "none"
    if phase == "compressing":
        prune = spec.recipe.prune
        calibration = spec.calibration
        parts += [prune.method if prune is not None else "none", quantize]
        parts += [calibration.windows, calibration.length] if calibration is not None else []
    elif phase in ("saving", "scoring", "timing"):
        parts.append(quantize)
    if phase == "scoring":
        parts.append(spec.evaluation.length)
    return "/".join(str(part) for part in parts)


def expected_seconds(store: Store, spec: RunSpec) -> Mapping[str, float | None]:
    """Seconds each phase should take, in order, from the latest runs of the same work; None where never measured."""
    return {phase: _expected(store, phase, spec) for phase in phases_of(spec)}


def _expected(store: Store, phase: str, spec: RunSpec) -> float | None:
    table = tables.phases
    query = (
        select(table.c.seconds, table.c.total)
        .where(table.c.work == work_of(phase, spec))
        .order_by(table.c.run_key.desc())
        .limit(LATEST)
    )
    with store.engine.connect() as connection:
        rows = [(float(seconds), int(total)) for seconds, total in connection.execute(query)]
    if not rows:
        return None
    if phase == "scoring":
        # Tokens are the only unit whose number differs between runs of the same work.
        tokens = spec.evaluation.windows * spec.evaluation.length
        return sum(seconds / max(total, 1) * tokens for seconds, total in rows) / len(rows)
    return sum(seconds for seconds, _ in rows) / len(rows)
