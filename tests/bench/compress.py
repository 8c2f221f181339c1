"""Time of a whole compression over that of two bare forward passes: python -m tests.bench.compress [--small]."""

import sys
import time
from collections.abc import Sequence

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from pruning.anatomy import decoder_blocks
from pruning.calibration import Windows
from pruning.compress import compress
from pruning.recipe import PruneStep, Recipe
from pruning.replay import capture
from tests.bench.quality import bundled, windows_of

LIMITS: dict[str, float | None] = {"wanda": 1.3, "sparsegpt": 1.6, "admm": None}
"""Of the compression time over two bare passes; what has None is only printed."""


def small() -> tuple[nn.Module, Windows]:
    """A model and windows that take a second, to see that the bench works."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    return model, Windows(torch.randint(0, 512, (8, 128)))


@torch.no_grad()
def bare_pass(model: nn.Module, windows: Windows) -> float:
    """Seconds of one forward pass through all decoder blocks, in the same batches as the compression and no hooks."""
    blocks = decoder_blocks(model)
    replay = capture(model, blocks, windows.ids)
    started = time.perf_counter()
    for index, block in enumerate(blocks):
        for batch in range(len(replay.hidden)):
            replay.hidden[batch] = replay.run(index, batch, block.module)
    return time.perf_counter() - started


def main(arguments: Sequence[str]) -> int:
    """Print one line for each method; 1 when one passes its limit (never with --small, which times nothing of use)."""
    torch.manual_seed(0)
    is_small = "--small" in arguments
    if is_small:
        model, windows = small()
    else:
        model, tokenizer = bundled()
        windows = windows_of(tokenizer)[0]
    dense = {name: value.clone() for name, value in model.state_dict().items()}
    shape = " × ".join(str(size) for size in windows.ids.shape)
    print(f"{type(model).__name__}, {shape} tokens, float32, {torch.get_num_threads()} threads")
    bare_pass(model, windows)  # warm up
    failed = False
    for method, limit in LIMITS.items():
        before = bare_pass(model, windows)
        seconds = compress(model, Recipe(prune=PruneStep(method=method, sparsity=0.5)), windows).seconds
        model.load_state_dict(dense)
        two = before + bare_pass(model, windows)
        ratio = seconds / two
        failed |= limit is not None and ratio > limit and not is_small
        said = f"   at most {limit:.1f}" if limit is not None else ""
        print(f"{method:<10} {seconds:7.1f} s   two bare passes {two:7.1f} s   ratio {ratio:.2f}{said}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
