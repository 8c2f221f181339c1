"""Statistics: the sums of all batches, shared where the input is one tensor, and no pass longer than needed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pruning.anatomy import LinearLayer
from pruning.errors import RunError
from pruning.methods import Statistics
from pruning.statistics import SAMPLE, Collector, InputGram, InputNorms, InputSample, Observed


def batches(features: int = 6, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, features, generator=generator).to(dtype) for tokens in (5, 9, 1)]


def test_norms_are_over_all_tokens() -> None:
    norms = InputNorms()
    for batch in batches():
        norms.add(batch)
    everything = torch.cat(batches()).tolist()
    expected = [sum(row[column] ** 2 for row in everything) ** 0.5 for column in range(6)]
    torch.testing.assert_close(norms.result(), torch.tensor(expected))


@pytest.mark.parametrize("features", [6, 300, 2100])
def test_gram_is_whole_and_symmetric(features: int) -> None:
    gram = InputGram()
    for batch in batches(features):
        gram.add(batch)
    tokens = torch.cat(batches(features)).double()
    result = gram.result()
    assert result is not None
    assert torch.equal(result, result.T)
    torch.testing.assert_close(result.double(), tokens.T @ tokens, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", [InputNorms, InputGram])
def test_sixteen_bit_inputs_are_summed_in_float32(kind: type[InputNorms] | type[InputGram]) -> None:
    statistic = kind()
    for _ in range(1000):
        statistic.add(torch.full((1, 2), 0.5, dtype=torch.bfloat16))
    result = statistic.result()
    assert result is not None
    assert result.dtype == torch.float32
    expected = 250.0 if kind is InputGram else 250.0**0.5  # bfloat16 would have stopped growing at 64
    torch.testing.assert_close(result, torch.full_like(result, expected))


def test_nothing_counted_is_none() -> None:
    assert InputNorms().result() is None
    assert InputGram().result() is None


class Block(nn.Module):
    """Two layers of one input, one of another, and a count of the calls of each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.finished = 0
        self.repeat = False

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = self.c(self.a(states) + self.b(states))
        if self.repeat:
            states = self.c(states)
        self.finished += 1
        return states


def collector(block: Block, kind: Statistics = "gram", *, stop: bool = True) -> Collector:
    return Collector([LinearLayer(name, getattr(block, name)) for name in ("a", "b", "c")], kind, 15, stop=stop)


def test_layers_of_one_input_share_one_statistic_and_later_batches_stop_early() -> None:
    block = Block()
    inputs = batches(4)
    with collector(block) as listening, torch.no_grad():
        for batch in inputs:
            listening.run(lambda batch=batch: block(batch))  # type: ignore[misc]
    results = listening.results()
    assert block.finished == 1
    assert results["a"] is results["b"]
    tokens = torch.cat(inputs)
    middle = torch.cat([block.a(batch) + block.b(batch) for batch in inputs]).detach()
    torch.testing.assert_close(results["a"].statistic, tokens.T @ tokens)
    torch.testing.assert_close(results["c"].statistic, middle.T @ middle)
    block(inputs[0])
    assert block.finished == 2  # the hooks are gone


def test_a_layer_called_twice_is_counted_twice() -> None:
    block = Block()
    block.repeat = True
    with collector(block) as listening, torch.no_grad():
        for batch in batches(4):
            listening.run(lambda batch=batch: block(batch))  # type: ignore[misc]
    assert block.finished == 3
    first = [block.a(batch) + block.b(batch) for batch in batches(4)]
    tokens = torch.cat([torch.cat([states, block.c(states)]) for states in first]).detach()
    torch.testing.assert_close(listening.results()["c"].statistic, tokens.T @ tokens)


def test_a_tensor_changed_in_place_is_another_input() -> None:
    layers = [LinearLayer(name, nn.Linear(4, 4)) for name in ("a", "b")]

    def forward() -> None:
        states = torch.ones(1, 4)
        layers[0].module(states)
        layers[1].module(states.mul_(2))

    with Collector(layers, "norms", 1) as listening, torch.no_grad():
        listening.run(forward)
    results = listening.results()
    assert results["a"].statistic is not None
    assert results["b"].statistic is not None
    assert results["a"].statistic.tolist() == [1] * 4
    assert results["b"].statistic.tolist() == [2] * 4
    assert results["a"].sample is not None
    assert results["a"].sample.tolist() == [[1] * 4]  # a copy: what was counted is not what became of it


def test_inputs_that_stop_being_shared_are_an_error() -> None:
    block = Block()
    with collector(block) as listening, torch.no_grad():
        states = torch.ones(1, 4)
        listening.run(lambda: (block.a(states), block.b(states), block.c(states)))
        with pytest.raises(RunError, match="shared their input"):
            listening.run(lambda: (block.a(states), block.b(states.clone())))


def test_a_layer_that_is_never_called_has_no_statistic() -> None:
    block = Block()
    with collector(block) as listening, torch.no_grad():
        listening.run(lambda: block.a(torch.ones(1, 4)))
    results = listening.results()
    assert results["a"].statistic is not None
    assert results["c"] == Observed(statistic=None, sample=None, tokens=0)


@pytest.mark.parametrize(
    ("expected", "seen", "places"),
    [
        (256, 256, list(range(256))),
        (1000, 1000, [place * 1000 // 256 for place in range(256)]),
        (16384, 16384, list(range(0, 16384, 64))),
        (0, 100, list(range(100))),
        (0, 1024, list(range(0, 1024, 4))),
        (1024, 100, list(range(0, 100, 4))),
        (512, 2048, list(range(0, 2048, 8))),
    ],
)
def test_the_sample_is_evenly_spaced_whatever_the_batches(expected: int, seen: int, places: list[int]) -> None:
    rows = torch.arange(2 * seen, dtype=torch.bfloat16 if seen < 100 else torch.float32).view(seen, 2)
    for size in (seen, 7, 100):
        sample = InputSample(expected)
        for batch in rows.split(size):
            sample.add(batch)
        result = sample.result()
        assert result is not None
        assert torch.equal(result, rows[places])
        assert sample.tokens == seen


@given(expected=st.integers(0, 3000), sizes=st.lists(st.integers(0, 700), max_size=6))
def test_the_sample_is_never_too_long_and_has_no_row_twice(expected: int, sizes: list[int]) -> None:
    rows = torch.arange(sum(sizes)).view(-1, 1)
    sample = InputSample(expected)
    for batch in rows.split(sizes):
        sample.add(batch)
    result = sample.result()
    assert (result is None) == (not rows.numel())
    if result is not None:
        assert result.shape[0] <= SAMPLE
        assert bool((result.flatten().diff() > 0).all())
        assert result[0] == 0
        if expected <= rows.numel() <= SAMPLE:
            assert torch.equal(result, rows)


def test_a_sample_keeps_the_dtype_of_the_inputs() -> None:
    sample = InputSample()
    sample.add(torch.ones(3, 2, dtype=torch.bfloat16))
    result = sample.result()
    assert result is not None
    assert result.dtype == torch.bfloat16


def test_a_layer_that_is_called_with_no_token_at_all_was_given_nothing() -> None:
    block = Block()
    with collector(block) as listening, torch.no_grad():
        listening.run(lambda: block(torch.ones(0, 4)))
    assert listening.results()["c"] == Observed(statistic=None, sample=None, tokens=0)


@pytest.mark.parametrize("kind", ["none", "norms", "gram"])
def test_without_stopping_one_pass_collects_and_gives_what_the_block_puts_out(kind: Statistics) -> None:
    block = Block()
    with collector(block, kind, stop=False) as listening, torch.no_grad():
        outputs = [listening.run(lambda batch=batch: block(batch)) for batch in batches(4)]  # type: ignore[misc]
    assert block.finished == 3
    for batch, output in zip(batches(4), outputs, strict=True):
        assert output is not None
        assert torch.equal(output, block(batch))
    seen = listening.results()["a"]
    tokens = torch.cat(batches(4))
    assert seen.tokens == 15
    assert seen.sample is not None
    assert torch.equal(seen.sample, tokens)
    if kind == "none":
        assert seen.statistic is None
    else:
        expected = tokens.T @ tokens if kind == "gram" else tokens.square().sum(0).sqrt()
        torch.testing.assert_close(seen.statistic, expected)
