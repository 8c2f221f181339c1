"""Depth pruning: whole blocks go, those that the model misses least."""

import time
from collections.abc import Sequence

import torch
from torch import nn

from pruning.anatomy import Block, decoder_blocks
from pruning.calibration import Windows
from pruning.checkpoint import Checkpoint
from pruning.errors import InputError
from pruning.placement import Stage
from pruning.progress import Progress, silent
from pruning.recipe import PruneStep
from pruning.report import LayerReport
from pruning.structured import Restructured
from pruning.structured.influence import Miss
from pruning.structured.smaller import blocks_at, fewer_blocks, move_block, move_rest, shapes
from pruning.walk import PHASE, UNIT, ticker

_REMOVED = "removed"


@torch.no_grad()
def prune_depth(
    model: nn.Module,
    step: PruneStep,
    windows: Windows,
    *,
    device: torch.device | None = None,
    progress: Progress = silent,
    checkpoint: Checkpoint | None = None,
) -> Restructured:
    """A model of the same class without some blocks, which takes the parameters of ``model`` as they are.

    Blocks go one after another, each time the one that :class:`pruning.structured.influence.Miss` finds to be missed
    least in the model that is left, as long as their weights come nearer to ``step.sparsity`` of those of all blocks.
    Blocks compute on ``device``, where the model may not be. ``checkpoint`` keeps which went.

    Raises InputError where no whole number of blocks is near, or no configuration of the class can be without any, and
    RunError where numbers are not finite.
    """
    model.eval()
    blocks = decoder_blocks(model)
    sizes = [sum(layer.weight().numel() for layer in block.layers) for block in blocks]
    wanted = step.sparsity * sum(sizes)
    _check(blocks, sizes, step.sparsity)
    kept: list[tuple[int, float]] = (checkpoint.note(_REMOVED) if checkpoint is not None else None) or []
    seconds = dict(kept)
    removed = list(seconds)
    resumed, earlier = len(removed), sum(seconds.values())
    miss: Miss | None = None
    while True:
        gone = sum(sizes[index] for index in removed)
        # Those after which the share is nearer to what was asked, or as near.
        near = [i for i in _dispensable(blocks, removed) if gone + sizes[i] / 2 <= wanted]
        if not near:
            break
        started = time.perf_counter()
        total = len(removed) + max(1, round((wanted - gone) * len(blocks) / sum(sizes)))
        tick = ticker(progress, len(removed), total)
        tick()
        if miss is None:
            miss = Miss(model, blocks, windows.ids, Stage(model, device))
        order = miss.order(removed, near, tick)
        index = next((i for i in order if _possible(model, blocks, [*removed, i])), None)
        if index is None:
            break
        removed = [*removed, index]
        seconds[index] = time.perf_counter() - started
        if checkpoint is not None:
            checkpoint.set_note(_REMOVED, list(seconds.items()))
        progress(PHASE, len(removed), total, UNIT)
    if not removed:
        raise InputError(
            f"{type(model).__name__} can be without none of its blocks, as each is of a kind of its own or its "
            "configuration counts on it: choose a method that removes single weights"
        )
    share = sum(sizes[index] for index in removed) / sum(sizes)
    layers = [_report(block, index, removed, step, seconds) for index, block in enumerate(blocks)]
    new = without_blocks(model, blocks, removed)
    return Restructured(
        model=new,
        removed=tuple(blocks[index].name for index in removed),
        layers=[layer for reports in layers for layer in reports],
        note=f"{step.sparsity:.1%} asked, {share:.1%} removed: {len(removed)} of {len(blocks)} blocks",
        resumed=resumed,
        earlier=earlier,
    )


def without_blocks(model: nn.Module, blocks: Sequence[Block], removed: Sequence[int]) -> nn.Module:
    """A model without the blocks ``removed`` (their numbers), which takes the parameters of ``model`` as they are.

    Raises InputError when no configuration gives such a model.
    """
    kept = [index for index in range(len(blocks)) if index not in removed]
    new = fewer_blocks(model, blocks, kept)
    move_rest(model, new, [block.name for block in blocks])
    for module, index in zip(blocks_at(new, blocks[0]), kept, strict=True):
        move_block(blocks[index].module, module)
    return new.requires_grad_(False)


def _dispensable(blocks: Sequence[Block], removed: Sequence[int]) -> list[int]:
    """The blocks that are left and not the last of their kind, as a model may need one of each to keep its cache."""
    kinds = {i: str(shapes(block.module)) for i, block in enumerate(blocks) if i not in removed}
    return [i for i, kind in kinds.items() if list(kinds.values()).count(kind) > 1]


def _possible(model: nn.Module, blocks: Sequence[Block], removed: Sequence[int]) -> bool:
    try:
        fewer_blocks(model, blocks, [index for index in range(len(blocks)) if index not in removed])
    except InputError:
        return False
    return True


def _check(blocks: Sequence[Block], sizes: Sequence[int], sparsity: float) -> None:
    total = sum(sizes)
    least, most = min(sizes) / total, 1 - min(sizes) / total
    if len(blocks) == 1:
        raise InputError("this model has a single block, which cannot be removed: choose another method")
    if sparsity < least / 2 or sparsity > most + least / 2:
        raise InputError(
            f"depth pruning removes whole blocks, {least:.1%} to {most:.1%} of the weights in the {len(blocks)} blocks "
            f"of this model, not {sparsity:.1%}: choose a sparsity in that range, or another method"
        )


def _report(
    block: Block, index: int, removed: Sequence[int], step: PruneStep, seconds: dict[int, float]
) -> list[LayerReport]:
    gone = index in removed
    return [
        LayerReport(
            name=layer.name,
            shape=(layer.out_features, layer.in_features),
            requested_sparsity=step.sparsity,
            sparsity=1.0 if gone else 0.0,
            seconds=seconds.get(index, 0.0) / len(block.layers),
        )
        for layer in block.layers
    ]
