"""How fast a model reads a prompt and writes tokens, timed alone on its device."""

import inspect
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from eval.figures import Figure, percentile
from pruning.progress import Progress, silent

PHASE = "timing"


@dataclass(frozen=True)
class LatencyProtocol:
    """What is timed: ``batch`` prompts of ``prompt_tokens`` read at once, then ``output_tokens`` written for each.

    ``warmup`` iterations of ``warmup_tokens`` come first and are thrown away; then at least ``iterations`` are timed,
    and more until ``minimum_seconds`` have passed. The defaults are a quick look for a variant timed by itself.
    """

    batch: int = 1
    prompt_tokens: int = 256
    output_tokens: int = 32
    warmup: int = 1
    warmup_tokens: int = 8
    iterations: int = 3
    minimum_seconds: float = 2.0


@dataclass(frozen=True)
class Iteration:
    """Seconds of one timed generation: reading the prompt, choosing the first token, then each later token."""

    prefill: float
    first_token: float
    steps: tuple[float, ...]


@dataclass(frozen=True)
class Latency:
    """The four figures of speed, and the protocol as it was really carried out, in words a record can keep."""

    figures: dict[str, Figure]
    protocol: dict[str, object]


def time_generation(
    model: nn.Module,
    ids: Tensor,
    protocol: LatencyProtocol | None = None,
    *,
    progress: Progress = silent,
    clock: Callable[[], float] = time.perf_counter,
) -> Latency:
    """Time greedy generation with a key-value cache after prompts taken from the windows ``ids`` (windows, length).

    The length of the output is forced: a token that would end the text does not. Every token is waited for before the
    next is asked, as a reader of a stream would. Prompts are shortened where the text or the model's context is too
    small for them, and ``protocol`` of the result says so. ``progress`` is called at every token.

    Figures, in seconds: ``prefill_time`` (the forward pass over the prompt), ``time_to_first_token`` (that, and
    choosing the token), ``time_per_output_token`` ((total - time to first token) / (output tokens - 1); the median
    over iterations, while its samples and percentiles are of single tokens), and ``tokens_per_second`` of that
    decoding, in tokens of the whole batch.
    """
    asked = protocol or LatencyProtocol()
    prompt, output_tokens, note = _prompt(model, ids, asked)
    device = next(model.parameters()).device
    done = 0

    def tick() -> None:
        progress(PHASE, min(done, asked.iterations), asked.iterations, "iterations")

    iterations: list[Iteration] = []
    for _ in range(asked.warmup):
        _generate(model, prompt, min(output_tokens, asked.warmup_tokens), clock=clock, tick=tick, device=device)
    started = clock()
    while done < max(1, asked.iterations) or clock() - started < asked.minimum_seconds:
        iterations.append(_generate(model, prompt, output_tokens, clock=clock, tick=tick, device=device))
        done += 1
    tick()
    carried_out: dict[str, object] = asdict(asked) | {
        "prompt_tokens": prompt.shape[1],
        "output_tokens": output_tokens,
        "iterations": len(iterations),
        "decoding": "greedy, length forced, key-value cache, each token waited for",
        "timed": "alone",
    }
    if note is not None:
        carried_out["note"] = note
    return Latency(figures=_figures(iterations, asked.batch), protocol=carried_out)


def _figures(iterations: list[Iteration], batch: int) -> dict[str, Figure]:
    figures = {
        "prefill_time": Figure.from_samples([iteration.prefill for iteration in iterations], "s"),
        "time_to_first_token": Figure.from_samples([iteration.first_token for iteration in iterations], "s"),
    }
    per_token = [sum(iteration.steps) / len(iteration.steps) for iteration in iterations if iteration.steps]
    if per_token:
        steps = [step for iteration in iterations for step in iteration.steps]
        figures["time_per_output_token"] = Figure(
            value=median(per_token), unit="s", p50=median(steps), p95=percentile(steps, 95), samples=tuple(steps)
        )
        figures["tokens_per_second"] = Figure.from_samples([batch / seconds for seconds in per_token], "tokens/s")
    return figures


def _prompt(model: nn.Module, ids: Tensor, asked: LatencyProtocol) -> tuple[Tensor, int, str | None]:
    """The prompts (batch, tokens) that fit, the output tokens that fit after them, and what was shortened, in words."""
    config: Any = getattr(model, "config", None)
    context = getattr(config, "max_position_embeddings", None)
    output_tokens, length, causes = asked.output_tokens, asked.prompt_tokens, []
    if context is not None and length + output_tokens > context:
        output_tokens = min(output_tokens, max(1, context // 2))
        length = min(length, context - output_tokens)
        causes.append(f"the model's context of {context} tokens")
    available = ids.numel() // asked.batch
    if available < length:
        length = available
        causes.append(f"the {ids.numel()} tokens of the evaluation text")
    prompt = ids.reshape(-1)[: asked.batch * length].reshape(asked.batch, length)
    note = None
    if causes:
        note = f"shortened to {length} prompt and {output_tokens} output tokens by {' and '.join(causes)}"
    return prompt.to(next(model.parameters()).device), output_tokens, note


@torch.inference_mode()
def _generate(
    model: nn.Module,
    prompt: Tensor,
    output_tokens: int,
    *,
    clock: Callable[[], float],
    tick: Callable[[], None],
    device: torch.device,
) -> Iteration:
    """One generation. ``tick`` is called between tokens, outside what is timed."""
    # Only the last position's logits are wanted, as when a model generates; not every architecture offers to skip
    # the others.
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    tick()
    _synchronize(device)
    start = clock()
    output = model(input_ids=prompt, use_cache=True, **last_only)
    _synchronize(device)
    prefilled = clock()
    token = output.logits[:, -1:].argmax(dim=-1)
    _synchronize(device)
    first = clock()
    steps = []
    for _ in range(output_tokens - 1):
        tick()
        before = clock()
        output = model(input_ids=token, cache=output.cache, use_cache=True, **last_only)
        token = output.logits[:, -1:].argmax(dim=-1)
        _synchronize(device)
        steps.append(clock() - before)
    return Iteration(prefill=prefilled - start, first_token=first - start, steps=tuple(steps))


def _synchronize(device: torch.device) -> None:
    """Wait for an accelerator's queue; a CPU has none."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
