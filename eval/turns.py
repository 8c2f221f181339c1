"""Which of several models decodes faster: timed in turns, so that drift of the machine does not decide."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from torch import Tensor, nn

from eval.latency import LatencyProtocol, time_generation
from pruning.progress import Progress, silent

RESAMPLES = 2000
NOT_FASTER = "not faster"


@dataclass(frozen=True)
class Speed:
    """How many times as fast as another a model is, with the 95% interval of that ratio."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.2f}× as fast" if self.low > 1 else NOT_FASTER


def token_times(
    models: Mapping[str, nn.Module],
    ids: Tensor,
    *,
    rounds: int = 9,
    prompt_tokens: int = 64,
    output_tokens: int = 32,
    progress: Progress = silent,
) -> dict[str, list[float]]:
    """Seconds for each output token of every model, one figure for each of ``rounds``, A B C A B C.

    A figure is the median over the ``output_tokens`` of one greedy generation after a prompt of ``prompt_tokens`` from
    ``ids`` (windows, length). A round before the first warms up and is thrown away.
    """
    protocol = LatencyProtocol(
        prompt_tokens=prompt_tokens, output_tokens=output_tokens, warmup=0, iterations=1, minimum_seconds=0
    )
    samples: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 1):
        for name, model in models.items():
            figure = time_generation(model, ids, protocol, progress=progress).figures["time_per_output_token"]
            if turn:
                samples[name].append(median(figure.samples))
    return samples


def speed(times: Sequence[float], than: Sequence[float], seed: int = 0) -> Speed:
    """How many times as fast ``times`` are as the times ``than``, both in seconds and of the same rounds.

    The ratio is that of the medians; its interval is the percentile bootstrap over rounds, taken in pairs. Raises
    ValueError when there are not as many of both.
    """
    pairs = list(zip(times, than, strict=True))
    if not pairs:
        raise ValueError("no rounds were timed")
    draw = random.Random(seed)
    drawn = sorted(_ratio(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return Speed(_ratio(pairs), drawn[round(0.025 * (RESAMPLES - 1))], drawn[round(0.975 * (RESAMPLES - 1))])


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return median(than for _, than in pairs) / median(one for one, _ in pairs)
