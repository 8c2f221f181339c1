"""A measured figure: its value, its unit, and the samples it came from."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class Figure:
    """One measurement.

    ``low`` and ``high`` bound a 95% interval, ``p50`` and ``p95`` are percentiles of ``samples``; all are in ``unit``
    and absent where they do not exist. ``value`` is absent when the measurement gave no number (a collapsed model).
    """

    value: float | int | None
    unit: str
    low: float | None = None
    high: float | None = None
    p50: float | None = None
    p95: float | None = None
    samples: tuple[float, ...] = field(default=())

    @classmethod
    def from_samples(cls, samples: Sequence[float], unit: str) -> Self:
        """The median of ``samples`` with its percentiles. Raises ValueError without samples."""
        if not samples:
            raise ValueError("a figure needs at least one sample")
        median = statistics.median(samples)
        return cls(value=median, unit=unit, p50=median, p95=percentile(samples, 95), samples=tuple(samples))

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: ``value`` and ``unit`` always, the rest only where it exists; NaN and inf become absent.

        A sample that is not finite becomes null in its place, so that samples of two variants still pair up.
        """
        finite = {name: _finite(value) for name, value in asdict(self).items()}
        finite["samples"] = [_finite(sample) for sample in self.samples] or None
        return {name: value for name, value in finite.items() if value is not None or name == "value"}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def percentile(samples: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest ranks (Hyndman and Fan 1996, type 7)."""
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = math.ceil(place)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
