"""Compresses a model by a recipe: block by block, each from what the compressed blocks before it give."""

import time

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
from pruning.shared import TOGETHER, Order, compress_shared
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
    statistics_of,
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
    :class:`pruning.quantize.int8.Int8Linear`. Statistics of a block come from the outputs of the compressed blocks
    before it, or where the recipe shares them from the dense model. Blocks that ``checkpoint`` has finished are taken
    from there, to the same bits, and those finished here are kept in it.

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
    if shared and (checkpoint is None or not checkpoint.finished(len(blocks))):
        made = compress_shared(model, [Order(recipe, checkpoint)], windows, device=device, progress=progress)
        if checkpoint is None:
            return Compression(model, tuple(made), time.perf_counter() - started, together=1)
    layers, earlier, resumed = _walk(model, blocks, recipe, windows, Stage(model, device), checkpoint, progress)
    if shared and checkpoint is not None:
        own = sum(layer.seconds for layer in layers)
        together = checkpoint.note(TOGETHER)
        return Compression(model, tuple(layers), earlier + own, together=together, common_seconds=earlier)
    return Compression(model, tuple(layers), time.perf_counter() - started + earlier, resumed)


@torch.no_grad()
def _walk(
    model: nn.Module,
    blocks: list[Block],
    recipe: Recipe,
    windows: Windows | None,
    stage: Stage,
    checkpoint: Checkpoint | None,
    progress: Progress,
) -> tuple[list[LayerReport], float, int]:
    """Reports of all layers, the seconds that finished blocks had taken before, and how many those are."""
    total = len(blocks)
    progress(PHASE, 0, total, UNIT)
    missing = [index for index in range(total) if checkpoint is None or not checkpoint.has(index)]
    last = missing[-1] if missing else -1
    kind = statistics_of(recipe)
    shares = {}
    if missing:
        shares = shares_of(model, blocks, recipe, windows, stage, checkpoint, ticker(progress, 0, total))
    replay = None
    if kind != "none" and windows is not None and missing:
        replay = capture(model, blocks, windows.ids)
        stage.receive(replay)
    layers: list[LayerReport] = []
    earlier, resumed = 0.0, 0
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
                earlier, resumed = earlier + finished.seconds, resumed + 1
            for layer in block.layers:
                put(model, layer, finished.tensors)
            layers += finished.layers
            del finished
            if replay is not None and index < last:
                propagate(stage, replay, index, block, tick)
        progress(PHASE, index + 1, total, UNIT)
    return layers, earlier, resumed


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
    prune = prune_width if METHODS[step.method].kind == "width" else prune_depth
    done = prune(model, step, windows, device=device, checkpoint=checkpoint, progress=progress)
    if recipe.quantize is not None:
        rest = Recipe(quantize=recipe.quantize)
        _walk(done.model, check(done.model, rest, None), rest, None, Stage(done.model, device), None, progress)
    return Compression(
        model=done.model,
        layers=tuple(done.layers),
        seconds=time.perf_counter() - started,
        resumed=done.resumed,
        removed=done.removed,
        note=done.note,
    )
