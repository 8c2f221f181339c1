"""What every walk through the blocks of a model does: check, spread the sparsity, collect, propagate, keep."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from pruning.allocation import UNIFORM
from pruning.anatomy import Block, decoder_blocks
from pruning.calibration import Windows
from pruning.checkpoint import Checkpoint
from pruning.errors import InputError
from pruning.methods import METHODS, Statistics
from pruning.placement import Stage
from pruning.progress import Progress
from pruning.quantize import lever
from pruning.recipe import PruneStep, QuantizeStep, Recipe
from pruning.replay import Replay
from pruning.report import LayerReport
from pruning.statistics import Collector, Observed
from pruning.transform import UNSEEN, Subject, Transformed, examine, transform

PHASE = "compressing"
UNIT = "blocks"

_SPREAD = "shares"

Tick = Callable[[], None]


@dataclass(frozen=True)
class Finished:
    """One block of a variant: new ``tensors`` by layer and part, reports, and the seconds that went into it.

    Where it was made ``together`` with that of other variants, so many in all, these are the seconds they shared.
    """

    tensors: dict[str, Tensor]
    layers: tuple[LayerReport, ...]
    seconds: float
    together: int | None = None

    @classmethod
    def of(cls, layers: Sequence[Transformed], seconds: float, together: int | None = None) -> "Finished":
        """A block of which every layer is done."""
        tensors = {name: tensor for layer in layers for name, tensor in layer.tensors().items()}
        return cls(tensors, tuple(layer.report for layer in layers), seconds, together)

    def save(self, checkpoint: Checkpoint, index: int) -> None:
        """Keep this as block ``index``."""
        layers = [asdict(layer) for layer in self.layers]
        report = {"layers": layers, "seconds": self.seconds, "together": self.together}
        checkpoint.save(index, self.tensors, report)

    @classmethod
    def load(cls, checkpoint: Checkpoint, index: int) -> "Finished | None":
        """Block ``index`` where it is there, whole."""
        kept = checkpoint.load(index)
        if kept is None:
            return None
        tensors, report = kept
        return cls(tensors, reports_in(report), report["seconds"], report.get("together"))


def reports_in(report: dict[str, Any]) -> tuple[LayerReport, ...]:
    """The reports of a block's layers as a checkpoint kept them."""
    return tuple(LayerReport(**{**layer, "shape": tuple(layer["shape"])}) for layer in report["layers"])


def effective(recipe: Recipe) -> Recipe:
    """``recipe`` without a step that removes nothing."""
    if recipe.prune is not None and recipe.prune.sparsity == 0:
        return recipe.model_copy(update={"prune": None})
    return recipe


def check(model: nn.Module, recipe: Recipe, windows: Windows | None) -> list[Block]:
    """The decoder blocks of ``model``. Raises InputError when ``recipe`` does not fit it or lacks ``windows``."""
    blocks = decoder_blocks(model)
    if recipe.prune is not None and recipe.prune.pattern is not None:
        _check_widths(blocks, recipe.prune)
    if recipe.quantize is not None:
        _check_groups(blocks, recipe.quantize)
    if recipe.needs_calibration:
        _check_windows(model, recipe, windows)
    return blocks


def _check_widths(blocks: Sequence[Block], step: PruneStep) -> None:
    assert step.pattern is not None
    for block in blocks:
        for layer in block.layers:
            if layer.in_features % step.pattern.group:
                raise InputError(
                    f"pattern {step.pattern} does not fit {layer.name}: its {layer.in_features} inputs are no "
                    f"multiple of {step.pattern.group}; choose a sparsity without a pattern"
                )


def _check_groups(blocks: Sequence[Block], step: QuantizeStep) -> None:
    layers = [layer for block in blocks for layer in block.layers if layer.quantizable]
    widths = list(dict.fromkeys(layer.in_features for layer in layers))
    for layer in layers:
        if step.group is not None and layer.in_features % step.group:
            raise InputError(
                f"group {step.group} does not divide the {layer.in_features} inputs of {layer.name}: "
                f"{lever(step.what, widths)}"
            )


def _check_windows(model: nn.Module, recipe: Recipe, windows: Windows | None) -> None:
    if windows is None:
        raise InputError(f"{recipe} looks at calibration text: give calibration windows")
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    length = windows.ids.shape[1]
    if isinstance(longest, int) and length > longest:
        raise InputError(
            f"calibration windows of {length} tokens are longer than the {longest} the model takes: "
            f"lower the window length to {longest} or less"
        )


def shares_of(
    model: nn.Module,
    blocks: list[Block],
    recipe: Recipe,
    windows: Windows | None,
    stage: Stage,
    checkpoint: Checkpoint | None,
    tick: Tick,
) -> dict[str, float]:
    """The share of each layer's weights that goes, by layer name; kept in ``checkpoint`` where finding it took work."""
    step = recipe.prune
    if step is None:
        return {}
    if step.allocation == UNIFORM and METHODS[step.method].scope == "layer":
        return {layer.name: step.sparsity for block in blocks for layer in block.layers}
    kept: dict[str, float] | None = (checkpoint.note(_SPREAD) or {}).get("shares") if checkpoint is not None else None
    if kept is not None:
        return kept
    from pruning.allocation.spread import shares

    started = time.perf_counter()
    found = shares(model, blocks, step, windows, stage, tick)
    if checkpoint is not None:
        checkpoint.set_note(_SPREAD, {"shares": found, "seconds": time.perf_counter() - started})
    return found


def spreading_seconds(checkpoint: Checkpoint | None) -> float:
    """How long finding the shares that ``checkpoint`` keeps took; 0 where it keeps none."""
    kept = checkpoint.note(_SPREAD) if checkpoint is not None else None
    return float(kept["seconds"]) if kept is not None else 0.0


def collect(
    stage: Stage, replay: Replay, index: int, block: Block, kind: Statistics, tick: Tick
) -> dict[str, Observed]:
    """What the layers of ``block`` are given on the calibration text."""
    with Collector(block.layers, kind, _tokens(replay)) as collector:
        for batch in range(len(replay.hidden)):
            collector.run(lambda batch=batch: stage.run(replay, index, batch, block.module))  # type: ignore[misc]
            tick()
    return collector.results()


def collect_and_propagate(
    stage: Stage, replay: Replay, index: int, block: Block, kind: Statistics, tick: Tick
) -> dict[str, Observed]:
    """:func:`collect` and :func:`propagate` in one pass, for a block that stays as it is; norms stand beside a Gram."""
    with Collector(block.layers, kind, _tokens(replay), stop=False, norms=True) as collector:
        for batch in range(len(replay.hidden)):
            hidden = collector.run(lambda batch=batch: stage.run(replay, index, batch, block.module))  # type: ignore[misc]
            assert isinstance(hidden, Tensor)
            stage.keep(replay, batch, hidden)
            tick()
    return collector.results()


def _tokens(replay: Replay) -> int:
    return sum(hidden.shape[0] * hidden.shape[1] for hidden in replay.hidden)


def propagate(stage: Stage, replay: Replay, index: int, block: Block, tick: Tick) -> None:
    """Make the outputs of ``block`` the inputs of the next one."""
    for batch in range(len(replay.hidden)):
        stage.keep(replay, batch, stage.run(replay, index, batch, block.module))
        tick()


def transform_block(
    subjects: Iterable[Subject], recipe: Recipe, shares: dict[str, float], tick: Tick
) -> list[Transformed]:
    """What ``recipe`` makes of each layer of a block, which is left as it is."""
    done = []
    for subject in subjects:
        done.append(transform(subject, recipe, shares.get(subject.layer.name, 0.0)))
        tick()
    return done


def subjects_of(block: Block, seen: dict[str, Observed]) -> Iterator[Subject]:
    """The layers of ``block`` with what they were given, which is used up: no statistic is kept longer than needed."""
    for layer in block.layers:
        yield examine(layer, block.name, seen.pop(layer.name, UNSEEN))


def ticker(progress: Progress, index: int, total: int) -> Tick:
    """Says from within block ``index`` that it is still being worked on, so that a person can stop it there."""

    def tick() -> None:
        progress(PHASE, index, total, UNIT)

    return tick
