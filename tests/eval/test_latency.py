"""Timing of generation, on a clock that the test advances and against transformers' own generation."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eval.latency import LatencyProtocol, time_generation
from pruning.errors import CancelledError
from tests.eval.tiny import gpt2, llama, opt, windows

QUICK = LatencyProtocol(prompt_tokens=6, output_tokens=5, warmup=1, warmup_tokens=2, iterations=3, minimum_seconds=0)


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Recorder(nn.Module):
    """Takes 0.5 s to read a prompt and then as long as it is told for each token; always answers token 7."""

    def __init__(self, clock: Clock, steps: list[float], context: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(max_position_embeddings=context)
        self.inputs: list[Tensor] = []
        self._clock, self._steps = clock, steps

    def forward(self, input_ids: Tensor, use_cache: bool, cache: int = 0, logits_to_keep: int = 0) -> SimpleNamespace:
        assert use_cache
        assert logits_to_keep == 1
        self.inputs.append(input_ids)
        self._clock.now += self._steps.pop(0) if cache else 0.5
        logits = torch.zeros(input_ids.shape[0], 1, 50)
        logits[..., 7] = 1
        return SimpleNamespace(logits=logits, cache=cache + input_ids.shape[1])


def test_figures_follow_from_the_clock() -> None:
    clock = Clock()
    timed = [0.1, 0.1, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1, 0.4, 0.4, 0.4, 0.8]
    model = Recorder(clock, [9.0, *timed])
    result = time_generation(model, windows(), QUICK, clock=clock)
    prefill, first = result.figures["prefill_time"], result.figures["time_to_first_token"]
    assert prefill.samples == first.samples == pytest.approx((0.5, 0.5, 0.5))
    per_token = result.figures["time_per_output_token"]
    # (total - time to first token) / (5 - 1) of the three iterations: 0.15, 0.1, 0.5
    assert per_token.value == pytest.approx(0.15)
    assert per_token.samples == pytest.approx(timed)
    assert per_token.p50 == pytest.approx(0.15)  # between the sixth and seventh of twelve: 0.1 and 0.2
    assert per_token.p95 == pytest.approx(0.4 + 0.45 * 0.4)  # rank 10.45 of 0..11
    speed = result.figures["tokens_per_second"]
    assert speed.samples == pytest.approx((1 / 0.15, 10, 2))
    assert speed.value == pytest.approx(1 / 0.15)
    assert {name: figure.unit for name, figure in result.figures.items()} == {
        "prefill_time": "s",
        "time_to_first_token": "s",
        "time_per_output_token": "s",
        "tokens_per_second": "tokens/s",
    }


def test_iterates_until_the_minimum_time_has_passed() -> None:
    clock = Clock()
    protocol = LatencyProtocol(
        prompt_tokens=4, output_tokens=2, warmup=2, warmup_tokens=2, iterations=3, minimum_seconds=5.0
    )
    result = time_generation(Recorder(clock, [0.5] * 100), windows(), protocol, clock=clock)
    # Each takes a second; the two of warm-up do not count.
    assert result.protocol["iterations"] == 5
    assert len(result.figures["prefill_time"].samples) == 5


def test_choosing_the_first_token_is_not_in_the_prefill() -> None:
    clock = Clock()

    class SlowToChoose(Tensor):
        def argmax(self, dim: int) -> Tensor:  # type: ignore[override]
            clock.now += 0.25
            return self.as_subclass(Tensor).argmax(dim=dim)

    class Chooser(Recorder):
        def forward(self, input_ids: Tensor, **options: Any) -> SimpleNamespace:
            output = super().forward(input_ids, logits_to_keep=1, **options)
            output.logits = output.logits.as_subclass(SlowToChoose)
            return output

    result = time_generation(Chooser(clock, [0.5] * 100), windows(), QUICK, clock=clock)
    assert result.figures["prefill_time"].value == pytest.approx(0.5)
    assert result.figures["time_to_first_token"].value == pytest.approx(0.75)
    assert result.figures["time_per_output_token"].value == pytest.approx(0.75)


@pytest.mark.parametrize("make", [llama, gpt2, opt])
def test_decodes_the_tokens_that_generate_does(make: Any) -> None:
    model = make()
    model.generation_config.eos_token_id = None
    fed: list[list[int]] = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: fed.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    protocol = LatencyProtocol(prompt_tokens=8, output_tokens=7, warmup=0, iterations=1, minimum_seconds=0)
    time_generation(model, windows(), protocol)
    handle.remove()
    prompt = windows().reshape(1, -1)[:, :8]
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
    assert fed[0] == prompt[0].tolist()
    assert [token for tokens in fed[1:] for token in tokens] == expected[0, 8:].tolist()


def test_prompts_of_a_batch_are_consecutive_text() -> None:
    clock = Clock()
    model = Recorder(clock, [0.5] * 100)
    protocol = LatencyProtocol(batch=2, prompt_tokens=20, output_tokens=3, warmup=0, iterations=1, minimum_seconds=0)
    result = time_generation(model, windows(), protocol, clock=clock)
    assert torch.equal(model.inputs[0], windows().reshape(-1)[:40].view(2, 20))
    assert [tuple(tokens.shape) for tokens in model.inputs] == [(2, 20), (2, 1), (2, 1)]
    assert result.figures["tokens_per_second"].value == pytest.approx(4)
    assert "note" not in result.protocol


def test_states_the_protocol() -> None:
    result = time_generation(Recorder(Clock(), [0.5] * 100), windows(), QUICK)
    assert result.protocol["prompt_tokens"] == 6
    assert result.protocol["output_tokens"] == 5
    assert result.protocol["batch"] == 1
    assert result.protocol["timed"] == "alone"


@pytest.mark.parametrize(
    ("context", "asked", "carried_out", "cause"),
    [
        (None, (100, 5), (60, 5), "the 60 tokens of the evaluation text"),
        (32, (40, 5), (27, 5), "the model's context of 32 tokens"),
        (32, (28, 30), (16, 16), "the model's context of 32 tokens"),
        (32, (6, 26), (6, 26), None),
    ],
)
def test_shortens_what_does_not_fit_and_says_so(
    context: int | None, asked: tuple[int, int], carried_out: tuple[int, int], cause: str | None
) -> None:
    clock = Clock()
    model = Recorder(clock, [0.5] * 100, context)
    protocol = LatencyProtocol(
        prompt_tokens=asked[0], output_tokens=asked[1], warmup=0, iterations=1, minimum_seconds=0
    )
    result = time_generation(model, windows(), protocol, clock=clock)
    assert model.inputs[0].shape == (1, carried_out[0])
    assert len(model.inputs) == carried_out[1]
    assert (result.protocol["prompt_tokens"], result.protocol["output_tokens"]) == carried_out
    if cause is None:
        assert "note" not in result.protocol
    else:
        assert cause in str(result.protocol["note"])


def test_one_output_token_has_no_time_per_token() -> None:
    clock = Clock()
    protocol = LatencyProtocol(prompt_tokens=6, output_tokens=1, warmup=0, iterations=2, minimum_seconds=0)
    result = time_generation(Recorder(clock, []), windows(), protocol, clock=clock)
    assert set(result.figures) == {"prefill_time", "time_to_first_token"}


def test_cancelling_stops_within_a_token() -> None:
    clock = Clock()
    model = Recorder(clock, [0.5] * 100)
    calls: list[tuple[str, int, int, str]] = []

    def cancel(*call: Any) -> None:
        calls.append(call)
        if len(calls) == 9:
            raise CancelledError

    with pytest.raises(CancelledError):
        time_generation(model, windows(), QUICK, clock=clock, progress=cancel)
    # Two calls of warm-up, five of the first iteration, then the prompt of the second and one more.
    assert len(model.inputs) == 8
    assert calls[0] == ("timing", 0, 3, "iterations")
    assert calls[-1] == ("timing", 1, 3, "iterations")
