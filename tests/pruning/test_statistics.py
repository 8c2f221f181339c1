"""Statistics: the sums of all batches, shared where the input is one tensor, and no pass longer than needed."""

import pytest
import torch
from torch import nn

from pruning.anatomy import LinearLayer
from pruning.errors import RunError
from pruning.statistics import Collector, InputGram, InputNorms


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


def collector(block: Block) -> Collector:
    return Collector([LinearLayer(name, getattr(block, name)) for name in ("a", "b", "c")], "gram")


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
    torch.testing.assert_close(results["a"], tokens.T @ tokens)
    torch.testing.assert_close(results["c"], middle.T @ middle)
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
    torch.testing.assert_close(listening.results()["c"], tokens.T @ tokens)


def test_a_tensor_changed_in_place_is_another_input() -> None:
    layers = [LinearLayer(name, nn.Linear(4, 4)) for name in ("a", "b")]

    def forward() -> None:
        states = torch.ones(1, 4)
        layers[0].module(states)
        layers[1].module(states.mul_(2))

    with Collector(layers, "norms") as listening, torch.no_grad():
        listening.run(forward)
    results = listening.results()
    assert results["a"] is not None
    assert results["b"] is not None
    assert results["a"].tolist() == [1] * 4
    assert results["b"].tolist() == [2] * 4


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
    assert results["a"] is not None
    assert results["c"] is None
