"""Runs decoder blocks one at a time on the arguments the whole model would have given them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from pruning.anatomy import Block
from pruning.errors import InputError

BATCH_TOKENS = 2048
"""Tokens run through a block at once."""


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a block; the hidden states go to ``slot``, a position or a keyword."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    slot: int | str

    def run(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """The hidden states (windows, tokens, width) that ``block`` makes of ``hidden``."""
        args, kwargs = list(self.args), dict(self.kwargs)
        if isinstance(self.slot, int):
            args[self.slot] = hidden
        else:
            kwargs[self.slot] = hidden
        return hidden_of(block(*args, **kwargs))


@dataclass
class Replay:
    """What the first block is given, ``hidden`` for each batch, and every block's other arguments.

    ``calls[block][batch]``. Arguments that are equal for all batches are kept once. ``rest`` is what blocks return
    after their hidden states, None where they return those alone.
    """

    hidden: list[Tensor]
    calls: list[list[Call]]
    rest: tuple[Any, ...] | None = None

    def run(self, block: int, batch: int, module: nn.Module) -> Tensor:
        """The outputs of ``module`` on the current hidden states of ``batch``."""
        return self.calls[block][batch].run(module, self.hidden[batch])


def hidden_of(output: Any) -> Tensor:
    """The hidden states in what a block returns, which may be a tuple that starts with them."""
    states = output if isinstance(output, Tensor) else output[0]
    assert isinstance(states, Tensor)
    return states


def capture(model: nn.Module, blocks: Sequence[Block], ids: Tensor) -> Replay:
    """Run ``model`` on ``ids`` (windows, tokens) in batches, with its blocks doing nothing but note their arguments.

    Masks, position embeddings and whatever else a family hands its blocks are kept as they are, per block and per
    batch; only a cache is left out. Raises InputError when the model is not a plain chain of these blocks.
    """
    device = next(model.parameters()).device
    windows = max(1, BATCH_TOKENS // ids.shape[1])
    hidden: list[Tensor] = []
    calls: list[list[Call]] = [[] for _ in blocks]
    kind = _probe(model, blocks[0].module, ids[:1].to(device))
    for start in range(0, len(ids), windows):
        inputs, noted = _note(model, blocks, ids[start : start + windows].to(device), kind)
        hidden.append(inputs)
        for known, call in zip(calls, _share([c[0] for c in calls if c], noted), strict=True):
            known.append(call)
    return Replay(hidden, calls, kind)


def logits_of(model: nn.Module, blocks: Sequence[Block], replay: Replay, hidden: Tensor) -> Tensor:
    """The logits (windows, tokens, vocabulary) that ``model`` makes of the states ``hidden`` after its last block.

    ``hidden`` (windows, tokens, width) is on the device of ``model``; its last norm and its head alone are run.
    """

    def give(index: int, *args: Any, **kwargs: Any) -> Any:
        return hidden if replay.rest is None else (hidden, *replay.rest)

    ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
    parameters = signature(model.forward).parameters
    no_cache = {"use_cache": False} if "use_cache" in parameters else {}
    with _replaced_forwards([block.module for block in blocks], give):
        logits = model(ids, **no_cache).logits
    assert isinstance(logits, Tensor)
    return logits


class _StopForwardError(Exception):
    """Ends the model's forward pass where nothing more is needed."""


def _probe(model: nn.Module, block: nn.Module, ids: Tensor) -> tuple[Any, ...] | None:
    """What the first block returns after its hidden states, or None when it returns them alone."""
    outputs: list[Any] = []

    def stop(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output)
        raise _StopForwardError

    handle = block.register_forward_hook(stop)
    try:
        _forward(model, ids)
    finally:
        handle.remove()
    if not outputs:
        raise _not_a_chain(model)
    return None if isinstance(outputs[0], Tensor) else tuple(outputs[0][1:])


def _note(
    model: nn.Module, blocks: Sequence[Block], ids: Tensor, kind: tuple[Any, ...] | None
) -> tuple[Tensor, list[Call]]:
    calls: list[Call] = []
    states: list[Tensor] = []

    def note(index: int, *args: Any, **kwargs: Any) -> Any:
        call, hidden = _take_apart(args, kwargs)
        # The chain holds only if the blocks are called in order and nothing touches the states between them.
        if index != len(calls) or (states and states[0] is not hidden):
            raise _not_a_chain(model)
        calls.append(call)
        states.append(hidden)
        if len(calls) == len(blocks):
            raise _StopForwardError
        return hidden if kind is None else (hidden, *kind)

    with _replaced_forwards([block.module for block in blocks], note):
        _forward(model, ids)
    if len(calls) != len(blocks):
        raise _not_a_chain(model)
    return states[0], calls


@contextmanager
def _replaced_forwards(modules: Sequence[nn.Module], note: Any) -> Iterator[None]:
    before = [module.__dict__.get("forward") for module in modules]  # others may have replaced it, as accelerate does
    try:
        for index, module in enumerate(modules):
            module.__dict__["forward"] = lambda *args, _index=index, **kwargs: note(_index, *args, **kwargs)
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


def _forward(model: nn.Module, ids: Tensor) -> None:
    parameters = signature(model.forward).parameters
    no_cache = {"use_cache": False} if "use_cache" in parameters else {}
    try:
        model(ids, **no_cache)
    except _StopForwardError:
        return


def _take_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Tensor]:
    kwargs = {name: _without_cache(value) for name, value in kwargs.items()}
    if args and isinstance(args[0], Tensor):
        return Call((None, *map(_without_cache, args[1:])), kwargs, 0), args[0]
    hidden = kwargs.pop("hidden_states", None)
    if not isinstance(hidden, Tensor):
        raise InputError("a decoder block of this model is not given hidden states first: choose another model")
    return Call(tuple(map(_without_cache, args)), kwargs, "hidden_states"), hidden


def _without_cache(value: Any) -> Any:
    return None if hasattr(value, "get_seq_length") else value


def _share(known: Sequence[Call], new: Sequence[Call]) -> Iterator[Call]:
    """``new`` calls, each replaced by the ``known`` one of the same block where all arguments are equal."""
    equal: dict[tuple[int, int], bool] = {}
    for index, call in enumerate(new):
        first = known[index] if known else call
        same = _equal((first.args, first.kwargs), (call.args, call.kwargs), equal)
        yield first if same else call


def _equal(left: Any, right: Any, memory: dict[tuple[int, int], bool]) -> bool:
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        key = (id(left), id(right))
        if key not in memory:
            memory[key] = left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right)
        return memory[key]
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(_equal(a, b, memory) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_equal(left[name], right[name], memory) for name in left)
    return isinstance(left, str | int | float | bool) and bool(left == right)


def _not_a_chain(model: nn.Module) -> InputError:
    return InputError(
        f"{type(model).__name__} does not hand its hidden states from block to block unchanged, so it cannot be "
        "compressed block by block: use magnitude, which needs no calibration"
    )
