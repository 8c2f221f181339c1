"""Many variants for the price of one: statistics of the dense model, one block at a time, serve every recipe."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pruning.anatomy import Block, decoder_blocks
from pruning.calibration import Windows
from pruning.checkpoint import Checkpoint
from pruning.methods import Statistics
from pruning.placement import Stage
from pruning.progress import Progress, silent
from pruning.recipe import Recipe
from pruning.replay import capture
from pruning.report import LayerReport
from pruning.transform import put
from pruning.walk import (
    PHASE,
    UNIT,
    Finished,
    check,
    collect_and_propagate,
    effective,
    shares_of,
    subjects_of,
    ticker,
    transform_block,
)


@dataclass(frozen=True)
class Order:
    """A variant to make, and where its blocks go: to disk, or without ``checkpoint`` into the model itself."""

    recipe: Recipe
    checkpoint: Checkpoint | None


@torch.no_grad()
def compress_shared(
    model: nn.Module,
    orders: Sequence[Order],
    windows: Windows | None,
    *,
    device: torch.device | None = None,
    progress: Progress = silent,
) -> list[LayerReport]:
    """Make every order's blocks from statistics of the dense ``model``, which each block gives once for all.

    One pass over the text collects and propagates, as the dense model needs no second one. Of several orders each has a
    checkpoint, and the model stays dense: :func:`pruning.compress.compress` then assembles a variant from it. Blocks
    that a checkpoint has are not made again. Returns the reports of a single order without checkpoint.

    Raises what :func:`pruning.compress.compress` raises, and ValueError for several orders without checkpoints.
    """
    if len(orders) > 1 and any(order.checkpoint is None for order in orders):
        raise ValueError("one model cannot hold several variants: give each a checkpoint")
    recipes = [effective(order.recipe) for order in orders]
    blocks = decoder_blocks(model)
    for recipe in recipes:
        check(model, recipe, windows)
    model.eval()
    total = len(blocks)
    progress(PHASE, 0, total, UNIT)
    missing = [
        [index for index in range(total) if order.checkpoint is None or not order.checkpoint.has(index)]
        for order in orders
    ]
    last = max((indices[-1] for indices in missing if indices), default=-1)
    if last < 0 or windows is None:
        return []
    together = sum(bool(indices) for indices in missing)
    stage = Stage(model, device)
    shares = [
        shares_of(model, blocks, recipe, windows, stage, order.checkpoint, ticker(progress, 0, total))
        for order, recipe in zip(orders, recipes, strict=True)
    ]
    kind: Statistics = "gram" if any(recipe.statistics == "gram" for recipe in recipes) else "norms"
    started = time.perf_counter()
    replay = capture(model, blocks, windows.ids)
    stage.receive(replay)
    layers: list[LayerReport] = []
    for index, block in enumerate(blocks[: last + 1]):
        tick = ticker(progress, index, total)
        with stage.holding(block.module):
            seen = collect_and_propagate(stage, replay, index, block, kind, tick)
            subjects = list(subjects_of(block, seen))
            common = time.perf_counter() - started
            for order, recipe, share, indices in zip(orders, recipes, shares, missing, strict=True):
                if index in indices:
                    done = transform_block(subjects, recipe, share, tick)
                    # Each variant notes what the block cost all of them; its own work is in the layers' reports.
                    layers += _deliver(model, block, index, order, Finished.of(done, common, together))
                    # Before the next variant's: one of them is in memory at a time.
                    del done
            del subjects
        started = time.perf_counter()
        progress(PHASE, index + 1, total, UNIT)
    return layers


def _deliver(model: nn.Module, block: Block, index: int, order: Order, finished: Finished) -> tuple[LayerReport, ...]:
    """Keep a block of an order; the reports of one that goes into the model."""
    if order.checkpoint is not None:
        finished.save(order.checkpoint, index)
        return ()
    for layer in block.layers:
        put(model, layer, finished.tensors, order.recipe)
    return finished.layers
