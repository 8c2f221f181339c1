"""Time and perplexity beside llmcompressor's, in its own environment: make bench-llmcompressor.

That runs ``python -m tests.bench.against_llmcompressor PYTHON [METHOD …]`` with an interpreter that has llmcompressor.
Both prune the same model on the same windows with as many threads, one after the other; loading and saving are not
timed on either side, and both results are scored here. Poda's bfloat16 stands beside their default, float32, where the
CPU has instructions for it.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pruning.compress import compress
from pruning.device import choose_device, choose_dtype
from pruning.gguf_convert import converted
from pruning.models import load_model
from pruning.recipe import PruneStep, Recipe
from pruning.sources import bundled_file, content_hash, parse_reference
from tests.bench.quality import CACHE, perplexity, windows_of

CHILD = Path(__file__).with_name("against_llmcompressor_child.py")
METHODS = ("wanda", "sparsegpt")
SPARSITY = 0.5
TIME_LIMITS = {"float32": 0.85, "bfloat16": 0.6}
PERPLEXITY_LIMIT = 1.01


def bundled(dtype: str) -> tuple[nn.Module, Any]:
    """The bundled model on the CPU, and its tokenizer."""
    loaded = load_model(parse_reference("bundled"), device="cpu", dtype=dtype, cache=CACHE)
    return loaded.model, loaded.tokenizer


def score(state: dict[str, torch.Tensor], ids: torch.Tensor) -> float:
    """Perplexity in float32 of the bundled model with the weights in ``state``."""
    model, _ = bundled("float32")
    missing = model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=False).missing_keys
    assert not missing or missing == ["lm_head.weight"], missing
    return perplexity(model, ids)


def theirs(python: str, method: str, dtype: str, ids: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """Seconds llmcompressor takes, and its weights."""
    reference = parse_reference("bundled")
    file_hash = content_hash(reference)
    assert file_hash is not None
    folder = converted(bundled_file(), file_hash, CACHE, lambda *_: None)
    with TemporaryDirectory() as scratch:
        windows, out = Path(scratch, "windows.safetensors"), Path(scratch, "pruned.safetensors")
        save_file({"ids": ids}, windows)
        arguments = [str(folder), str(windows), str(out), method, str(SPARSITY), dtype, str(torch.get_num_threads())]
        done = subprocess.run([python, str(CHILD), *arguments], capture_output=True, text=True, cwd=scratch)
        if done.returncode:
            raise SystemExit(f"llmcompressor failed: {done.stderr[-2000:]}")
        return float(done.stdout.split()[-1]), load_file(out)


def ours(method: str, dtype: str, windows: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Seconds Poda takes, and its weights."""
    model, _ = bundled(dtype)
    started = time.perf_counter()
    compress(model, Recipe(prune=PruneStep(method=method, sparsity=SPARSITY)), windows)
    seconds = time.perf_counter() - started
    return seconds, dict(model.state_dict())


def main() -> int:
    """One line for each method and dtype; 1 when a limit is passed."""
    python, methods = os.path.abspath(sys.argv[1]), sys.argv[2:]  # a link stays one: it names the environment
    _, tokenizer = bundled("float32")
    calibration, evaluation = windows_of(tokenizer)
    shape = " × ".join(str(size) for size in calibration.ids.shape)
    print(f"bundled model, {SPARSITY:.0%}, {shape} tokens, {torch.get_num_threads()} threads; theirs in float32")
    best, why = choose_dtype("auto", choose_device("cpu"))
    limits = {dtype: limit for dtype, limit in TIME_LIMITS.items() if dtype == "float32" or best is torch.bfloat16}
    if len(limits) < len(TIME_LIMITS):
        print(f"only {why}")
    failed = False
    for method in methods or METHODS:
        their_seconds, their_state = theirs(python, method, "float32", calibration.ids)
        their_quality = score(their_state, evaluation.ids)
        print(f"{method:<10} llmcompressor     {their_seconds:7.1f} s   perplexity {their_quality:7.2f}", flush=True)
        for dtype, limit in limits.items():
            seconds, state = ours(method, dtype, calibration)
            quality = score(state, evaluation.ids)
            time_ratio, quality_ratio = seconds / their_seconds, quality / their_quality
            failed |= time_ratio > limit or quality_ratio > PERPLEXITY_LIMIT
            print(
                f"{method:<10} Poda {dtype:<12} {seconds:7.1f} s   perplexity {quality:7.2f}   time ×{time_ratio:.2f} "
                f"(at most {limit})   perplexity ×{quality_ratio:.3f} (at most {PERPLEXITY_LIMIT})",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
