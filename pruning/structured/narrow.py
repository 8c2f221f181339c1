"""Narrows one block: which units go, what the layers that read the others become, and what that did."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pruning.anatomy import Block, LinearLayer
from pruning.errors import RunError
from pruning.report import LayerReport
from pruning.statistics import Observed, UnusableStatisticsError
from pruning.structured.parts import Part
from pruning.structured.rows import Rows, narrowed
from pruning.structured.select import compensated, removal_order
from pruning.transform import cast

Collect = Callable[[Sequence[LinearLayer]], dict[str, Observed]]
"""What the layers are given on the calibration text, by name."""

Choose = Callable[[Tensor, Tensor, Part, int], Tensor]
"""Of a layer's weight (out, in), the Gram matrix of its inputs, the part and how many: the units to keep (kept,)."""


@dataclass(frozen=True)
class Target:
    """How many units of ``part`` each block keeps, and which rows are theirs."""

    part: Part
    rows: Rows
    keep: int


@dataclass(frozen=True)
class Narrowed:
    """The parameters of a narrowed block by name, the reports of its layers, and in words what it lost."""

    tensors: dict[str, Tensor]
    layers: tuple[LayerReport, ...]
    removed: str


def greedy(weight: Tensor, gram: Tensor, part: Part, keep: int) -> Tensor:
    """The units to keep when the others go one after another, each time the one that then costs least."""
    gone = removal_order(weight, gram, part.size, part.units - keep).groups
    left = torch.ones(part.units, dtype=torch.bool, device=weight.device)
    left[gone] = False
    return left.nonzero().squeeze(1)


def narrow(
    block: Block,
    targets: Sequence[Target],
    collect: Collect,
    asked: float,
    *,
    choose: Choose = greedy,
    compensate: bool = True,
) -> Narrowed:
    """What ``targets`` make of ``block``, whose own consumers are changed on the way; ``asked`` goes into the reports.

    A part that comes later is chosen from what it is given once those before it are narrower. Raises RunError where
    weights or statistics are not finite.
    """
    layers = {layer.name.removeprefix(f"{block.name}."): layer for layer in block.layers}
    sizes = {name: layer.weight().numel() for name, layer in layers.items()}
    choices: list[tuple[Part, Rows, Tensor]] = []
    reports: dict[str, LayerReport] = {}
    words: list[str] = []
    for target in targets:
        part, layer = target.part, layers[target.part.consumer]
        if target.keep == part.units:
            continue
        seen = collect([layer])[layer.name]
        started = time.perf_counter()
        dense = layer.weight().clone()
        kept, weight, note = _solve(block, layer, target, seen, choose, compensate)
        columns = part.columns(kept)
        # The inputs that go are multiplied by zero until all is decided: the block gives what it will give.
        full = torch.zeros_like(dense)
        full[:, columns] = cast(weight, dense.dtype)
        layer.set_weight(full)
        choices.append((part, target.rows, kept))
        gone = sorted(set(range(part.units)) - set(kept.tolist()))
        names = f" ({', '.join(map(str, gone))})" if part.size > 1 else ""
        words.append(f"{len(gone)} of {part.units} {part.title}{names}")
        reports[part.consumer] = LayerReport(
            name=layer.name,
            shape=(dense.shape[0], dense.shape[1]),
            requested_sparsity=asked,
            sparsity=1 - len(columns) / dense.shape[1],
            seconds=time.perf_counter() - started,
            note=note,
            tokens=seen.tokens,
            sampled=len(seen.sample) if seen.sample is not None else 0,
            output_error=_error(dense, full, seen.sample) if seen.sample is not None else None,
        )
        del seen
    tensors = narrowed(block.module, choices)
    for path, layer in layers.items():
        if path not in reports:
            left = tensors[f"{path}.weight"].numel()
            reports[path] = LayerReport(
                name=layer.name,
                shape=(layer.out_features, layer.in_features),
                requested_sparsity=asked,
                sparsity=1 - left / sizes[path],
                seconds=0.0,
            )
    removed = f"{block.name}: {', '.join(words)}"
    return Narrowed(tensors, tuple(reports[path] for path in layers), removed)


def _solve(
    block: Block, layer: LinearLayer, target: Target, seen: Observed, choose: Choose, compensate: bool
) -> tuple[Tensor, Tensor, str | None]:
    """The units to keep in ascending order, the weights (out, kept inputs), and what was not done as asked."""
    weight, gram, part = layer.weight(), seen.statistic, target.part
    for values, what in ((weight, "the weights of"), (gram, "what is given on the calibration text to")):
        if values is None or not bool(torch.isfinite(values).all()):
            raise RunError(
                f"{what} {layer.name} in block {block.name} are not finite numbers (NaN or infinity): the model is "
                "damaged, or its numbers pass the range of its dtype; try --dtype float32"
            )
    assert gram is not None
    try:
        kept = choose(weight, gram, part, target.keep)
        columns = part.columns(kept)
        return kept, compensated(weight, gram, columns) if compensate else weight[:, columns], None
    except UnusableStatisticsError as error:
        strengths = (weight.float().square().sum(dim=0) * gram.diagonal()).view(part.units, part.size).sum(dim=1)
        kept = strengths.sort(descending=True, stable=True).indices[: target.keep].sort().values
        return kept, weight[:, part.columns(kept)], f"chosen by strength alone: {error}"


def _error(dense: Tensor, result: Tensor, sample: Tensor) -> float:
    inputs = sample.float()
    norm = float((inputs @ dense.float().T).norm())
    return float((inputs @ (dense.float() - result.float()).T).norm()) / norm if norm > 0 else 0.0
