"""Spreads one sparsity over the layers of a model, the total kept exactly."""

from collections.abc import Sequence

import torch
from torch import nn

from pruning.allocation import UNIFORM
from pruning.allocation.exact import exact_shares
from pruning.allocation.threshold import shares_below_one_threshold
from pruning.anatomy import Block
from pruning.calibration import Windows
from pruning.methods import METHODS
from pruning.placement import Stage
from pruning.recipe import PruneStep
from pruning.replay import capture
from pruning.walk import Tick, collect_and_propagate


def shares(
    model: nn.Module, blocks: Sequence[Block], step: PruneStep, windows: Windows | None, stage: Stage, tick: Tick
) -> dict[str, float]:
    """The sparsity of each layer by name.

    Their weights add up to exactly the whole number nearest ``step.sparsity`` of all. Blocks compute on the device of
    ``stage``, one at a time; the model is left as it was. Raises ValueError for an allocation that needs ``windows``
    without any.
    """
    layers = [layer for block in blocks for layer in block.layers]
    if step.allocation == UNIFORM:
        if METHODS[step.method].scope == "model":
            return shares_below_one_threshold(layers, step.sparsity)
        return {layer.name: step.sparsity for layer in layers}
    if windows is None:
        raise ValueError(f"the {step.allocation} allocation looks at calibration text")
    wished: dict[str, float]
    if step.allocation == "owl":
        wished = _by_outliers(model, blocks, step.sparsity, windows, stage, tick)
    else:
        from pruning.allocation.sensitivity import measure_damage, wished_shares

        damage = measure_damage(model, blocks, step, windows, stage, tick)
        wished = wished_shares(blocks, damage, step.sparsity)
    return exact_shares(wished, {layer.name: layer.weight().numel() for layer in layers}, step.sparsity)


@torch.no_grad()
def _by_outliers(
    model: nn.Module, blocks: Sequence[Block], sparsity: float, windows: Windows, stage: Stage, tick: Tick
) -> dict[str, float]:
    from pruning.allocation import owl

    replay = capture(model, blocks, windows.ids)
    stage.receive(replay)
    ratios = []
    for index, block in enumerate(blocks):
        with stage.holding(block.module):
            ratios.append(owl.outlier_ratio(block, collect_and_propagate(stage, replay, index, block, "norms", tick)))
    wished = owl.wished_shares(ratios, sparsity)
    return {layer.name: share for block, share in zip(blocks, wished, strict=True) for layer in block.layers}
