"""Perplexity of every method and allocation on the bundled model, held to limits.

python -m tests.bench.quality [METHOD@SHARE[@ALLOCATION] …] measures those named, or all, prints a line for each as it
is there and a table at the end, and returns 1 when one passes its limit.
"""

import math
import sys
import time
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pruning.allocation import UNIFORM
from pruning.calibration import Windows, calibration_windows, evaluation_windows
from pruning.compress import compress
from pruning.methods import METHODS
from pruning.models import load_model
from pruning.recipe import Pattern, PruneStep, Recipe
from pruning.sources import parse_reference
from pruning.texts import load_text

SHARES = ("0.5", "0.6", "0.7", "2:4")

LIMITS = {
    "magnitude@0.5": 1.2 * 439.0,
    "magnitude@0.6": 1.2 * 3710.0,
    "magnitude@2:4": 1.2 * 1890.0,
    "wanda@0.5": 1.05 * 61.7,
    "wanda@0.6": 1.05 * 192.0,
    "wanda@2:4": 1.05 * 248.0,
    "sparsegpt@0.5": 1.05 * 49.3,
    "sparsegpt@0.6": 1.05 * 92.0,
    "sparsegpt@2:4": 1.05 * 85.0,
    "admm@0.5": 42.0,
    "admm@0.6": 62.0,
    "admm@0.7": 127.0,
    "admm@2:4": 84.0,
    "admm@0.6@sensitivity": 58.0,
}
"""The perplexity that each must not pass under this protocol, at which the dense model has 27.7.

Of published methods it is that of a trial of the research code and 5%, 20% for magnitude, which hinges on ties. ADMM
must be below what SparseGPT has with 2:4.
"""

SPREAD = ("wanda", "sparsegpt", "admm")
"""Methods that are measured with every allocation."""

CACHE = Path(gettempdir()) / "poda-bench"


def bundled() -> tuple[nn.Module, Any]:
    """The bundled model in float32 on the CPU, and its tokenizer."""
    loaded = load_model(parse_reference("bundled"), device="cpu", dtype="float32", cache=CACHE)
    return loaded.model, loaded.tokenizer


def recipe(name: str) -> Recipe:
    """The recipe that METHOD@SPARSITY or METHOD@N:M names, with @ALLOCATION where it is not uniform."""
    method, share, *allocation = name.split("@")
    pattern = Pattern.parse(share) if ":" in share else None
    sparsity = pattern.sparsity if pattern is not None else float(share)
    spread = {"allocation": allocation[0]} if allocation else {}
    return Recipe(prune=PruneStep(method=method, sparsity=sparsity, pattern=pattern, **spread))


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


def measure(name: str) -> float:
    """Perplexity of the bundled model after the recipe that ``name`` names; "dense" for none."""
    model, tokenizer = bundled()
    calibration, evaluation = windows_of(tokenizer)
    if name != "dense":
        compress(model, recipe(name), calibration)
    return perplexity(model, evaluation.ids)


def all_names() -> list[str]:
    """Every method at every share it offers, and every allocation of those in ``SPREAD``."""
    names = []
    for method in METHODS.values():
        if method.kind != "weights":
            continue
        for share in SHARES:
            if ":" not in share or share in method.patterns:
                names.append(f"{method.name}@{share}")
            if ":" not in share and method.name in SPREAD:
                names += [f"{method.name}@{share}@{spread}" for spread in method.allocations if spread != UNIFORM]
    return names


def table(found: dict[str, float]) -> str:
    """Markdown: a row for each method and allocation, a column for each share."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for name, value in found.items():
        method, share, *spread = name.split("@")
        rows.setdefault((method, spread[0] if spread else UNIFORM), {})[share] = f"{value:.1f}"
    lines = [f"| method | allocation | {' | '.join(SHARES)} |", "|---|---|" + "---|" * len(SHARES)]
    for (method, spread), cells in rows.items():
        lines.append(f"| {method} | {spread} | {' | '.join(cells.get(share, '') for share in SHARES)} |")
    return "\n".join(lines)


def main() -> int:
    """Print one line for each and the table; 1 when one passes its limit."""
    names = sys.argv[1:] or all_names()
    found: dict[str, float] = {}
    failed = False
    print(f"{'dense':<26} {measure('dense'):9.2f}", flush=True)
    for name in names:
        started = time.perf_counter()
        value = found[name] = measure(name)
        limit = LIMITS.get(name, math.inf)
        failed |= value > limit
        said = f"   at most {limit:7.1f}" if limit < math.inf else ""
        print(f"{name:<26} {value:9.2f}   {time.perf_counter() - started:4.0f} s{said}", flush=True)
    print(table(found))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
