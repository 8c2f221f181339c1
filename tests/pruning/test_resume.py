"""A compression that was stopped at any moment goes on to the very same bits."""

import hashlib
import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from pruning.calibration import Windows
from pruning.checkpoint import Checkpoint
from pruning.compress import compress
from pruning.errors import CancelledError
from pruning.methods import METHODS
from pruning.recipe import PruneStep, QuantizeStep, Recipe
from pruning.shared import Order, compress_shared
from tests.pruning.tiny import tiny_ids, tiny_model

WINDOWS = Windows(tiny_ids())
FINE_GRAINED = [name for name, method in METHODS.items() if method.kind == "weights"]
BLOCKS = 8


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of every tensor's name and bits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def recipe(method: str, quantize: bool = False) -> Recipe:
    return Recipe(
        prune=PruneStep(method=method, sparsity=0.5), quantize=QuantizeStep(scheme="int8") if quantize else None
    )


class StopAt:
    """Cancels at the so-manieth report of progress."""

    def __init__(self, report: int) -> None:
        self.left = report

    def __call__(self, phase: str, done: int, total: int, unit: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise CancelledError


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("method", FINE_GRAINED)
def test_stopped_again_and_again_it_ends_as_if_never_stopped(method: str, quantize: bool, tmp_path: Path) -> None:
    whole = tiny_model("llama")
    expected = compress(whole, recipe(method, quantize), WINDOWS)
    resumed = []
    for report in (5, 9, 14, 10_000):
        model = tiny_model("llama")
        try:
            made = compress(
                model,
                recipe(method, quantize),
                WINDOWS,
                checkpoint=Checkpoint(tmp_path, "k"),
                progress=StopAt(report),
            )
        except CancelledError:
            resumed.append(sum(Checkpoint(tmp_path, "k").has(index) for index in range(3)))
    assert resumed == sorted(resumed)
    assert resumed[-1] > 0
    assert made.resumed == resumed[-1]
    assert fingerprint(model) == fingerprint(whole)
    without_time = [{**vars(layer), "seconds": 0} for layer in made.layers]
    assert without_time == [{**vars(layer), "seconds": 0} for layer in expected.layers]


def test_a_finished_checkpoint_needs_no_text_and_counts_the_time_it_took(tmp_path: Path) -> None:
    whole = tiny_model("llama")
    compress(whole, recipe("sparsegpt"), WINDOWS, checkpoint=Checkpoint(tmp_path, "k"))
    spent = 0.0
    for index in range(3):
        block = Checkpoint(tmp_path, "k").load(index)
        assert block is not None
        spent += block[1]["seconds"]
    model = tiny_model("llama")
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    made = compress(model, recipe("sparsegpt"), WINDOWS, checkpoint=Checkpoint(tmp_path, "k"))
    assert not calls
    assert made.resumed == 3
    assert made.seconds >= spent
    assert fingerprint(model) == fingerprint(whole)


def test_a_shared_walk_that_was_stopped_goes_on(tmp_path: Path) -> None:
    recipes = [
        Recipe(prune=PruneStep(method=method, sparsity=0.5, statistics="shared")) for method in ("wanda", "sparsegpt")
    ]
    expected = []
    for one in recipes:
        model = tiny_model("llama")
        compress(model, one, WINDOWS)
        expected.append(fingerprint(model))
    dense = fingerprint(tiny_model("llama"))
    for report in (8, 25, 10_000):
        model = tiny_model("llama")
        orders = [Order(one, Checkpoint(tmp_path / str(place), "k")) for place, one in enumerate(recipes)]
        try:
            compress_shared(model, orders, WINDOWS, progress=StopAt(report))
        except CancelledError:
            assert not all(order.checkpoint is not None and order.checkpoint.finished(3) for order in orders)
        assert fingerprint(model) == dense
    for place, one in enumerate(recipes):
        model = tiny_model("llama")
        made = compress(model, one, WINDOWS, checkpoint=Checkpoint(tmp_path / str(place), "k"))
        assert fingerprint(model) == expected[place]
        assert made.together == 2


def model_to_kill() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


def child(folder: Path, method: str, answers: Connection) -> None:
    """Compress with a checkpoint, saying how far it is and going slowly, and send the fingerprint."""

    def tell(phase: str, done: int, total: int, unit: str) -> None:
        answers.send(done)
        time.sleep(0.002)

    torch.set_num_threads(1)
    model = model_to_kill()
    compress(model, recipe(method), WINDOWS, checkpoint=Checkpoint(folder, "k"), progress=tell)
    answers.send(fingerprint(model))


def start(folder: Path, method: str) -> tuple[BaseProcess, Connection]:
    """A process that compresses, and what it says."""
    # Processes fork from one that has torch imported and has never computed: ten starts would take half a minute.
    there = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if there else "spawn")
    if there:
        context.set_forkserver_preload(["tests.pruning.test_resume"])
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(folder, method, its))
    process.start()
    its.close()
    return process, mine


def outcome(folder: Path, method: str) -> str:
    """The fingerprint of a compression that is left alone."""
    process, answers = start(folder, method)
    while not isinstance(answer := answers.recv(), str):
        pass
    process.join()
    return answer


@pytest.mark.parametrize("method", FINE_GRAINED)
def test_killed_at_random_blocks_ten_times_the_result_is_the_same(method: str, tmp_path: Path) -> None:
    expected = outcome(tmp_path / "whole", method)
    chance = random.Random(method)
    folder = tmp_path / "killed"
    finished = 0
    for _ in range(10):
        process, answers = start(folder, method)
        # Killed somewhere in the next two blocks, so that ten kills fall into as many places of the walk.
        target = min(finished + chance.randint(0, 1), BLOCKS - 1)
        reports = chance.randint(1, 5)
        while reports > 0:
            reports -= answers.recv() >= target
        process.kill()
        process.join()
        now = sum(path.suffix == ".safetensors" for path in folder.iterdir())
        assert now >= finished
        finished = now
    assert finished > 0
    assert outcome(folder, method) == expected
