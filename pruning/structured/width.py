"""Width pruning: every block loses FFN channels and whole groups of attention heads, and the rest makes up for it."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
from torch import nn

from pruning.anatomy import Block, LinearLayer, decoder_blocks
from pruning.calibration import Windows
from pruning.checkpoint import Checkpoint
from pruning.placement import Stage
from pruning.progress import Progress, silent
from pruning.recipe import PruneStep
from pruning.replay import Replay, capture
from pruning.statistics import Collector, Observed
from pruning.structured import Restructured
from pruning.structured.narrow import Choose, Collect, Narrowed, Target, greedy, narrow
from pruning.structured.plan import Widths, candidates, cheapest, narrowable, removed_weights
from pruning.structured.smaller import blocks_at, empty_model, move_block, move_rest
from pruning.walk import PHASE, UNIT, Tick, propagate, reports_in, ticker

_WIDTHS = "widths"


@torch.no_grad()
def prune_width(
    model: nn.Module,
    step: PruneStep,
    windows: Windows,
    *,
    multiple: int | None = None,
    group: int = 1,
    widths: Widths | None = None,
    device: torch.device | None = None,
    progress: Progress = silent,
    checkpoint: Checkpoint | None = None,
    choose: Choose = greedy,
    compensate: bool = True,
) -> Restructured:
    """A narrower model of the same class, made from ``model``, which is used up block by block.

    All blocks keep the same number of FFN channels, rounded to a ``multiple`` (64 on CUDA, 32 elsewhere), and of
    attention heads, in whole groups that share keys and values, so that about ``step.sparsity`` of the weights in the
    blocks goes. Both are such that the layers that read them have a multiple of ``group`` inputs. How much from which,
    ``widths`` says or :func:`pruning.structured.plan.cheapest` does. ``choose`` says for each block which stay, from
    what the narrowed blocks before it give on ``windows``, and with ``compensate`` the layers that read what is kept
    are fitted again by least squares. Blocks compute on ``device``, where the model may not be.

    Blocks that ``checkpoint`` has finished are taken from there, to the same bits. Raises InputError before any work
    where the model cannot be made narrower, or not by so much, and RunError where numbers are not finite.
    """
    model.eval()
    blocks = decoder_blocks(model)
    stage = Stage(model, device)
    if multiple is None:
        multiple = 64 if stage.device.type == "cuda" else 32
    multiple = math.lcm(multiple, group)
    progress(PHASE, 0, len(blocks), UNIT)
    found, reasons = narrowable(model, blocks, windows.ids)
    total = sum(layer.weight().numel() for block in blocks for layer in block.layers)
    earlier = 0.0
    if widths is None and checkpoint is not None:
        planned = checkpoint.note(_WIDTHS)
        if planned is not None:
            widths, earlier = planned["widths"], planned["seconds"]
    if widths is None:
        started = time.perf_counter()
        options = candidates(model, found, total, step.sparsity, multiple, group)
        widths = cheapest(model, blocks, found, options, windows, stage, ticker(progress, 0, len(blocks)))
        if checkpoint is not None:
            checkpoint.set_note(_WIDTHS, {"widths": widths, "seconds": time.perf_counter() - started})
    targets = [Target(one.part, one.rows, widths[one.part.consumer]) for one in found]
    changes = {name: value for t in targets for name, value in t.part.changes(t.keep).items()}
    new = empty_model(model, changes)
    assert new is not None  # it was built before, to see what differs
    move_rest(model, new, [block.name for block in blocks])
    last = -1  # the last block that is not finished, up to which the text has to run
    if checkpoint is not None and not checkpoint.finished(len(blocks)):
        last = max(index for index in range(len(blocks)) if not checkpoint.has(index))
    elif checkpoint is None:
        last = len(blocks) - 1
    replay = capture(model, blocks, windows.ids) if last >= 0 else None
    if replay is not None:
        stage.receive(replay)
    done: list[Narrowed] = []
    resumed = 0
    for index, (block, narrower) in enumerate(zip(blocks, blocks_at(new, blocks[0]), strict=True)):
        tick = ticker(progress, index, len(blocks))
        before = _load(checkpoint, index)
        with stage.holding(block.module):
            if before is None:
                assert replay is not None
                started = time.perf_counter()
                collect = _collector(stage, replay, index, block, tick)
                kept = narrow(block, targets, collect, step.sparsity, choose=choose, compensate=compensate)
                if checkpoint is not None:
                    _save(checkpoint, index, kept, time.perf_counter() - started)
            else:
                kept, seconds = before
                earlier, resumed = earlier + seconds, resumed + 1
            move_block(block.module, narrower, kept.tensors)
        block.module.to("meta")  # frees its memory
        narrower.to(stage.home)
        done.append(replace(kept, tensors={}))
        del kept, before
        if replay is not None and index < last:
            with stage.holding(narrower):
                propagate(stage, replay, index, replace(block, module=narrower), tick)
        progress(PHASE, index + 1, len(blocks), UNIT)
    new.requires_grad_(False)
    share = removed_weights(found, widths) / total
    words = " and ".join(f"{target.keep} of {target.part.units} {target.part.title}" for target in targets)
    note = "; ".join([f"{step.sparsity:.1%} asked, {share:.1%} removed: every block keeps {words}", *reasons])
    layers = [layer for one in done for layer in one.layers]
    return Restructured(new, tuple(one.removed for one in done), layers, note, resumed, earlier)


def _save(checkpoint: Checkpoint, index: int, made: Narrowed, seconds: float) -> None:
    layers = [asdict(layer) for layer in made.layers]
    checkpoint.save(index, made.tensors, {"layers": layers, "removed": made.removed, "seconds": seconds})


def _load(checkpoint: Checkpoint | None, index: int) -> tuple[Narrowed, float] | None:
    """A block that was finished, and the seconds it took."""
    kept = checkpoint.load(index) if checkpoint is not None else None
    if kept is None:
        return None
    tensors, report = kept
    return Narrowed(tensors, reports_in(report), report["removed"]), report["seconds"]


def _collector(stage: Stage, replay: Replay, index: int, block: Block, tick: Tick) -> Collect:
    """What layers of ``block`` are given, as it is when that is asked."""

    def collect(layers: Sequence[LinearLayer]) -> dict[str, Observed]:
        tokens = sum(hidden.shape[0] * hidden.shape[1] for hidden in replay.hidden)
        with Collector(layers, "gram", tokens) as collector:
            for batch in range(len(replay.hidden)):
                collector.run(lambda batch=batch: stage.run(replay, index, batch, block.module))  # type: ignore[misc]
                tick()
        return collector.results()

    return collect
