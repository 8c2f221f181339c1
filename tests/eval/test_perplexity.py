"""Perplexity and bits per byte, against closed forms and an independent loop."""

import math
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from transformers import PreTrainedConfig

from eval import perplexity
from eval.perplexity import score, text_bytes, token_losses, window_losses
from pruning.errors import CancelledError, InputError
from tests.eval.tiny import VOCABULARY, BytesTokenizer, gpt2, llama, opt, windows


class SpaceDroppingTokenizer:
    """Token i is a space and then i letters; a leading space is dropped, as SentencePiece decoders do."""

    def decode(self, tokens: Any, **_: object) -> str:
        return "".join(" " + "x" * token for token in tokens).removeprefix(" ")


class FixedLogits(nn.Module):
    """Gives the same logits (vocabulary,) at every position."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)
        self.config = PreTrainedConfig(vocab_size=logits.numel())

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        assert not use_cache
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


def loop_losses(model: nn.Module, ids: Tensor) -> list[list[float]]:
    """Negative log-likelihood of every predicted token, from one forward pass a token on the text before it."""
    losses = []
    for window in ids.tolist():
        row = []
        for place in range(1, len(window)):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([window[:place]])).logits[0, -1].double().numpy()
            row.append(float(np.log(np.sum(np.exp(logits - logits.max()))) - (logits[window[place]] - logits.max())))
        losses.append(row)
    return losses


@pytest.mark.parametrize("make", [llama, gpt2, opt])
def test_agrees_with_a_loop_over_single_tokens(make: Any) -> None:
    model, ids = make(), windows()
    losses = loop_losses(model, ids)
    result = score(model, BytesTokenizer(), ids)
    assert result.perplexity.value == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)
    assert result.losses == pytest.approx([np.mean(row) for row in losses], rel=1e-4)
    assert result.perplexity.samples == pytest.approx([math.exp(np.mean(row)) for row in losses], rel=1e-4)
    assert result.tokens == 5 * 11
    # The tokens below 50 are ASCII: one byte each.
    assert result.text_bytes == 5 * 11
    assert result.bits_per_byte.value == pytest.approx(np.mean(losses) / math.log(2), rel=1e-4)
    assert result.collapsed == (np.mean(losses) > math.log(VOCABULARY))


def test_interval_is_that_of_student_over_windows() -> None:
    result = score(llama(), BytesTokenizer(), windows())
    losses = np.array(result.losses)
    low, high = stats.t.interval(0.95, 4, loc=losses.mean(), scale=stats.sem(losses))
    assert (result.perplexity.low, result.perplexity.high) == pytest.approx((math.exp(low), math.exp(high)), rel=1e-9)
    bits = result.bits_per_byte
    assert (bits.low, bits.high) == pytest.approx((low / math.log(2), high / math.log(2)), rel=1e-9)


def test_one_window_has_no_interval() -> None:
    result = score(llama(), BytesTokenizer(), windows(count=1))
    assert (result.perplexity.low, result.perplexity.high) == (None, None)
    assert (result.bits_per_byte.low, result.bits_per_byte.high) == (None, None)


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary() -> None:
    result = score(FixedLogits(torch.full((64,), 3.0)), BytesTokenizer(), windows())
    assert result.perplexity.value == pytest.approx(64, rel=1e-6)
    assert result.bits_per_byte.value == pytest.approx(6, rel=1e-6)
    assert not result.collapsed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_softmax_of_sixteen_bit_logits_is_in_float32(dtype: torch.dtype) -> None:
    vocabulary, tokens = 40_000, 30  # several chunks
    logits = torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    targets = torch.arange(tokens)
    wide = logits.double().numpy()
    expected = np.log(np.exp(wide).sum(1)) - wide[np.arange(tokens), np.arange(tokens)]
    losses = token_losses(logits, targets)
    assert losses.dtype == torch.float32
    assert losses.numpy() == pytest.approx(expected, rel=1e-5)


def test_float64_logits_stay_float64() -> None:
    logits = torch.tensor([[0.0, 1e-12]], dtype=torch.float64)
    assert float(token_losses(logits, torch.tensor([1]))) == pytest.approx(math.log(2) - 5e-13, abs=1e-15)


def test_a_model_worse_than_its_vocabulary_has_collapsed_but_keeps_its_figure() -> None:
    logits = torch.zeros(64)
    logits[63] = 10.0  # certain of a token that never comes
    result = score(FixedLogits(logits), BytesTokenizer(), windows())
    assert result.perplexity.value == pytest.approx(63 + math.exp(10), rel=1e-5)
    assert result.collapsed


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_gives_no_figure(bad: float) -> None:
    result = score(FixedLogits(torch.full((64,), bad)), BytesTokenizer(), windows())
    assert (result.perplexity.value, result.perplexity.low, result.bits_per_byte.value) == (None, None, None)
    assert result.collapsed


def test_a_loss_too_large_to_exponentiate_gives_bits_but_no_perplexity() -> None:
    logits = torch.zeros(64)
    logits[63] = 2000.0
    result = score(FixedLogits(logits), BytesTokenizer(), windows())
    assert result.perplexity.value is None
    assert result.bits_per_byte.value == pytest.approx(2000 / math.log(2), rel=1e-6)
    assert result.collapsed


def test_bytes_of_whole_characters_are_those_of_the_text_after_the_first_token() -> None:
    assert text_bytes(BytesTokenizer(), list("ação no céu".encode())) == len("ção no céu".encode())


@pytest.mark.parametrize(("start", "stop", "error"), [(0, 12, 0), (1, 12, 0), (2, 12, 0), (3, 12, 0), (0, 10, -2)])
def test_bytes_of_a_window_cut_inside_a_character(start: int, stop: int, error: int) -> None:
    text = "😀abc😀d".encode()  # 4 + 3 + 4 + 1 bytes
    assert text_bytes(BytesTokenizer(), list(text[start:stop])) == stop - start - 1 + error


def test_bytes_count_the_space_that_a_decoder_drops() -> None:
    assert text_bytes(SpaceDroppingTokenizer(), [3, 2, 4]) == len(" xx xxxx")


def test_progress_counts_predicted_tokens_at_every_window() -> None:
    calls: list[tuple[str, int, int, str]] = []
    window_losses(llama(), windows(), progress=lambda *call: calls.append(call))
    assert calls == [("scoring", done * 11, 55, "tokens") for done in range(6)]


def test_cancelling_stops_at_the_next_window() -> None:
    model, calls, forwards = llama(), [], []
    model.register_forward_pre_hook(lambda *_: forwards.append(time.sleep(0.05)))

    def cancel(phase: str, done: int, total: int, unit: str) -> None:
        calls.append(done)
        if done >= 22:
            raise CancelledError

    with pytest.raises(CancelledError):
        window_losses(model, windows(count=50), progress=cancel)
    assert calls == [0, 11, 22]
    # The two that were scored, and at most one more in progress on each thread.
    assert len(forwards) <= 2 + 2 * torch.get_num_threads()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_windows_side_by_side_come_back_in_order_and_leave_the_threads_as_they_were(threads: int) -> None:
    before = torch.get_num_threads()
    model, ids = llama().double(), windows(count=7)
    expected = [np.mean(row) for row in loop_losses(model, ids)]
    torch.set_num_threads(threads)
    try:
        assert window_losses(model, ids) == pytest.approx(expected, rel=1e-9)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_as_many_windows_at_once_as_their_logits_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = llama(), windows(count=6)
    running, most = [0], [0]

    def enter(*_: object) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.02)

    def leave(*_: object) -> None:
        running[0] -= 1

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        window_losses(model, ids)
        assert most[0] == 3
        most[0] = 0
        monkeypatch.setattr(perplexity, "_LOGITS_BYTES", 2 * 12 * VOCABULARY * 4)
        window_losses(model, ids)
        assert most[0] == 2
        most[0] = 0
        monkeypatch.setattr(perplexity, "_LOGITS_BYTES", 1)
        window_losses(model, ids)
        assert most[0] == 1
    finally:
        torch.set_num_threads(before)


def test_windows_of_one_token_are_refused() -> None:
    with pytest.raises(InputError, match="predict nothing"):
        window_losses(llama(), windows(length=1))
