"""Which rows of which layers feed each unit of a part: seen from gradients, and checked on a narrowed block."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pruning.anatomy import Block
from pruning.replay import Call, capture
from pruning.structured.parts import NotSeparableError, Part
from pruning.structured.smaller import blocks_at, empty_model, move_block

TOKENS = 16
"""How many are run through a block of random weights at once."""

DRAWS = 16
"""Most times other tokens are, until each row let something through: one behind a ReLU may not at first."""

Rows = dict[str, Tensor]
"""The unit that each row of a layer feeds (rows,), by the layer's path in the block."""


def narrowed(block: nn.Module, choices: Sequence[tuple[Part, Rows, Tensor]]) -> dict[str, Tensor]:
    """The parameters of ``block`` with, of each part, only the units that are kept, in ascending order."""
    state = {name: parameter.detach() for name, parameter in block.named_parameters()}
    for part, rows, kept in choices:
        for path, units in rows.items():
            chosen = torch.isin(units.to(kept.device), kept).nonzero().squeeze(1)
            axis = _output_axis(block, path)
            state[f"{path}.weight"] = state[f"{path}.weight"].index_select(axis, chosen)
            if f"{path}.bias" in state:
                state[f"{path}.bias"] = state[f"{path}.bias"][chosen]
        weight = f"{part.consumer}.weight"
        state[weight] = state[weight].index_select(1 - _output_axis(block, part.consumer), part.columns(kept))
    return {name: tensor.contiguous() for name, tensor in state.items()}


def _output_axis(block: nn.Module, path: str) -> int:
    return 1 if isinstance(block.get_submodule(path), Conv1D) else 0


class Probe:
    """A copy of a block in float32 with random weights, and what it is to be called with."""

    def __init__(self, model: nn.Module, blocks: Sequence[Block], ids: Tensor) -> None:
        replay = capture(model, blocks, ids[:1, :TOKENS])
        self._model, self._blocks = model, blocks
        self._generator = torch.Generator().manual_seed(0)
        call = replay.calls[0][0]
        self._call = Call(_precise(call.args), _precise(call.kwargs), call.slot)
        self._like = replay.hidden[0]
        self._block = copy.deepcopy(blocks[0].module).float()
        for module in self._block.modules():
            if isinstance(module, nn.Linear | Conv1D):
                weight, bias = module.weight, module.bias
                scale = weight.shape[0 if isinstance(module, Conv1D) else 1] ** -0.5
                weight.data = self._random(weight) * scale
                if bias is not None:
                    bias.data = self._random(bias) * 0.1

    def rows(self, part: Part) -> Rows:
        """The unit that each row of the producers of ``part`` feeds.

        Raises NotSeparableError where a row feeds none or more than one, or a narrowed block gives another result.
        """
        # By path: for each bit of a unit's number, which rows feed units that have it, and which feed others.
        feeding: dict[str, Tensor] = {}
        for _ in range(DRAWS):
            hidden = self._random(self._like)
            with torch.enable_grad():
                outputs, inputs = self._watched(part, hidden)
                for path, found in self._feeding(part, outputs, inputs).items():
                    feeding[path] = feeding[path] | found if path in feeding else found
            for path, found in feeding.items():
                if bool(found.all(dim=1).any()):
                    raise NotSeparableError(f"what {path} gives is not made of {part.units} independent {part.title}")
            if all(bool(found.any(dim=1).all()) for found in feeding.values()):
                break
        else:
            idle = next(path for path, found in feeding.items() if not bool(found.any(dim=1).all()))
            raise NotSeparableError(f"some of what {idle} gives reaches none of {part.units} {part.title}")
        units = {}
        for path, found in feeding.items():
            bits = 1 << torch.arange(found.shape[0], device=found.device)
            units[path] = (found[:, 0].long() * bits[:, None]).sum(dim=0)
        self._check(part, units, inputs.detach(), hidden)
        return units

    def _feeding(self, part: Part, outputs: dict[str, Tensor], inputs: Tensor) -> dict[str, Tensor]:
        """Which rows of each producer feed units that have a bit set in their number, and not set (bits, 2, rows)."""
        weighted = inputs * self._random(inputs)
        numbers = torch.arange(part.units, device=inputs.device).repeat_interleave(part.size)
        found: dict[str, list[Tensor]] = {path: [] for path in outputs}
        for bit in range(max(1, (part.units - 1).bit_length())):
            set_ = (numbers >> bit) & 1 == 1
            there, absent = (self._feeds(weighted[..., mask], outputs) for mask in (set_, ~set_))
            for path, bits in found.items():
                bits.append(torch.stack([there[path], absent[path]]))
        return {path: torch.stack(bits) for path, bits in found.items()}

    def _watched(self, part: Part, hidden: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outputs: dict[str, Tensor] = {}
        inputs: list[Tensor] = []

        def detach(path: str, output: Tensor) -> Tensor:
            outputs[path] = output.detach().requires_grad_()
            return outputs[path].clone()

        handles = [
            self._block.get_submodule(path).register_forward_hook(
                lambda module, args, output, path=path: detach(path, output)
            )
            for path in part.producers
        ]
        try:
            inputs.append(self._run(self._block, part.consumer, hidden))
        finally:
            for handle in handles:
                handle.remove()
        return outputs, inputs[0]

    def _run(self, block: nn.Module, consumer: str, hidden: Tensor) -> Tensor:
        """What ``consumer`` is given (1, tokens, in) when ``block`` runs."""
        seen: list[Tensor] = []
        handle = block.get_submodule(consumer).register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        try:
            self._call.run(block, hidden)
        finally:
            handle.remove()
        return seen[0]

    def _feeds(self, chosen: Tensor, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Which rows of each producer (rows,) ``chosen`` inputs of the consumer depend on."""
        if not chosen.numel():
            return {path: torch.zeros(o.shape[-1], dtype=torch.bool, device=o.device) for path, o in outputs.items()}
        gradients = torch.autograd.grad(chosen.sum(), list(outputs.values()), retain_graph=True, allow_unused=True)
        return {
            path: torch.zeros(output.shape[-1], dtype=torch.bool, device=output.device)
            if gradient is None
            else (gradient != 0).flatten(0, -2).any(dim=0)
            for (path, output), gradient in zip(outputs.items(), gradients, strict=True)
        }

    @torch.no_grad()
    def _check(self, part: Part, rows: Rows, inputs: Tensor, hidden: Tensor) -> None:
        """Run the block with every other unit and see that the consumer is given what it was given before."""
        count = next((n for n in range(part.units - 1, 0, -1) if part.possible(self._model, n)), None)
        if count is None:
            return
        kept = torch.arange(part.units, device=inputs.device)[-count:]
        made = empty_model(self._model, part.changes(count))
        assert made is not None
        block = blocks_at(made, self._blocks[0])[0].float()
        move_block(self._block, block, narrowed(self._block, [(part, rows, kept)]))
        given = self._run(block.to(inputs.device), part.consumer, hidden)
        expected = inputs[..., part.columns(kept)]
        if given.shape != expected.shape or not torch.allclose(given, expected, rtol=1e-3, atol=1e-5):
            raise NotSeparableError(f"its {part.title} depend on how many of them there are")

    def _random(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self._generator).to(like.device)


def _precise(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_precise(part) for part in value)
    if isinstance(value, dict):
        return {name: _precise(part) for name, part in value.items()}
    return value
