"""Confidence intervals of a mean from few samples, without torch or SciPy."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev


def mean_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Student's t interval of the mean of ``samples``; None with fewer than two samples or one that is not finite."""
    if len(samples) < 2 or not all(math.isfinite(sample) for sample in samples):
        return None
    mean = fmean(samples)
    half = student_t(len(samples) - 1, confidence) * stdev(samples) / math.sqrt(len(samples))
    return mean - half, mean + half


def student_t(freedom: int, confidence: float) -> float:
    """The t for which a variable of Student's distribution lies in [-t, t] with probability ``confidence``.

    ``freedom`` is a whole number of degrees of freedom, at least 1; ``confidence`` lies strictly between 0 and 1.
    """
    low, high = 0.0, 1.0
    while _two_sided_probability(high, freedom) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if _two_sided_probability(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _two_sided_probability(t: float, freedom: int) -> float:
    """P(-t <= T <= t) as a finite sum: Abramowitz and Stegun, 26.7.3 (odd freedom) and 26.7.4 (even freedom)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
