"""Forces whose kernels quantized layers run on, which is otherwise found by timing them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pruning.quantize import int4, int8


def own_where_possible(patch: pytest.MonkeyPatch) -> None:
    """Layers that are prepared from here on take our own kernels wherever there are any."""
    patch.setattr(int8, "int8_way", lambda device, dtype, *shape: _own(int8.own_kernels(device, dtype)))
    patch.setattr(int4, "int4_way", lambda device, dtype, *shape: _own(int4.own_kernels(device, dtype)))


def never_own(patch: pytest.MonkeyPatch) -> None:
    """Layers that are prepared from here on take ATen's kernels, or none."""
    patch.setattr(int8, "int8_way", lambda *given: "aten" if int8.has_int8_kernel(*given) else None)
    patch.setattr(int4, "int4_way", lambda *given: "aten" if int4.has_int4_kernel(*given) else None)


@contextmanager
def forced(way: str) -> Iterator[None]:
    """Within it, :func:`own_where_possible` for "poda" and :func:`never_own` for "aten"."""
    with pytest.MonkeyPatch.context() as patch:
        (own_where_possible if way == "poda" else never_own)(patch)
        yield


def _own(found: object) -> str | None:
    return "poda" if found is not None else None
