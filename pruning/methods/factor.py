"""Cholesky factors of Gram matrices: dampened more where they are not positive definite, kept while one is in use."""

import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from pruning.statistics import UnusableStatisticsError

RETRIES = 4
"""How often a matrix is dampened, ten times more at every retry."""

_Result = TypeVar("_Result")


def dampened_cholesky(matrix: Tensor, damping: float, mean: Tensor) -> tuple[Tensor, Tensor]:
    """The lower Cholesky factor of ``matrix`` with ``damping`` × ``mean`` (or ten times as much, …) on its diagonal.

    ``matrix`` is changed: the sum is what comes back beside the factor. Raises UnusableStatisticsError when it is not
    positive definite however much is added.
    """
    diagonal = matrix.diagonal().clone()
    for retry in range(RETRIES):
        matrix.diagonal().copy_(diagonal + damping * 10**retry * mean)
        lower, failed = torch.linalg.cholesky_ex(matrix)
        if not bool(failed) and bool(torch.isfinite(lower.sum())):
            return lower, matrix
    most = damping * 10 ** (RETRIES - 1)
    raise UnusableStatisticsError(f"the Gram matrix is not positive definite, even dampened by {most:g} of its mean")


class Memory:
    """Remembers what was last computed from a statistic, so that layers that share an input share the work.

    One result is kept, and only while the very tensor it was computed from is in use and unchanged.
    """

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._source: weakref.ref[Tensor] | None = None
        self._result: object = None

    def get(self, source: Tensor, compute: Callable[[Tensor], _Result], like: Tensor) -> _Result:
        """``compute`` of ``source`` in the dtype and on the device of ``like``."""
        key = (source._version, compute, like.dtype, like.device)
        if self._source is None or self._source() is not source or self._key != key:
            self._forget(None)  # before the next is made: one is in memory at a time
            result = compute(source.to(like))
            self._source, self._key, self._result = weakref.ref(source, self._forget), key, result
            return result
        return self._result  # type: ignore[return-value]  # what this very function returned

    def _forget(self, gone: object) -> None:
        if gone is None or gone is self._source:
            self._source = self._key = self._result = None
