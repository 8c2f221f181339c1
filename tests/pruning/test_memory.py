"""What a compression needs beside the model: two blocks' weights and statistics, and the activations."""

import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from eval.memory import PeakMemory
from pruning.anatomy import decoder_blocks
from pruning.calibration import Windows
from pruning.checkpoint import Checkpoint
from pruning.compress import compress
from pruning.methods import METHODS
from pruning.recipe import PruneStep, Recipe
from pruning.replay import capture
from pruning.shared import Order, compress_shared

BLOCKS = 24
WIDTH, INNER = 512, 1408
CPU = torch.device("cpu")


def model_of_24_blocks() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=BLOCKS,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def block_bytes(model: nn.Module) -> int:
    """Weights of a block, and Gram matrices of the four inputs its layers have, in float32."""
    weights = sum(parameter.nbytes for parameter in decoder_blocks(model)[0].module.parameters())
    return weights + 4 * (3 * WIDTH**2 + INNER**2)


@torch.no_grad()
def bare_pass(model: nn.Module, windows: Windows) -> None:
    """What activations take: every block run as it is on what the one before it gave."""
    blocks = decoder_blocks(model)
    replay = capture(model, blocks, windows.ids)
    for index, block in enumerate(blocks):
        for batch in range(len(replay.hidden)):
            replay.hidden[batch] = replay.run(index, batch, block.module)


def peak_above(baseline: int, work: Callable[[], Any]) -> int:
    with PeakMemory(CPU) as memory:
        work()
    return memory.host_bytes - baseline


def measure(method: str, shared: bool, folder: Path, answers: Any) -> None:
    """Send the bytes that activations took, those that compressing took, and those of one block."""
    torch.set_num_threads(2)
    model = model_of_24_blocks()
    windows = Windows(torch.randint(0, 256, (8, 256), generator=torch.Generator().manual_seed(1)))
    # Kernels and their scratch memory are there before anything is counted.
    bare_pass(model, Windows(windows.ids[:1, :32]))
    baseline = psutil.Process().memory_info().rss
    activations = peak_above(baseline, lambda: bare_pass(model, windows))
    if shared:
        recipes = [
            Recipe(prune=PruneStep(method=method, sparsity=share, statistics="shared")) for share in (0.3, 0.5, 0.7)
        ]
        orders = [Order(one, Checkpoint(folder / str(place), "k")) for place, one in enumerate(recipes)]
        took = peak_above(baseline, lambda: compress_shared(model, orders, windows))
    else:
        recipe = Recipe(prune=PruneStep(method=method, sparsity=0.5))
        took = peak_above(baseline, lambda: compress(model, recipe, windows, checkpoint=Checkpoint(folder, "k")))
    answers.send((activations, took, block_bytes(model)))


CASES = [("magnitude", False), ("wanda", False), ("wanda", True)]
CASES += [
    (name, shared)
    for name, method in METHODS.items()
    for shared in ((False, True) if method.kind == "weights" else (False,))
    if method.statistics == "gram" or method.kind != "weights"
]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of the resident set is kept by Linux")
@pytest.mark.parametrize(("method", "shared"), CASES)
def test_no_more_than_two_blocks_beside_the_activations(
    method: str, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is freed goes back to the system at once, so that the resident set is what is in use and not what was.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**17))
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(method, shared, tmp_path, its))
    process.start()
    its.close()
    activations, took, block = mine.recv()
    process.join()
    assert took <= activations + 2 * block
