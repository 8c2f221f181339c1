"""Compresses a model by a recipe: block by block, each from what the compressed blocks before it give."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pruning.anatomy import Block
from pruning.calibration import Windows
from pruning.checkpoint import Checkpoint
from pruning.methods import METHODS
from pruning.placement import Stage
from pruning.progress import Progress, silent
from pruning.recipe import PruneStep, Recipe
from pruning.replay import capture
from pruning.report import Compression, LayerReport
from pruning.shared import Order, compress_shared
from pruning.transform import put
from pruning.walk import (
    PHASE,
    UNIT,
    Finished,
    check,
    collect,
    effective,
    propagate,
    shares_of,
    spreading_seconds,
    subjects_of,
    ticker,
    transform_block,
)

__all__ = ["PHASE", "UNIT", "compress"]


def compress(
    model: nn.Module,
    recipe: Recipe,
    windows: Windows | None,
    *,
    device: torch.device | None = None,
    checkpoint: Checkpoint | None = None,
    progress: Progress = silent,
) -> Compression:
    """Compress ``model`` in place, in eval mode; structured methods make a smaller model instead.

    Blocks compute on ``device``, one at a time, and the rest stays where ``model`` is; without it, all of it is where
    the model is. With a sparsity of 0 no weight is touched. Quantized layers are replaced by
    :class:`pruning.quantize.layer.QuantizedLinear`. Statistics of a block come from the outputs of the compressed
    blocks before it, or where the recipe shares them from the dense model. Blocks that ``checkpoint`` has finished are
    taken from there, to the same bits, and those finished here are kept in it.

    Raises InputError before any work when the recipe does not fit the model or needs windows that are not there,
    RunError when weights or activations are not finite, and lets through what ``progress`` raises.
    """
    started = time.perf_counter()
    recipe = effective(recipe)
    step = recipe.prune
    blocks = check(model, recipe, windows)
    model.eval()
    if step is not None and METHODS[step.method].kind != "weights":
        return _restructure(model, recipe, step, windows, device, checkpoint, progress)
    shared = step is not None and step.statistics == "shared"
    found = sum(checkpoint.has(index) for index in range(len(blocks))) if checkpoint is not None else 0
    if shared and found < len(blocks):
        made = compress_shared(model, [Order(recipe, checkpoint)], windows, device=device, progress=progress)
        if checkpoint is None:
            return Compression(model, tuple(made), time.perf_counter() - started, together=1)
    spread_before = spreading_seconds(checkpoint)
    walked = _walk(model, blocks, recipe, windows, Stage(model, device), checkpoint, progress)
    if shared and checkpoint is not None:
        own = spread_before + sum(layer.seconds for layer in walked.layers)
        return Compression(
            model=model,
            layers=tuple(walked.layers),
            seconds=walked.earlier + own,
            resumed=found,
            together=walked.together,
            common_seconds=walked.earlier,
        )
    seconds = time.perf_counter() - started + walked.earlier + spread_before
    return Compression(model, tuple(walked.layers), seconds, walked.resumed)


@dataclass
class _Walked:
    """Reports of all layers, the seconds that ``resumed`` finished blocks had taken before, and with how many others.

    ``together`` is the fewest variants that any block was made in one go with, itself counted; None for none.
    """

    layers: list[LayerReport] = field(default_factory=list)
    earlier: float = 0.0
    resumed: int = 0
    together: int | None = None


@torch.no_grad()
def _walk(
    model: nn.Module,
    blocks: list[Block],
    recipe: Recipe,
    windows: Windows | None,
    stage: Stage,
    checkpoint: Checkpoint | None,
    progress: Progress,
) -> _Walked:
    total = len(blocks)
    progress(PHASE, 0, total, UNIT)
    missing = [index for index in range(total) if checkpoint is None or not checkpoint.has(index)]
    last = missing[-1] if missing else -1
    kind = recipe.statistics
    shares = {}
    if missing:
        shares = shares_of(model, blocks, recipe, windows, stage, checkpoint, ticker(progress, 0, total))
    replay = None
    if kind != "none" and windows is not None and missing:
        replay = capture(model, blocks, windows.ids)
        stage.receive(replay)
    walked = _Walked()
    for index, block in enumerate(blocks):
        tick = ticker(progress, index, total)
        started = time.perf_counter()
        with stage.holding(block.module):
            finished = Finished.load(checkpoint, index) if checkpoint is not None else None
            if finished is None:
                seen = collect(stage, replay, index, block, kind, tick) if replay is not None else {}
                done = transform_block(subjects_of(block, seen), recipe, shares, tick)
                finished = Finished.of(done, time.perf_counter() - started)
                if checkpoint is not None:
                    finished.save(checkpoint, index)
                del done, seen
            else:
                walked.earlier, walked.resumed = walked.earlier + finished.seconds, walked.resumed + 1
                if finished.together is not None:
                    walked.together = min(walked.together or finished.together, finished.together)
            for layer in block.layers:
                put(model, layer, finished.tensors, recipe)
            walked.layers += finished.layers
            del finished
            if replay is not None and index < last:
                propagate(stage, replay, index, block, tick)
        progress(PHASE, index + 1, total, UNIT)
    return walked


def _restructure(
    model: nn.Module,
    recipe: Recipe,
    step: PruneStep,
    windows: Windows | None,
    device: torch.device | None,
    checkpoint: Checkpoint | None,
    progress: Progress,
) -> Compression:
    from pruning.structured.depth import prune_depth
    from pruning.structured.width import prune_width

    started = time.perf_counter()
    assert windows is not None
    kept: dict[str, Any] = {"device": device, "checkpoint": checkpoint, "progress": progress}
    if METHODS[step.method].kind == "width":
        group = recipe.quantize.group if recipe.quantize is not None else None
        done = prune_width(model, step, windows, group=group or 1, **kept)
    else:
        done = prune_depth(model, step, windows, **kept)
    notes = [done.note] if done.note is not None else []
    if recipe.quantize is not None:
        rest = Recipe(quantize=recipe.quantize)

        def standing_still(phase: str, done: int, total: int, unit: str) -> None:
            progress(phase, total, total, unit)  # as the blocks themselves are done

        blocks = check(done.model, rest, windows)
        walked = _walk(done.model, blocks, rest, windows, Stage(done.model, device), None, standing_still)
        notes.append("the change of each layer's output is that before quantization")
        notes += dict.fromkeys(layer.note for layer in walked.layers if layer.note is not None)
    return Compression(
        model=done.model,
        layers=tuple(done.layers),
        seconds=time.perf_counter() - started + done.earlier,
        resumed=done.resumed,
        removed=done.removed,
        note="; ".join(notes) or None,
    )
