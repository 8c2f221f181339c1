"""How surprised a model is by real text: perplexity, and bits per byte, over equal windows of tokens."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from eval.figures import Figure
from eval.intervals import mean_interval
from pruning.errors import InputError
from pruning.progress import Progress, silent

PHASE = "scoring"
_REPLACEMENT = "�"
# Elements of logits widened at a time, in place: a megabyte of float32 stays in a core's cache, where all of a window's
# (a hundred megabytes) would go through memory several times; measured, a third of the time.
_CHUNK_ELEMENTS = 2**18
_LOGITS_BYTES = 2**30


@dataclass(frozen=True)
class LanguageScore:
    """Quality of a causal language model on some text.

    ``losses`` are nats per predicted token, one mean a window. ``tokens`` were predicted, ``text_bytes`` is how many
    bytes of UTF-8 they spell. ``collapsed`` says that the loss is no finite number, or that the model does worse than
    one that knows nothing but the size of its vocabulary.
    """

    perplexity: Figure
    bits_per_byte: Figure
    losses: tuple[float, ...]
    tokens: int
    text_bytes: int
    collapsed: bool


def score(model: nn.Module, tokenizer: Any, ids: Tensor, *, progress: Progress = silent) -> LanguageScore:
    """Perplexity and bits per byte of ``model`` on the windows ``ids`` (windows, length).

    Perplexity is exp of the mean negative log-likelihood over the ``length - 1`` tokens of each window that have one
    before them. Bits per byte is the same total in bits over the bytes those tokens spell (see :func:`text_bytes`), so
    that models with different tokenizers can be compared. Both bounds come from Student's t over windows and are
    absent with fewer than two. Samples are the same two figures for each window alone.

    Raises InputError when a window predicts nothing, and whatever ``progress`` raises.
    """
    losses = window_losses(model, ids, progress=progress)
    window_bytes = [text_bytes(tokenizer, window) for window in ids.tolist()]
    predicted = ids.shape[1] - 1
    mean = fmean(losses)
    interval = mean_interval(losses)
    low, high = interval if interval is not None else (None, None)
    perplexity = Figure(
        value=_finite(_exp(mean)),
        unit="perplexity",
        low=None if low is None else _finite(_exp(low)),
        high=None if high is None else _finite(_exp(high)),
        samples=tuple(_exp(loss) for loss in losses),
    )
    total_bytes = sum(window_bytes)
    # Nats a token to bits a byte: the number of tokens and of bytes is known, only the loss is uncertain.
    scale = len(losses) * predicted / math.log(2) / total_bytes if total_bytes else math.nan
    bits_per_byte = Figure(
        value=_finite(mean * scale),
        unit="bits/byte",
        low=None if low is None else _finite(low * scale),
        high=None if high is None else _finite(high * scale),
        samples=tuple(
            loss * predicted / math.log(2) / count if count else math.nan
            for loss, count in zip(losses, window_bytes, strict=True)
        ),
    )
    return LanguageScore(
        perplexity=perplexity,
        bits_per_byte=bits_per_byte,
        losses=losses,
        tokens=len(losses) * predicted,
        text_bytes=total_bytes,
        collapsed=not math.isfinite(mean) or mean > math.log(vocabulary_size(model)) * (1 + 1e-6),
    )


def window_losses(model: nn.Module, ids: Tensor, *, progress: Progress = silent) -> tuple[float, ...]:
    """Mean negative log-likelihood (nats a token) of each window of ``ids`` (windows, length).

    ``progress`` is called from the calling thread at every window.
    """
    windows, length = ids.shape
    if length < 2:
        raise InputError(f"windows of {length} token predict nothing: use a length of at least 2")
    total = windows * (length - 1)
    progress(PHASE, 0, total, "tokens")
    losses = []
    with _side_by_side(model, windows, length) as apply:
        for loss in apply(partial(_window_loss, model), ids):
            losses.append(loss)
            progress(PHASE, len(losses) * (length - 1), total, "tokens")
    return tuple(losses)


@torch.inference_mode()
def _window_loss(model: nn.Module, window: Tensor) -> float:
    """Mean loss of one ``window`` (length,), whose logits are held in the model's own dtype."""
    window = window.to(next(model.parameters()).device)
    logits = model(input_ids=window[None], use_cache=False).logits[0, :-1]
    return float(token_losses(logits, window[1:]).mean(dtype=torch.float64))


@contextmanager
def _side_by_side(model: nn.Module, windows: int, length: int) -> Iterator[Callable[..., Iterable[float]]]:
    """A ``map`` for windows: on a CPU several at a time, each on its own share of the threads; elsewhere one by one.

    Many small operations lie between a model's matrix products. Split over threads, each of them ends in a wait for
    the slowest; windows side by side wait for nothing. How many there are is bounded by the memory of their logits.
    """
    if next(model.parameters()).device.type != "cpu":
        yield map
        return
    threads = torch.get_num_threads()
    logits_bytes = length * vocabulary_size(model) * next(model.parameters()).element_size()
    most = max(1, min(threads, windows, _LOGITS_BYTES // logits_bytes))
    workers = math.ceil(windows / math.ceil(windows / most))
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,))
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def vocabulary_size(model: nn.Module) -> int:
    """How many tokens the model chooses from."""
    config: Any = model.config
    size: int = config.get_text_config().vocab_size
    return size


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood (tokens,) of ``targets`` (tokens,) under ``logits`` (tokens, vocabulary).

    Computed as log-sum-exp less the target's logit, in float32, or in float64 when the logits are, a few rows at a
    time.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    chosen = logits.gather(1, targets[:, None])[:, 0].to(dtype)
    normalizers = torch.empty_like(chosen)
    rows = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    buffer = torch.empty(rows, logits.shape[-1], dtype=dtype, device=logits.device)
    for start in range(0, len(logits), rows):
        some = logits[start : start + rows]
        wide = buffer[: len(some)].copy_(some)
        largest = wide.amax(dim=1)
        normalizers[start : start + rows] = wide.sub_(largest[:, None]).exp_().sum(dim=1).log_().add_(largest)
    return normalizers - chosen


def text_bytes(tokenizer: Any, window: Sequence[int]) -> int:
    """Bytes of UTF-8 that the tokens of ``window`` after its first one spell.

    Taken as the whole window decoded less its first token decoded, because some tokenizers drop a leading space. A
    token may hold a part of a character, and a decoder shows such a part as U+FFFD, three bytes that are not in the
    text: at both ends of the window each of them counts as one byte. That is exact at the start, where a decoder shows
    each stray byte by itself, and at most two bytes off at the end, where it shows up to three of them as one; the same
    holds for a first token that ends inside a character.
    """
    return _decoded_bytes(tokenizer, window) - _decoded_bytes(tokenizer, window[:1])


def _decoded_bytes(tokenizer: Any, tokens: Sequence[int]) -> int:
    text: str = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    whole = text.strip(_REPLACEMENT)
    return len(whole.encode()) + len(text) - len(whole)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
