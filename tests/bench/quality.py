"""Perplexity of every method on the bundled model beside a trial's: python -m tests.bench.quality [METHOD@SHARE …]."""

import math
import sys
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pruning.calibration import Windows, calibration_windows, evaluation_windows
from pruning.compress import compress
from pruning.models import load_model
from pruning.recipe import Pattern, PruneStep, Recipe
from pruning.sources import parse_reference
from pruning.texts import load_text

TRIAL = {
    "magnitude@0.5": 439.0,
    "wanda@0.5": 61.7,
    "sparsegpt@0.5": 49.3,
    "magnitude@0.6": 3710.0,
    "wanda@0.6": 192.0,
    "sparsegpt@0.6": 92.0,
    "magnitude@2:4": 1890.0,
    "wanda@2:4": 248.0,
    "sparsegpt@2:4": 85.0,
}
"""Perplexities of the published methods under this protocol; dense 28.0."""

CACHE = Path(gettempdir()) / "poda-bench"


def bundled() -> tuple[nn.Module, Any]:
    """The bundled model in float32 on the CPU, and its tokenizer."""
    loaded = load_model(parse_reference("bundled"), device="cpu", dtype="float32", cache=CACHE)
    return loaded.model, loaded.tokenizer


def recipe(name: str) -> Recipe:
    """The recipe that METHOD@SPARSITY or METHOD@N:M names."""
    method, _, share = name.partition("@")
    pattern = Pattern.parse(share) if ":" in share else None
    sparsity = pattern.sparsity if pattern is not None else float(share)
    return Recipe(prune=PruneStep(method=method, sparsity=sparsity, pattern=pattern))


def windows_of(tokenizer: Any) -> tuple[Windows, Windows]:
    """32 calibration windows of 512 at random offsets, and the first 20 evaluation windows of 512."""
    return (
        calibration_windows(tokenizer, load_text("articles", "calibration"), 32, 512, seed=0),
        evaluation_windows(tokenizer, load_text("articles", "evaluation"), 20, 512),
    )


@torch.no_grad()
def perplexity(model: nn.Module, ids: Tensor) -> float:
    """Of all but the first token of each window."""
    total = 0.0
    for window in ids:
        logits = model(window[None]).logits[0, :-1]
        total += float(functional.cross_entropy(logits, window[1:], reduction="sum"))
    return math.exp(total / (ids.numel() - len(ids)))


def limit(name: str) -> float:
    """The perplexity a method must not pass: the trial's and 5%, 20% for magnitude, which hinges on ties."""
    return TRIAL[name] * (1.2 if name.startswith("magnitude") else 1.05)


def measure(name: str) -> float:
    """Perplexity of the bundled model after the recipe that ``name`` names; "dense" for none."""
    model, tokenizer = bundled()
    calibration, evaluation = windows_of(tokenizer)
    if name != "dense":
        compress(model, recipe(name), calibration)
    return perplexity(model, evaluation.ids)


def main() -> int:
    """Print one line for each; 1 when one passes its limit."""
    names = sys.argv[1:] or list(TRIAL)
    print(f"{'dense':<14} {measure('dense'):9.2f}   trial    28.0")
    failed = False
    for name in names:
        value = measure(name)
        failed |= value > limit(name)
        print(f"{name:<14} {value:9.2f}   trial {TRIAL[name]:7.1f}   at most {limit(name):7.1f}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
