"""Replay: blocks run one at a time give what the whole model gives, whatever its family hands them."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from pruning import replay as replay_module
from pruning.anatomy import decoder_blocks
from pruning.errors import InputError
from pruning.replay import capture
from tests.pruning.tiny import CONFIGS, tiny_ids, tiny_model


def states_after_each_block(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """What every block puts out in an ordinary forward pass."""
    outputs: list[Tensor] = []
    handles = [
        block.module.register_forward_hook(
            lambda module, args, output: outputs.append(output if isinstance(output, Tensor) else output[0])
        )
        for block in decoder_blocks(model)
    ]
    model(ids)
    for handle in handles:
        handle.remove()
    return outputs


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "BATCH_TOKENS", 48)


@pytest.mark.parametrize("attention", ["as it comes", "eager"])
@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_the_chain_of_blocks_is_the_model(family: str, attention: str) -> None:
    model = tiny_model(family)
    if attention == "eager":  # which is handed masks where the other is told there is nothing to mask
        model.set_attn_implementation(attention)
    ids = tiny_ids(windows=5, length=20)
    blocks = decoder_blocks(model)
    replay = capture(model, blocks, ids)
    assert [states.shape[0] for states in replay.hidden] == [2, 2, 1]
    for index, expected in enumerate(states_after_each_block(model, ids)):
        replay.hidden = [replay.run(index, batch, blocks[index].module) for batch in range(3)]
        torch.testing.assert_close(torch.cat(replay.hidden), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_model_works_as_before_afterwards() -> None:
    model = tiny_model("llama")
    before = model(tiny_ids()).logits
    capture(model, decoder_blocks(model), tiny_ids())
    assert torch.equal(model(tiny_ids()).logits, before)
    assert model(tiny_ids()).past_key_values is not None  # generation with a cache still works


@torch.no_grad()
def test_equal_arguments_are_kept_once() -> None:
    model = tiny_model("llama")
    replay = capture(model, decoder_blocks(model), tiny_ids(windows=6))
    for calls in replay.calls:
        assert all(call is calls[0] for call in calls)
    assert replay.calls[0][0].kwargs["position_embeddings"] is replay.calls[2][0].kwargs["position_embeddings"]


class Plain(nn.Module):
    """A chain of blocks whose ways can be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 4)
        self.layers = nn.ModuleList([Doubling() for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        states = self.embed(ids)
        for layer in self.layers:
            states = layer(hidden_states=states, offset=ids[:, :1, None].float())[0]
        return states


class Doubling(nn.Module):
    """A block that is given its states by name, something of each window beside them, and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, *, hidden_states: Tensor, offset: Tensor) -> tuple[Tensor, None]:
        return self.linear(hidden_states) + offset, None


@torch.no_grad()
def test_tuples_names_and_arguments_that_differ_per_window() -> None:
    model = Plain()
    ids = tiny_ids(windows=5, length=20)
    blocks = decoder_blocks(model)
    replay = capture(model, blocks, ids)
    for index in range(3):
        replay.hidden = [replay.run(index, batch, blocks[index].module) for batch in range(3)]
    torch.testing.assert_close(torch.cat(replay.hidden), model(ids))


@torch.no_grad()
def test_only_one_boundary_of_states_is_kept() -> None:
    model = tiny_model("llama")
    blocks = decoder_blocks(model)
    replay = capture(model, blocks, tiny_ids())
    first = weakref.ref(replay.hidden[0])
    replay.hidden[0] = replay.run(0, 0, blocks[0].module)
    gc.collect()
    assert first() is None


class Between(Plain):
    """Changes the states between its blocks."""

    def forward(self, ids: Tensor) -> Tensor:
        states = self.embed(ids)
        for layer in self.layers:
            states = layer(hidden_states=states * 2, offset=states)[0]
        return states


class Skipping(Plain):
    """Leaves out its last block."""

    def forward(self, ids: Tensor) -> Tensor:
        states = self.embed(ids)
        for layer in self.layers[:2]:
            states = layer(hidden_states=states, offset=states)[0]
        return states


class Backwards(Plain):
    """Runs its blocks from the last to the first."""

    def forward(self, ids: Tensor) -> Tensor:
        states = self.embed(ids)
        for layer in reversed(self.layers):
            states = layer(hidden_states=states, offset=states)[0]
        return states


@pytest.mark.parametrize("kind", [Between, Skipping, Backwards])
@torch.no_grad()
def test_a_model_that_is_no_plain_chain_is_refused_and_left_working(kind: type[Plain]) -> None:
    model = kind()
    before = model(tiny_ids())
    with pytest.raises(InputError, match="block to block"):
        capture(model, decoder_blocks(model), tiny_ids())
    assert torch.equal(model(tiny_ids()), before)
