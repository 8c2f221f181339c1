"""How many FFN channels and how many groups of attention heads every block keeps, under one total."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pruning.anatomy import Block, LinearLayer
from pruning.calibration import Windows
from pruning.errors import InputError
from pruning.placement import Stage
from pruning.replay import capture
from pruning.statistics import Collector, UnusableStatisticsError
from pruning.structured.parts import INSTEAD, NotSeparableError, Part, check_alike, ffn_channels, head_groups
from pruning.structured.rows import Probe, Rows
from pruning.structured.select import removal_order
from pruning.walk import Tick

PLANNING_SHARE = 4
"""One calibration window in so many is looked at to decide what to take from where."""

Widths = dict[str, int]
"""How many units each block keeps, by the consumer of their part."""


@dataclass(frozen=True)
class Narrowable:
    """A part, its rows, and how many ``weights`` one unit has in all blocks together."""

    part: Part
    rows: Rows
    weights: int


def narrowable(model: nn.Module, blocks: Sequence[Block], ids: Tensor) -> tuple[list[Narrowable], list[str]]:
    """The parts of ``model`` that can be narrowed, in the order in which they run, and why others cannot.

    ``ids`` (windows, tokens) are any text. Raises InputError when no part can be.
    """
    check_alike(model, blocks)
    probe = Probe(model, blocks, ids)
    shapes = {layer.name.removeprefix(f"{blocks[0].name}."): layer.weight().shape for layer in blocks[0].layers}
    found: list[Narrowable] = []
    reasons: list[str] = []
    for find in (head_groups, ffn_channels):
        try:
            part = find(model, blocks)
            rows = probe.rows(part)
        except NotSeparableError as error:
            reasons.append(str(error))
            continue
        weights = part.size * shapes[part.consumer][0]
        weights += sum(len(units) // part.units * shapes[path][1] for path, units in rows.items())
        found.append(Narrowable(part, rows, weights * len(blocks)))
    if not found:
        raise InputError(f"{type(model).__name__} cannot be made narrower, as {' and '.join(reasons)}: {INSTEAD}")
    return found, reasons


def removed_weights(found: Sequence[Narrowable], widths: Widths) -> int:
    """How many weights go when every block keeps ``widths``."""
    return sum((one.part.units - widths[one.part.consumer]) * one.weights for one in found)


def candidates(
    model: nn.Module, found: Sequence[Narrowable], total: int, sparsity: float, multiple: int, group: int = 1
) -> list[Widths]:
    """For every number of groups of heads there may be, the FFN width that brings the removed share nearest.

    The share is that of ``total`` weights; an FFN keeps a multiple of ``multiple`` channels, or all, and heads are so
    many that they have a multiple of ``group`` outputs, or all. Those that miss
    ``sparsity`` by more than half such a step are left out, if one does not. Raises InputError where ``sparsity`` is
    more than the narrowest model removes, or so little that the model as it is comes nearest.
    """
    combinations: list[Widths] = [{}]
    steps = []
    for one in found:
        units, consumer = one.part.units, one.part.consumer
        if one.part.size == 1:
            counts = [*range(multiple, units, multiple), units]
            steps.append(multiple * one.weights)
        else:
            fitting = (n for n in range(1, units) if n * one.part.size % group == 0)
            counts = [n for n in fitting if one.part.possible(model, n)] + [units]
            steps.append(one.weights)
        combinations = [{**widths, consumer: count} for widths in combinations for count in counts]
    wanted = sparsity * total

    def miss(widths: Widths) -> float:
        return abs(removed_weights(found, widths) - wanted)

    most = max(removed_weights(found, widths) for widths in combinations) / total
    if sparsity > most + steps[-1] / 2 / total:
        raise InputError(
            f"width pruning removes at most {most:.1%} of the weights in the blocks of this model, not "
            f"{sparsity:.1%}: lower the sparsity, or {INSTEAD}"
        )
    nearest = min(map(miss, combinations))
    if miss({one.part.consumer: one.part.units for one in found}) == nearest:
        least = min(removed for widths in combinations if (removed := removed_weights(found, widths))) / total
        raise InputError(
            f"width pruning removes {least:.1%} of the weights in the blocks of this model or more, not "
            f"{sparsity:.1%}: raise the sparsity, or {INSTEAD}"
        )
    near = [widths for widths in combinations if miss(widths) <= max(nearest, steps[-1] / 2)]
    best: dict[tuple[int, ...], Widths] = {}
    for widths in sorted(near, key=miss):
        heads = tuple(widths[one.part.consumer] for one in found if one.part.size > 1)
        if removed_weights(found, widths):
            best.setdefault(heads, widths)
    return list(best.values())


@torch.no_grad()
def cheapest(
    model: nn.Module,
    blocks: Sequence[Block],
    found: Sequence[Narrowable],
    options: Sequence[Widths],
    windows: Windows,
    stage: Stage,
    tick: Tick,
) -> Widths:
    """Of ``options`` the one that changes the outputs of the dense blocks least.

    What a block's outputs change by, ‖ΔY‖² over its parts, is told by the solver, and counted relative to what it hands
    on, ‖h‖²; the sum over blocks decides. One window in ``PLANNING_SHARE`` is looked at.
    """
    if len(options) == 1:
        return options[0]
    ids = windows.ids[::PLANNING_SHARE]
    replay = capture(model, blocks, ids)
    stage.receive(replay)
    totals = [0.0] * len(options)
    for index, block in enumerate(blocks):
        layers: dict[str, LinearLayer] = {layer.name.removeprefix(f"{block.name}."): layer for layer in block.layers}
        consumers = [layers[one.part.consumer] for one in found]
        handed_on = 0.0
        with stage.holding(block.module):
            with Collector(consumers, "gram", ids.numel(), stop=False) as collector:
                for batch in range(len(replay.hidden)):
                    hidden = collector.run(lambda batch=batch: stage.run(replay, index, batch, block.module))  # type: ignore[misc]  # noqa: B023
                    assert isinstance(hidden, Tensor)
                    stage.keep(replay, batch, hidden)
                    handed_on += float(hidden.float().square().sum())
                    tick()
            seen = collector.results()
            for one in found:
                layer = layers[one.part.consumer]
                gone = [one.part.units - widths[one.part.consumer] for widths in options]
                costs = _costs(layer, seen.pop(layer.name).statistic, one.part, max(gone))
                for place, count in enumerate(gone):
                    totals[place] += costs[count] / handed_on
                tick()
    return options[min(range(len(options)), key=totals.__getitem__)]


def _costs(layer: LinearLayer, gram: Tensor | None, part: Part, count: int) -> list[float]:
    """What removing none, one … ``count`` units costs; nothing where it cannot be told."""
    if gram is None:
        return [0.0] * (count + 1)
    try:
        return [0.0, *removal_order(layer.weight(), gram, part.size, count).costs.tolist()]
    except UnusableStatisticsError:
        return [0.0] * (count + 1)
