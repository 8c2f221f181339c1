"""Where blocks compute and where activations wait: on a GPU only the block being worked on is resident."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pruning.replay import Call, Replay

ACTIVATION_SHARE = 0.25
"""Share of a GPU's free memory that waiting activations may take before they wait on the host."""


class Stage:
    """The device that blocks of ``model`` compute on, one at a time; the model itself stays where it is.

    Where that is the same device nothing is moved.
    """

    def __init__(self, model: nn.Module, device: torch.device | None) -> None:
        self.home = next(model.parameters()).device
        self.device = device if device is not None else self.home
        self.waiting = self.home
        # Originals are kept beside their copies, so that nothing else can come to have their ids.
        self._calls: dict[int, tuple[Call, Call]] = {}
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def moves(self) -> bool:
        """Whether blocks come and go."""
        return self.device != self.home

    def receive(self, replay: Replay) -> None:
        """Put the activations of ``replay`` on the device where they fit, else leave them on the host.

        What blocks were called with in an earlier replay is let go.
        """
        if not self.moves:
            return
        self._calls.clear()
        self._tensors.clear()
        needed = sum(hidden.nbytes for hidden in replay.hidden)
        self.waiting = self.device if needed <= ACTIVATION_SHARE * _free_bytes(self.device) else self.home
        for batch, hidden in enumerate(replay.hidden):
            replay.hidden[batch] = hidden.to(self.waiting)

    @contextmanager
    def holding(self, block: nn.Module) -> Iterator[None]:
        """``block`` is on the device meanwhile, and back home afterwards, changed or not."""
        if not self.moves:
            yield
            return
        block.to(self.device)
        try:
            yield
        finally:
            block.to(self.home)

    def run(self, replay: Replay, index: int, batch: int, block: nn.Module) -> Tensor:
        """The outputs (windows, tokens, width) of ``block`` on the current hidden states of ``batch``."""
        call = replay.calls[index][batch]
        if self.moves:
            call = self._moved(call)
        return call.run(block, replay.hidden[batch].to(self.device))

    def keep(self, replay: Replay, batch: int, hidden: Tensor) -> None:
        """Make ``hidden`` what the next block is given."""
        replay.hidden[batch] = hidden.to(self.waiting)

    def _moved(self, call: Call) -> Call:
        if id(call) not in self._calls:
            self._calls[id(call)] = (call, Call(self._move(call.args), self._move(call.kwargs), call.slot))
        return self._calls[id(call)][1]

    def _move(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = (value, value.to(self.device))
            return self._tensors[id(value)][1]
        if isinstance(value, tuple):
            return tuple(self._move(part) for part in value)
        if isinstance(value, list):
            return [self._move(part) for part in value]
        if isinstance(value, dict):
            return {name: self._move(part) for name, part in value.items()}
        return value


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return 0
