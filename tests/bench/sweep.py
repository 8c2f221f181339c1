"""What sharing statistics saves and what it costs: python -m tests.bench.sweep [--quality] [METHOD …].

Prints the compression time of METHODS × SPARSITIES made together over that of the slowest of them made alone, and
with ``--quality`` the perplexity of each from shared and from sequential statistics.
"""

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor, nn

from pruning.calibration import Windows
from pruning.checkpoint import Checkpoint
from pruning.compress import compress
from pruning.methods import METHODS
from pruning.recipe import PruneStep, Recipe
from pruning.shared import Order, compress_shared
from tests.bench.quality import bundled, perplexity, windows_of

DEFAULT = ("magnitude", "wanda", "sparsegpt")
SPARSITIES = (0.3, 0.5, 0.6, 0.7)
LIMIT = 1.6


def recipe(method: str, sparsity: float, statistics: str) -> Recipe:
    """Shared statistics only where the method has some."""
    kind = statistics if METHODS[method].needs_calibration else "sequential"
    return Recipe(prune=PruneStep.model_validate({"method": method, "sparsity": sparsity, "statistics": kind}))


def alone(model: nn.Module, dense: dict[str, Tensor], one: Recipe, windows: Windows) -> float:
    """Seconds of one variant from sequential statistics; the model is left compressed."""
    model.load_state_dict(dense)
    started = time.perf_counter()
    compress(model, one, windows)
    return time.perf_counter() - started


def main() -> int:
    """Print the table; 1 when the sweep costs more than the limit."""
    quality = "--quality" in sys.argv
    methods = [name for name in sys.argv[1:] if name in METHODS] or list(DEFAULT)
    model, tokenizer = bundled()
    calibration, evaluation = windows_of(tokenizer)
    dense = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    asked = [(method, sparsity) for method in methods for sparsity in SPARSITIES]
    sequential: dict[tuple[str, float], float] = {}
    slowest = 0.0
    for method, sparsity in asked if quality else [(method, 0.5) for method in methods]:
        seconds = alone(model, dense, recipe(method, sparsity, "sequential"), calibration)
        slowest = max(slowest, seconds)
        if quality:
            sequential[method, sparsity] = perplexity(model, evaluation.ids)
        print(f"{method:<12} {sparsity:.0%} alone {seconds:7.1f} s", flush=True)
    model.load_state_dict(dense)
    with TemporaryDirectory() as scratch:
        started = time.perf_counter()
        orders = {
            (method, sparsity): Order(
                recipe(method, sparsity, "shared"), Checkpoint(Path(scratch, f"{method}-{sparsity}"), "bench")
            )
            for method, sparsity in asked
        }
        shared = [order for (method, _), order in orders.items() if METHODS[method].needs_calibration]
        compress_shared(model, shared, calibration)
        took = time.perf_counter() - started
        for (method, sparsity), order in orders.items():
            model.load_state_dict(dense)
            started = time.perf_counter()
            compress(model, order.recipe, calibration, checkpoint=order.checkpoint)
            took += time.perf_counter() - started
            if quality:
                found, before = perplexity(model, evaluation.ids), sequential[method, sparsity]
                print(
                    f"{method:<12} {sparsity:.0%} shared {found:9.2f}  sequential {before:9.2f}  ×{found / before:.3f}",
                    flush=True,
                )
    ratio = took / slowest
    print(f"{len(asked)} together {took:.1f} s, the slowest alone {slowest:.1f} s: ×{ratio:.2f} (at most {LIMIT})")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
