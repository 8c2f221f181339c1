"""Finds what can be narrowed in every block alike: FFN channels, and groups of attention heads."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pruning.anatomy import Block, ExpertLayer
from pruning.errors import InputError
from pruning.experts import find_experts
from pruning.structured.smaller import Changes, blocks_at, changed_config, empty_model, shapes, text_config

_FFN_WIDTH = re.compile(r"intermediate|ffn|inner|mlp")

INSTEAD = "choose depth, which removes whole blocks, or a method that removes single weights"


class NotSeparableError(ValueError):
    """A part of a block cannot be narrowed; the message is the reason, to be read after "as"."""


@dataclass(frozen=True)
class Part:
    """A part of every block that is made of ``units`` alike: FFN channels, or KV groups of attention heads.

    Each unit is ``size`` consecutive inputs of the layer ``consumer`` (its path in the block) and rows of the layers
    ``producers``. In a configuration the number of units is that of ``attributes``, times what stands there; ``fixed``
    are values that go without saying as long as nothing is changed.
    """

    title: str
    units: int
    size: int
    consumer: str
    producers: tuple[str, ...]
    attributes: dict[str, int]
    fixed: Changes

    def changes(self, units: int) -> Changes:
        """What the configuration of a model with so many units says."""
        return {**{name: units * times for name, times in self.attributes.items()}, **self.fixed}

    def columns(self, kept: Tensor) -> Tensor:
        """The inputs of the consumer that belong to the units ``kept``, in their order."""
        return (kept[:, None] * self.size + torch.arange(self.size, device=kept.device)).flatten()

    def possible(self, model: nn.Module, units: int) -> bool:
        """Whether the configuration of ``model`` takes so many."""
        try:
            changed_config(model, self.changes(units))
        except Exception:  # a class may refuse values in any way it likes
            return False
        return True


@dataclass(frozen=True)
class _Difference:
    """How blocks differ in a model of another configuration: rows of ``producers``, inputs of ``consumer``."""

    consumer: str
    producers: tuple[str, ...]
    before: int
    after: int


def check_alike(model: nn.Module, blocks: Sequence[Block]) -> None:
    """Raises InputError where ``blocks`` cannot all be narrowed in the same way."""
    name = type(model).__name__
    for block in blocks:
        if any(isinstance(layer, ExpertLayer) for layer in block.layers) or find_experts(block.module)[1]:
            raise InputError(f"width pruning does not apply to {name}, which has experts: {INSTEAD}")
    if any(shapes(block.module) != shapes(blocks[0].module) for block in blocks):
        raise InputError(f"width pruning needs blocks that are alike, and those of {name} are not: {INSTEAD}")


def ffn_channels(model: nn.Module, blocks: Sequence[Block]) -> Part:
    """The channels between the layers of the FFN.

    Raises NotSeparableError where no number in the configuration is theirs alone.
    """
    config = text_config(model)
    values = config.to_dict()
    for name in sorted(values, key=lambda name: name != "intermediate_size"):
        value = values[name]
        if not _FFN_WIDTH.search(name) or not (value is None or (type(value) is int and value > 1)):
            continue
        other = value // 2 if value is not None else 3 * config.hidden_size
        found = _difference(model, blocks, {name: other})
        if found is not None and found.after == other and value in (None, found.before):
            return Part("FFN channels", found.before, 1, found.consumer, found.producers, {name: 1}, {})
    raise NotSeparableError("no number in its configuration makes its FFN narrower and changes nothing else")


def head_groups(model: nn.Module, blocks: Sequence[Block]) -> Part:
    """Groups of attention heads that share keys and values. Raises NotSeparableError as :func:`ffn_channels` does."""
    config = text_config(model)
    heads: int = config.num_attention_heads
    names = ("num_key_value_heads", "num_kv_heads")
    key_value = next((name for name in names if isinstance(getattr(config, name, None), int)), None)
    groups: int = heads if key_value is None else getattr(config, key_value)
    if groups < 2 or heads % groups:
        raise NotSeparableError("its attention heads all share one group of keys and values")
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    attributes = {"num_attention_heads": heads // groups} | ({} if key_value is None else {key_value: 1})
    title = "attention heads" if groups == heads else "KV groups"
    for units in range(1, groups):
        part = Part(title, groups, 0, "", (), attributes, {"head_dim": width})
        found = _difference(model, blocks, part.changes(units))
        if found is not None and found.before * units == found.after * groups:
            size = found.before // groups
            return Part(title, groups, size, found.consumer, found.producers, attributes, part.fixed)
    raise NotSeparableError("its configuration takes no smaller number of attention heads of the same width")


def _difference(model: nn.Module, blocks: Sequence[Block], changes: Changes) -> _Difference | None:
    """What ``changes`` make of the blocks, where that is a part of its own and the same in all of them."""
    made = empty_model(model, changes)
    if made is None:
        return None
    inside = tuple(f"{block.name}." for block in blocks)
    # A model without memory has nothing tied: each name counts.
    before, after = (
        {n: p.shape for n, p in m.named_parameters(remove_duplicate=False) if not n.startswith(inside)}
        for m in (model, made)
    )
    if before != after:
        return None
    seen = [_block_difference(block, new) for block, new in zip(blocks, blocks_at(made, blocks[0]), strict=True)]
    return seen[0] if all(one == seen[0] for one in seen) else None


def _block_difference(block: Block, new: nn.Module) -> _Difference | None:
    before, after = shapes(block.module), shapes(new)
    if before.keys() != after.keys():
        return None
    changed = {name for name in before if before[name] != after[name]}
    consumers: dict[str, tuple[int, int]] = {}
    producers: list[str] = []
    for layer in block.layers:
        path = layer.name.removeprefix(f"{block.name}.")
        weight = f"{path}.weight"
        if weight not in changed:
            continue
        axis = 1 if isinstance(layer.module, Conv1D) else 0
        rows = before[weight][axis] != after[weight][axis]
        columns = before[weight][1 - axis] != after[weight][1 - axis]
        if rows == columns:
            return None
        if columns:
            consumers[path] = (before[weight][1 - axis], after[weight][1 - axis])
        else:
            producers.append(path)
            changed.discard(f"{path}.bias")
        changed.discard(weight)
    if changed or len(consumers) != 1 or not producers:
        return None
    ((consumer, (old, now)),) = consumers.items()
    return _Difference(consumer, tuple(producers), old, now)
