"""The walk: block by block, collect what a method must know, prune, quantize, and feed the next block."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pruning.anatomy import Block, LinearLayer, decoder_blocks
from pruning.calibration import Windows
from pruning.errors import InputError, RunError
from pruning.mask import removal_count
from pruning.methods import METHODS
from pruning.progress import Progress, silent
from pruning.recipe import PruneStep, Recipe
from pruning.replay import Replay, capture
from pruning.statistics import Collector, UnusableStatisticsError

PHASE = "compressing"
UNIT = "blocks"


@dataclass(frozen=True)
class LayerReport:
    """What was done to one layer.

    ``sparsity`` is the share of zeros counted afterwards; ``seconds`` are those of pruning and quantizing alone;
    ``note`` says where the layer was not treated as asked.
    """

    name: str
    shape: tuple[int, int]
    requested_sparsity: float
    sparsity: float
    seconds: float
    note: str | None = None


@dataclass(frozen=True)
class CompressionReport:
    """What was done to every layer, and the wall time of the whole compression."""

    layers: tuple[LayerReport, ...]
    seconds: float


def compress(
    model: nn.Module, recipe: Recipe, windows: Windows | None, *, progress: Progress = silent
) -> CompressionReport:
    """Compress ``model`` in place, in eval mode and on the device it is on.

    Layers are pruned in float32 (float64 stays) and cast back once; with a sparsity of 0 no weight is touched.
    Quantized layers are replaced by :class:`pruning.quantize.int8.Int8Linear`. Statistics of a block come from the
    outputs of the compressed blocks before it. Raises InputError before any work when the recipe does not fit the
    model or needs windows that are not there, RunError when weights or activations are not finite, and lets
    through what ``progress`` raises.
    """
    started = time.perf_counter()
    blocks = decoder_blocks(model)
    prune = recipe.prune if recipe.prune is not None and recipe.prune.sparsity > 0 else None
    kind = METHODS[prune.method].statistics if prune is not None else "none"
    if prune is not None:
        _check_widths(blocks, prune)
    if kind != "none":
        _check_windows(model, recipe, windows)
    model.eval()
    reports: list[LayerReport] = []
    with torch.no_grad():
        progress(PHASE, 0, len(blocks), UNIT)
        replay = capture(model, blocks, windows.ids) if kind != "none" and windows is not None else None
        for index, block in enumerate(blocks):

            def tick(done: int = index) -> None:
                progress(PHASE, done, len(blocks), UNIT)

            statistics: dict[str, Tensor | None] = {}
            if replay is not None and kind != "none":
                statistics = _collect(block, index, replay, Collector(block.layers, kind), tick)
            for layer in block.layers:
                reports.append(_transform(model, block, layer, recipe, prune, statistics.pop(layer.name, None)))
                tick()
            if replay is not None and index + 1 < len(blocks):
                _propagate(block, index, replay, tick)
            progress(PHASE, index + 1, len(blocks), UNIT)
    return CompressionReport(tuple(reports), time.perf_counter() - started)


def _check_widths(blocks: list[Block], prune: PruneStep) -> None:
    if prune.pattern is None:
        return
    for block in blocks:
        for layer in block.layers:
            if layer.in_features % prune.pattern.group:
                raise InputError(
                    f"pattern {prune.pattern} does not fit {layer.name}: its {layer.in_features} inputs are no "
                    f"multiple of {prune.pattern.group}; choose a sparsity without a pattern"
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


def _collect(
    block: Block, index: int, replay: Replay, collector: Collector, tick: Callable[[], None]
) -> dict[str, Tensor | None]:
    with collector:
        for batch in range(len(replay.hidden)):
            collector.run(lambda batch=batch: replay.run(index, batch, block.module))  # type: ignore[misc]
            tick()
    return collector.results()


def _propagate(block: Block, index: int, replay: Replay, tick: Callable[[], None]) -> None:
    for batch in range(len(replay.hidden)):
        replay.hidden[batch] = replay.run(index, batch, block.module)
        tick()


def _transform(
    model: nn.Module,
    block: Block,
    layer: LinearLayer,
    recipe: Recipe,
    prune: PruneStep | None,
    statistics: Tensor | None,
) -> LayerReport:
    started = time.perf_counter()
    note = None
    weight = layer.weight()
    _check_finite(weight, f"the weights of {layer.name} in block {block.name}")
    if prune is not None and removal_count(weight.numel(), prune.sparsity) > 0:
        if statistics is not None:
            _check_finite(statistics, f"what {layer.name} in block {block.name} was given on the calibration text")
        pruned, note = _prune(weight, statistics, prune)
        layer.set_weight(_cast(pruned, weight.dtype))
    zeros = layer.weight()
    if recipe.quantize is not None:
        zeros = _quantize(model, layer)
    return LayerReport(
        name=layer.name,
        shape=(weight.shape[0], weight.shape[1]),
        requested_sparsity=prune.sparsity if prune is not None else 0.0,
        sparsity=1 - int(zeros.count_nonzero()) / weight.numel(),
        seconds=time.perf_counter() - started,
        note=note,
    )


def _prune(weight: Tensor, statistics: Tensor | None, step: PruneStep) -> tuple[Tensor, str | None]:
    method = METHODS[step.method]
    if method.needs_calibration and statistics is None:
        pruned = METHODS["magnitude"].load()(weight, None, step.sparsity, step.pattern)
        return pruned, "pruned by magnitude: no calibration token reached it"
    try:
        return method.load()(weight, statistics, step.sparsity, step.pattern), None
    except UnusableStatisticsError as error:
        assert statistics is not None
        norms = statistics.diagonal().sqrt()
        return METHODS["wanda"].load()(weight, norms, step.sparsity, step.pattern), f"pruned by Wanda: {error}"


def _cast(pruned: Tensor, dtype: torch.dtype) -> Tensor:
    """``pruned`` in ``dtype``, in which a kept weight too small for it becomes the smallest there is, not zero."""
    cast = pruned.to(dtype)
    if dtype == torch.float16:
        limits = torch.finfo(dtype)
        smallest = torch.full_like(cast, limits.smallest_normal * limits.eps).copysign(pruned.to(dtype))
        cast = torch.where((cast == 0) & (pruned != 0), smallest, cast)
    return cast


def _quantize(model: nn.Module, layer: LinearLayer) -> Tensor:
    from pruning.quantize.int8 import Int8Linear, quantize_rows

    codes, scale = quantize_rows(layer.weight())
    parent, _, leaf = layer.name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, Int8Linear(codes, scale, layer.bias))
    return codes


def _check_finite(values: Tensor, what: str) -> None:
    if not bool(torch.isfinite(values).all()):
        raise RunError(
            f"{what} are not finite numbers (NaN or infinity): the model is damaged, or its numbers pass the range of "
            "its dtype; try --dtype float32"
        )
