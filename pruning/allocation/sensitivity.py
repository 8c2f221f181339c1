"""Sensitivity: what pruning a block, or one kind of layer, was measured to change in the model's output decides."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from pruning.anatomy import Block, LinearLayer
from pruning.calibration import Windows
from pruning.errors import RunError
from pruning.methods import METHODS
from pruning.placement import Stage
from pruning.recipe import PruneStep
from pruning.replay import Replay, capture, logits_of
from pruning.statistics import Collector, Observed
from pruning.transform import UNSEEN, cast
from pruning.walk import Tick

TOKENS = 1024
"""Calibration tokens that are looked at, or one window where that is longer."""

STEP_DOWN = 0.1
"""How far below the sparsity asked for the whole model is pruned a second time, to see how damage grows."""

SPREAD = 0.15
"""How far a layer's sparsity is from the one asked for at most."""

GROWTH = (3.0, 20.0)
"""Bounds of the growth of damage with sparsity: what few tokens say is noisy."""

CHUNK = 64
"""Tokens whose logits are in memory at once."""


@dataclass
class Damage:
    """KL divergence from the dense model's predictions (nats a token) when only one part of it is pruned.

    ``blocks`` in order, ``kinds`` by the name a layer has in its block, ``growth`` the exponent by which the damage
    to the whole model grows with its sparsity.
    """

    blocks: list[float]
    kinds: dict[str, float]
    growth: float


@dataclass
class _Streams:
    """Hidden states of the dense model and of every pruned one, all at the same block of the same batch."""

    dense: Tensor
    blocks: list[Tensor] = field(default_factory=list)
    kinds: dict[str, Tensor] = field(default_factory=dict)
    whole: tuple[Tensor, Tensor] | None = None


def kind_of(block: Block, layer: LinearLayer) -> str:
    """The name of ``layer`` within ``block``; experts of one tensor or list are one kind."""
    return re.sub(r"(?<![^.])\d+(?=\.)|(?<=\[)\d+(?=\])", "*", layer.name.removeprefix(f"{block.name}."))


def wished_shares(blocks: Sequence[Block], damage: Damage, sparsity: float) -> dict[str, float]:
    """The sparsity of each layer that does least damage in all, before the exact total is kept.

    The damage of block b splits over its kinds k as they do alone, c = D_b·D_k / ΣD_k, and grows as exp(a·s). The least
    sum of it under a fixed number of weights has c·exp(a·s)/n equal in all layers of n weights, so that a layer's
    sparsity is a constant less ln(c/n)/a.
    """
    logs: dict[str, float] = {}
    sizes: dict[str, int] = {}
    least = 1e-3 * max([*damage.blocks, *damage.kinds.values(), 1e-12])
    for block, of_block in zip(blocks, damage.blocks, strict=True):
        members: dict[str, int] = {}
        for layer in block.layers:
            kind = kind_of(block, layer)
            members[kind] = members.get(kind, 0) + layer.weight().numel()
        for layer in block.layers:
            kind = kind_of(block, layer)
            each = max(of_block, least) * max(damage.kinds[kind], least) / members[kind]
            logs[layer.name] = math.log(each)
            sizes[layer.name] = layer.weight().numel()
    mean = sum(logs[name] * sizes[name] for name in logs) / sum(sizes.values())
    return {name: sparsity - min(max((value - mean) / damage.growth, -SPREAD), SPREAD) for name, value in logs.items()}


@torch.no_grad()
def measure_damage(
    model: nn.Module, blocks: Sequence[Block], step: PruneStep, windows: Windows, stage: Stage, tick: Tick
) -> Damage:
    """Prune each block alone, each kind of layer alone, and the whole, and see what it changes in the output.

    One walk carries the hidden states of all those models along. Layers are pruned by the method itself where that
    needs no Gram matrix and draws nothing, else by Wanda, which stands in for it. Leaves the model as it was.
    Raises RunError where a prediction is not finite.
    """
    replay = capture(model, blocks, windows.ids[: max(1, TOKENS // windows.ids.shape[1])])
    # Few enough windows to be one batch.
    assert len(replay.hidden) == 1
    stage.receive(replay)
    start = replay.hidden[0]
    kinds = dict.fromkeys(kind_of(block, layer) for block in blocks for layer in block.layers)
    streams = _Streams(start, kinds=dict.fromkeys(kinds, start), whole=(start, start))
    for index, block in enumerate(blocks):
        with stage.holding(block.module):
            _advance(stage, replay, index, block, step, streams, tick)
    dense = streams.dense
    assert streams.whole is not None
    much, less = (_divergence(model, blocks, replay, dense, stream) for stream in streams.whole)
    measured = {}
    for name, stream in streams.kinds.items():
        measured[name] = _divergence(model, blocks, replay, dense, stream)
        tick()
    of_blocks = []
    for stream in streams.blocks:
        of_blocks.append(_divergence(model, blocks, replay, dense, stream))
        tick()
    down = min(STEP_DOWN, step.sparsity / 2)
    growth = math.log(max(much, 1e-12) / max(less, 1e-12)) / down
    return Damage(of_blocks, measured, min(max(growth, GROWTH[0]), GROWTH[1]))


def _advance(
    stage: Stage, replay: Replay, index: int, block: Block, step: PruneStep, streams: _Streams, tick: Tick
) -> None:
    """Take every stream through ``block``: dense, with one kind of its layers pruned, or all of it."""

    def run(hidden: Tensor) -> Tensor:
        stage.keep(replay, 0, hidden)
        tick()
        return stage.run(replay, index, 0, block.module).to(stage.waiting)

    before = streams.dense
    stage.keep(replay, 0, before)
    with Collector(block.layers, "norms", before.shape[0] * before.shape[1], stop=False) as collector:
        after = collector.run(lambda: stage.run(replay, index, 0, block.module))
    assert after is not None
    seen = collector.results()
    streams.dense = after.to(stage.waiting)
    streams.blocks = [run(hidden) for hidden in streams.blocks]
    assert streams.whole is not None
    much, less = streams.whole
    for kind, hidden in streams.kinds.items():
        chosen = [layer for layer in block.layers if kind_of(block, layer) == kind]
        with _pruned(chosen, seen, step, step.sparsity):
            streams.kinds[kind] = run(hidden)
    with _pruned(block.layers, seen, step, step.sparsity):
        streams.blocks.append(run(before))
        much = run(much)
    with _pruned(block.layers, seen, step, step.sparsity - min(STEP_DOWN, step.sparsity / 2)):
        streams.whole = (much, run(less))


@contextmanager
def _pruned(layers: Sequence[LinearLayer], seen: dict[str, Observed], step: PruneStep, share: float) -> Iterator[None]:
    """``layers`` are pruned meanwhile."""
    method = METHODS[step.method]
    if method.statistics == "gram" or method.seeded:
        method = METHODS["wanda"]
    before = [layer.weight().clone() for layer in layers]
    try:
        for layer, weight in zip(layers, before, strict=True):
            statistic = seen.get(layer.name, UNSEEN).statistic
            usable = method if statistic is not None else METHODS["magnitude"]
            layer.set_weight(cast(usable.load()(weight, statistic, share, None), weight.dtype))
        yield
    finally:
        for layer, weight in zip(layers, before, strict=True):
            layer.set_weight(weight)


def _divergence(model: nn.Module, blocks: Sequence[Block], replay: Replay, dense: Tensor, stream: Tensor) -> float:
    """Mean KL divergence (nats a token) of the predictions from ``stream`` to those from ``dense``."""
    home = next(model.parameters()).device
    total = 0.0
    for start in range(0, dense.shape[1], CHUNK):
        sides = [states[:, start : start + CHUNK].to(home) for states in (dense, stream)]
        true, other = (functional.log_softmax(logits_of(model, blocks, replay, side).float(), -1) for side in sides)
        total += float(functional.kl_div(other, true, reduction="sum", log_target=True))
    if not math.isfinite(total):
        raise RunError(
            "what the model predicts on the calibration text, dense or with a part of it pruned, is not finite (NaN or "
            "infinity): the model is damaged, or its numbers pass the range of its dtype; try --dtype float32, or "
            "another allocation"
        )
    return total / (dense.shape[0] * dense.shape[1])
