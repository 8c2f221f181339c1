"""On a device of its own, only the block being worked on is there, and the result is the same."""

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from pruning import placement
from pruning.anatomy import decoder_blocks
from pruning.calibration import Windows
from pruning.compress import compress
from pruning.placement import Stage
from pruning.recipe import PruneStep, QuantizeStep, Recipe
from pruning.replay import capture
from tests.pruning.test_resume import fingerprint
from tests.pruning.tiny import tiny_ids, tiny_model

WINDOWS = Windows(tiny_ids())
ELSEWHERE = torch.device("cpu", 0)
"""Another name of the CPU: blocks come and go by it as they would with a GPU."""


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, torch.device]]:
    """Every module that is moved, and where to."""
    noted: list[tuple[int, torch.device]] = []
    to = nn.Module.to

    def note(module: nn.Module, device: torch.device) -> nn.Module:
        noted.append((id(module), device))
        return to(module, device)

    monkeypatch.setattr(nn.Module, "to", note)
    return noted


@pytest.mark.parametrize("statistics", ["sequential", "shared"])
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "opt"])
def test_each_block_comes_once_and_goes_before_the_next(
    family: str, quantize: bool, statistics: str, moves: list[tuple[int, torch.device]]
) -> None:
    step = PruneStep.model_validate({"method": "sparsegpt", "sparsity": 0.5, "statistics": statistics})
    recipe = Recipe(prune=step, quantize=QuantizeStep(scheme="int8") if quantize else None)
    resident, moved = tiny_model(family), tiny_model(family)
    compress(resident, recipe, WINDOWS)
    assert not moves
    compress(moved, recipe, WINDOWS, device=ELSEWHERE)
    home = torch.device("cpu")
    blocks = [id(block.module) for block in decoder_blocks(tiny_model(family))]
    assert len(blocks) == 3
    assert [device for _, device in moves] == [ELSEWHERE, home] * 3
    assert len({module for module, _ in moves}) == 3
    assert [moves[place][0] == moves[place + 1][0] for place in (0, 2, 4)] == [True] * 3
    assert fingerprint(moved) == fingerprint(resident)


@pytest.mark.parametrize("allocation", ["owl", "sensitivity"])
@pytest.mark.parametrize("statistics", ["sequential", "shared"])
@pytest.mark.parametrize("family", ["gemma3", "opt"])
def test_a_sparsity_is_spread_the_same_on_a_device_of_its_own(family: str, statistics: str, allocation: str) -> None:
    fields = {"method": "wanda", "sparsity": 0.5, "statistics": statistics, "allocation": allocation}
    recipe = Recipe(prune=PruneStep.model_validate(fields))
    resident, moved = tiny_model(family), tiny_model(family)
    compress(resident, recipe, WINDOWS)
    compress(moved, recipe, WINDOWS, device=ELSEWHERE)
    assert fingerprint(moved) == fingerprint(resident)


@pytest.mark.parametrize("method", ["width", "depth"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_smaller_model_is_the_same_from_a_device_of_its_own(family: str, method: str) -> None:
    recipe = Recipe(prune=PruneStep(method=method, sparsity=0.33))
    resident = compress(tiny_model(family), recipe, WINDOWS)
    moved = compress(tiny_model(family), recipe, WINDOWS, device=ELSEWHERE)
    assert moved.removed == resident.removed
    assert fingerprint(moved.model) == fingerprint(resident.model)


def test_what_an_earlier_text_was_called_with_is_not_taken_for_that_of_the_next() -> None:
    model = tiny_model("gemma3")
    blocks = decoder_blocks(model)
    stage = Stage(model, ELSEWHERE)
    for tokens in range(4, 24):  # what is let go of leaves its address to what comes next
        replay = capture(model, blocks, WINDOWS.ids[:1, :tokens])
        stage.receive(replay)
        for index in range(len(blocks)):
            call = replay.calls[index][0]
            moved = stage._moved(call)
            assert moved.kwargs.keys() == call.kwargs.keys()
            for name, value in call.kwargs.items():
                if isinstance(value, Tensor):
                    assert torch.equal(value, moved.kwargs[name]), name
        del replay, call, moved


def test_the_same_device_moves_nothing(moves: list[tuple[int, torch.device]]) -> None:
    compress(
        tiny_model("llama"), Recipe(prune=PruneStep(method="wanda", sparsity=0.5)), WINDOWS, device=torch.device("cpu")
    )
    assert not moves


@pytest.mark.parametrize(("free", "waits_there"), [(10**12, True), (0, False)])
def test_activations_wait_on_the_device_where_they_fit(
    free: int, waits_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_free_bytes", lambda device: free)
    model = tiny_model("llama")
    replay = capture(model, decoder_blocks(model), WINDOWS.ids)
    stage = Stage(model, ELSEWHERE)
    stage.receive(replay)
    assert stage.waiting == (ELSEWHERE if waits_there else torch.device("cpu"))


def test_arguments_are_moved_once_and_keep_their_shape() -> None:
    model = tiny_model("gemma3")
    blocks = decoder_blocks(model)
    replay = capture(model, blocks, WINDOWS.ids)
    stage = Stage(model, ELSEWHERE)
    first = stage._moved(replay.calls[0][0])
    assert stage._moved(replay.calls[0][0]) is first
    assert first.kwargs.keys() == replay.calls[0][0].kwargs.keys()
    for name, value in replay.calls[0][0].kwargs.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, first.kwargs[name])
    with torch.no_grad():
        plain = replay.run(0, 0, blocks[0].module)
        assert torch.equal(stage.run(replay, 0, 0, blocks[0].module), plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_on_cuda_the_model_stays_on_the_host_and_few_bytes_on_the_device(family: str) -> None:
    model = tiny_model(family)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for quantize in (None, QuantizeStep(scheme="int8")):
        recipe = Recipe(prune=PruneStep(method="sparsegpt", sparsity=0.5), quantize=quantize)
        compress(model, recipe, WINDOWS, device=torch.device("cuda", 0))
        assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
        model = tiny_model(family)
    for method in ("width", "depth"):
        made = compress(
            model, Recipe(prune=PruneStep(method=method, sparsity=0.33)), WINDOWS, device=torch.device("cuda", 0)
        )
        assert {tensor.device.type for tensor in made.model.state_dict().values()} == {"cpu"}
        model = tiny_model(family)
    assert torch.cuda.memory_allocated() - before < 2**24
    assert torch.isfinite(model(tiny_ids()).logits).all()


def seven_billion() -> nn.Module:
    """Random weights of the shape of LLaMA-2-7B in bfloat16, in host memory."""
    config = LlamaConfig(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.02, generator=generator) if parameter.ndim > 1 else parameter.data.fill_(1.0)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval().requires_grad_(False)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["wanda", "sparsegpt", "admm"])
def test_seven_billion_weights_fit_in_24_gigabytes(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    windows = Windows(torch.randint(0, 32000, (128, 2048), generator=torch.Generator().manual_seed(1)))
    model = seven_billion()
    torch.cuda.reset_peak_memory_stats()
    made = compress(
        model, Recipe(prune=PruneStep(method=method, sparsity=0.5)), windows, device=torch.device("cuda", 0)
    )
    peak = torch.cuda.max_memory_allocated()
    with capsys.disabled():
        print(f"\n{method}: {made.seconds:.0f} s, peak {peak / 1e9:.1f} GB on the device")  # noqa: T201 (asked for)
    assert peak < 24e9
