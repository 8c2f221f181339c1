"""What a pruning method may know of a layer's inputs: gathered over calibration batches, once per shared input."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, Self

import torch
from torch import Tensor, nn

from pruning.anatomy import LinearLayer
from pruning.errors import RunError

STRIP = 256
"""Least columns of the Gram matrix that are computed in one product."""


class UnusableStatisticsError(ArithmeticError):
    """A method cannot work with these statistics: the caller falls back to a method that needs less."""


class InputNorms:
    """The L2 norm of every input feature, over all tokens."""

    def __init__(self) -> None:
        self._squares: Tensor | None = None

    def add(self, inputs: Tensor) -> None:
        """Count ``inputs`` (tokens, features)."""
        squares = _precise(inputs).square().sum(dim=0)
        self._squares = squares if self._squares is None else self._squares.add_(squares)

    def result(self) -> Tensor | None:
        """The norms (features,), or None when nothing was counted."""
        return None if self._squares is None else self._squares.sqrt()


class InputGram:
    """XᵀX of all inputs X (tokens, features)."""

    def __init__(self) -> None:
        self._gram: Tensor | None = None

    def add(self, inputs: Tensor) -> None:
        """Count ``inputs`` (tokens, features). Only the upper half is computed, in strips."""
        tokens = _precise(inputs)
        features = tokens.shape[1]
        if self._gram is None:
            self._gram = tokens.new_zeros(features, features)
        strip = max(STRIP, -(-features // 8))
        for start in range(0, features, strip):
            rows = tokens[:, start : start + strip]
            self._gram[start : start + strip, start:].addmm_(rows.T, tokens[:, start:])

    def result(self) -> Tensor | None:
        """The whole symmetric matrix (features, features), or None when nothing was counted."""
        return None if self._gram is None else self._gram.triu().add_(self._gram.triu(1).T)


def _precise(inputs: Tensor) -> Tensor:
    return inputs if inputs.dtype == torch.float64 else inputs.float()


def _same(seen: tuple[Tensor, int], inputs: Tensor) -> bool:
    return seen[0] is inputs and seen[1] == inputs._version  # the version counts changes made in place


class _EveryLayerSeenError(Exception):
    """Ends a forward pass of which nothing more is needed."""


class Collector:
    """Listens to the inputs of ``layers`` while a block runs.

    Layers that are given the very same tensor share one statistic. The first batch shows which those are; if it calls
    every layer exactly once, later batches stop before the last matrix product.
    """

    def __init__(self, layers: Sequence[LinearLayer], kind: Literal["norms", "gram"]) -> None:
        self._layers = layers
        self._make: Callable[[], InputNorms | InputGram] = InputNorms if kind == "norms" else InputGram
        self._leader: dict[str, str] = {}
        self._accumulators: dict[str, InputNorms | InputGram] = {}
        self._calls: list[str] = []
        self._inputs: dict[str, tuple[Tensor, int]] = {}
        self._first = True
        self._once = False

    def __enter__(self) -> Self:
        self._handles = [
            layer.module.register_forward_pre_hook(self._hook(layer.name), with_kwargs=True) for layer in self._layers
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def run(self, forward: Callable[[], object]) -> None:
        """Run one batch through the block by calling ``forward``."""
        self._calls.clear()
        try:
            forward()
        except _EveryLayerSeenError:
            pass
        finally:
            self._inputs.clear()
        if self._first:
            self._first = False
            self._once = sorted(self._calls) == sorted(layer.name for layer in self._layers)

    def results(self) -> dict[str, Tensor | None]:
        """The statistic of each layer by name, None for a layer that was never called; shared ones are one tensor."""
        done = {name: accumulator.result() for name, accumulator in self._accumulators.items()}
        return {layer.name: done.get(self._leader.get(layer.name, layer.name)) for layer in self._layers}

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[object, ...], dict[str, object]], None]:
        def listen(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            inputs = args[0] if args else next(iter(kwargs.values()))
            assert isinstance(inputs, Tensor)
            self._count(name, inputs)
            self._calls.append(name)
            if self._once and len(self._calls) == len(self._layers):
                raise _EveryLayerSeenError

        return listen

    def _count(self, name: str, inputs: Tensor) -> None:
        if name not in self._leader:
            shared = (other for other, seen in self._inputs.items() if _same(seen, inputs))
            self._leader[name] = next(shared, name)
        leader = self._leader[name]
        if leader != name:
            if leader not in self._inputs or not _same(self._inputs[leader], inputs):
                raise RunError(
                    f"{name} and {leader} shared their input in one calibration batch and not in the next: "
                    "use magnitude, which looks at no text"
                )
            return
        self._inputs[name] = (inputs, inputs._version)
        accumulator = self._accumulators.setdefault(name, self._make())
        accumulator.add(inputs.detach().reshape(-1, inputs.shape[-1]))
