"""What a pruning method may know of a layer's inputs: gathered over calibration batches, once per shared input."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import torch
from torch import Tensor, nn

from pruning.anatomy import ExpertLayer, LinearLayer, expert_tensors
from pruning.errors import RunError
from pruning.experts import ExpertTensor, ExpertWatch, one_expert_at_a_time
from pruning.methods import Statistics

_Result = TypeVar("_Result")

STRIP = 256
"""Least columns of the Gram matrix that are computed in one product."""

SAMPLE = 256
"""Most rows of a layer's input that are kept as they are."""


class UnusableStatisticsError(ArithmeticError):
    """A method cannot work with these statistics: the caller falls back to a method that needs less."""


@dataclass(frozen=True)
class Observed:
    """What one layer was given.

    ``statistic`` are the norms (in,) or the Gram matrix (in, in) of its inputs, None when no token reached the layer
    or none was asked for. ``sample`` are up to ``SAMPLE`` of its input rows (rows, in) in their own dtype, evenly
    spaced, None when no token reached it; ``tokens`` is how many did. ``norms`` stand beside a Gram matrix where both
    were asked for: to the bit what they are when they are asked for alone, which its diagonal is not.
    """

    statistic: Tensor | None
    sample: Tensor | None
    tokens: int
    norms: Tensor | None = None


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


class InputSample:
    """Rows of the inputs, evenly spaced over the ``expected`` ones, or over those seen where they are more."""

    def __init__(self, expected: int = 0) -> None:
        self._step = max(SAMPLE, expected)  # of every so many rows, SAMPLE are kept
        self._rows: Tensor | None = None
        self.tokens = 0

    def add(self, inputs: Tensor) -> None:
        """Count ``inputs`` (tokens, features); copies of some are kept."""
        end = self.tokens + len(inputs)
        wanted = range(-(-self.tokens * SAMPLE // self._step), -(-end * SAMPLE // self._step))
        places = [index * self._step // SAMPLE - self.tokens for index in wanted]
        self.tokens = end
        if not places:
            return
        rows = inputs[torch.tensor(places, device=inputs.device)]
        self._rows = rows if self._rows is None else torch.cat([self._rows, rows])
        while len(self._rows) > 2 * SAMPLE:
            self._rows = self._rows[::2]
            self._step *= 2

    def result(self) -> Tensor | None:
        """Up to ``SAMPLE`` rows (rows, features) as they came, or None when nothing was counted."""
        if self._rows is None or len(self._rows) <= SAMPLE:
            return self._rows
        chosen = [index * len(self._rows) // SAMPLE for index in range(SAMPLE)]
        return self._rows[torch.tensor(chosen, device=self._rows.device)]


def _precise(inputs: Tensor) -> Tensor:
    return inputs if inputs.dtype == torch.float64 else inputs.float()


def _same(seen: tuple[Tensor, int], inputs: Tensor) -> bool:
    return seen[0] is inputs and seen[1] == inputs._version  # the version counts changes made in place


class _EveryLayerSeenError(Exception):
    """Ends a forward pass of which nothing more is needed."""


class _Inputs:
    """All that is gathered of one input: its statistic, its sample, and how many tokens there were."""

    def __init__(self, kind: Statistics, expected: int, norms: bool) -> None:
        self._sum: InputNorms | InputGram | None = None
        if kind != "none":
            self._sum = InputNorms() if kind == "norms" else InputGram()
        self._norms = InputNorms() if norms and kind == "gram" else None
        self._sample = InputSample(expected)

    def add(self, inputs: Tensor) -> None:
        if self._sum is not None:
            self._sum.add(inputs)
        if self._norms is not None:
            self._norms.add(inputs)
        self._sample.add(inputs)

    def result(self) -> Observed:
        statistic = self._sum.result() if self._sum is not None else None
        norms = self._norms.result() if self._norms is not None else None
        return Observed(statistic, self._sample.result(), self._sample.tokens, norms)


class Collector:
    """Listens to the inputs of ``layers`` while a block runs, over ``tokens`` calibration tokens in all.

    Layers that are given the very same tensor share one statistic. The first batch shows which those are; if it calls
    every layer exactly once, later batches stop before the last matrix product, unless ``stop`` is false. ``norms`` are
    gathered beside a Gram matrix where that is asked for. Experts in one tensor run one at a time meanwhile, and each
    is given the tokens that were routed to it.
    """

    def __init__(
        self, layers: Sequence[LinearLayer], kind: Statistics, tokens: int, *, stop: bool = True, norms: bool = False
    ) -> None:
        self._layers = layers
        self._experts = expert_tensors(layers)
        self._kind = kind
        self._tokens = tokens
        self._stop = stop
        self._norms = norms
        self._leader: dict[str, str] = {}
        self._gathered: dict[str, _Inputs] = {}
        self._calls: list[str] = []
        self._inputs: dict[str, tuple[Tensor, int]] = {}
        self._first = True
        self._once = False

    def __enter__(self) -> Self:
        self._handles = [
            layer.module.register_forward_pre_hook(self._hook(layer.name), with_kwargs=True)
            for layer in self._layers
            if not isinstance(layer, ExpertLayer)
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def run(self, forward: Callable[[], _Result]) -> _Result | None:
        """Run one batch through the block by calling ``forward``; what it returns, or None where it was cut short."""
        self._calls.clear()
        result: _Result | None = None
        try:
            with ExitStack() as experts:
                if self._experts:
                    experts.enter_context(one_expert_at_a_time([tensor.module for tensor in self._experts]))
                    experts.enter_context(ExpertWatch(self._experts, self._count_expert))
                result = forward()
        except _EveryLayerSeenError:
            pass
        finally:
            self._inputs.clear()
        if self._first:
            self._first = False
            self._once = self._stop and sorted(self._calls) == sorted(layer.name for layer in self._layers)
        return result

    def results(self) -> dict[str, Observed]:
        """What each layer was given, by name; layers that share their input share one."""
        done = {name: gathered.result() for name, gathered in self._gathered.items()}
        unseen = Observed(statistic=None, sample=None, tokens=0)
        return {layer.name: done.get(self._leader.get(layer.name, layer.name), unseen) for layer in self._layers}

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
        self._add(name, inputs.reshape(-1, inputs.shape[-1]), self._tokens)

    def _count_expert(self, tensor: ExpertTensor, expert: int, transposed: bool, inputs: Tensor) -> None:
        tensor.learn(transposed=transposed)
        self._add(f"{tensor.name}[{expert}]", inputs, 0)  # how many tokens will be routed to it is not known

    def _add(self, name: str, inputs: Tensor, expected: int) -> None:
        if not inputs.numel():
            return
        if name not in self._gathered:
            self._gathered[name] = _Inputs(self._kind, expected, self._norms)
        self._gathered[name].add(inputs.detach())
