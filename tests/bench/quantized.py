"""Every quantization alone and after pruning: python -m tests.bench.quantized [RECIPE …] [--speed] [--trained].

A RECIPE is METHOD+SCHEME, either of them "none"; without any, all there are at 50%. The model is the bundled one; each
variant is saved, loaded back and measured in bfloat16 where the machine is good at it. With ``--speed`` only decoding
is timed, in turns with dense models in bfloat16 and float32. With ``--trained`` it is a tiny model in float32 that is
trained here on bytes of the bundled articles and was never rounded, and nothing is timed. Returns 1 when a limit is
passed.
"""

import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from eval.turns import speed, token_times
from pruning.artifact import save_artifact
from pruning.calibration import Windows
from pruning.compress import compress
from pruning.device import choose_device, choose_dtype
from pruning.models import load_model
from pruning.quantize import SCHEMES, objection
from pruning.recipe import PruneStep, QuantizeStep, Recipe
from pruning.runtime import load_variant
from pruning.sources import parse_reference
from tests.bench.quality import CACHE, windows_of

METHODS = ("none", "wanda", "sparsegpt", "admm")
SPARSITY = 0.5
ROUNDS = 15
SMALLEST = 0.24
"""Bytes of SparseGPT's layers in joint int4, of those of the dense model in 16 bits, that must not be passed."""

FASTER = {"none+int8": 1.3, "none+int4": 1.4}
"""How many times as fast as the faster dense model each must decode."""


@dataclass(frozen=True)
class Row:
    """What was measured of one variant; ``ratio`` is bytes of the pruned layers over those of 16-bit dense ones."""

    perplexity: float
    divergence: float
    ratio: float
    runtime: str


def names() -> list[str]:
    """METHOD+SCHEME for all that can be on a CPU."""
    found = []
    for method, scheme in product(METHODS, ("none", *SCHEMES)):
        pruned = None if method == "none" else method
        if scheme == "none" or objection(SCHEMES[scheme], None, method=pruned, device="cpu") is None:
            found.append(f"{method}+{scheme}")
    return found


def recipe(name: str) -> Recipe:
    """The recipe METHOD+SCHEME at 50%."""
    method, scheme = name.split("+")
    return Recipe(
        prune=PruneStep(method=method, sparsity=SPARSITY) if method != "none" else None,
        quantize=QuantizeStep(scheme=scheme) if scheme != "none" else None,
    )


def bundled(dtype: str) -> tuple[nn.Module, Any]:
    """The bundled model on the CPU, and its tokenizer."""
    loaded = load_model(parse_reference("bundled"), device="cpu", dtype=dtype, cache=CACHE)
    return loaded.model, loaded.tokenizer


@torch.no_grad()
def quality(model: nn.Module, dense: nn.Module, ids: Tensor) -> tuple[float, float]:
    """Perplexity, and the mean Kullback-Leibler divergence of the dense model's next token from the model's, in nats.

    Of all but the first token of each window of ``ids`` (windows, length), summed in float64.
    """
    loss = divergence = 0.0
    for window in ids:
        own = functional.log_softmax(model(window[None]).logits[0, :-1].float(), dim=-1)
        whole = functional.log_softmax(dense(window[None]).logits[0, :-1].float(), dim=-1)
        loss += float(functional.nll_loss(own, window[1:], reduction="sum").double())
        divergence += float(functional.kl_div(own, whole, reduction="sum", log_target=True).double())
    predicted = ids.numel() - len(ids)
    return float(torch.tensor(loss / predicted, dtype=torch.float64).exp()), divergence / predicted


def make(name: str, folder: Path, dtype: str, windows: Windows, tokenizer: Any) -> float:
    """Save the variant at ``folder``; seconds of compression."""
    model, _ = bundled(dtype)
    started = time.perf_counter()
    made = compress(model, recipe(name), windows)
    took = time.perf_counter() - started
    save_artifact(made.model, tokenizer, folder, {})
    return took


def measured(folder: Path, dense: nn.Module, ids: Tensor) -> tuple[Row, nn.Module]:
    """The variant in ``folder``, loaded back."""
    variant = load_variant(folder, device="cpu")
    perplexity, divergence = quality(variant.model, dense, ids)
    ratio = variant.sizes.pruned_layer_bytes / variant.sizes.dense16_pruned_layer_bytes
    return Row(perplexity, divergence, ratio, variant.runtime), variant.model


def timed(models: dict[str, nn.Module], ids: Tensor, dtype: str) -> tuple[dict[str, float], bool]:
    """Milliseconds a token of each of ``models``, timed in turns; whether one is slower than it must be."""
    for name in ("float32", "bfloat16"):
        models[f"dense {name}"] = bundled(name)[0]
    times = token_times(models, ids, rounds=ROUNDS)
    middle = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    fastest = min((name for name in times if name.startswith("dense")), key=middle.__getitem__)
    print(f"decode, one sequence, variants in {dtype}, {torch.get_num_threads()} threads, {ROUNDS} rounds in turns:")
    failed = False
    for name, values in times.items():
        told = speed(values, times[fastest])
        least = FASTER.get(name)
        failed |= least is not None and told.ratio < least
        limit = f"   at least {least}" if least is not None else ""
        interval = f"[{told.low:.2f}, {told.high:.2f}]"
        print(f"  {name:<24} {middle[name] * 1e3:6.1f} ms   {told} ({interval} of {fastest}){limit}", flush=True)
    return {name: value * 1e3 for name, value in middle.items()}, failed


def table(rows: dict[str, Row], times: dict[str, float]) -> str:
    """Markdown, a line for each variant."""
    lines = ["| pruning | quantization | perplexity | KL to dense | bytes | ms a token |", "|---|---|---|---|---|---|"]
    for name, row in rows.items():
        figures = f"{row.perplexity:.1f} | {row.divergence:.3f} | {row.ratio:.3f} | {times[name]:.1f}"
        lines.append(f"| {' | '.join(name.split('+'))} | {figures} |")
    return "\n".join(lines)


def broken(rows: dict[str, Row]) -> list[str]:
    """What should hold and does not, of what was measured."""
    wrong = []
    for method in METHODS:
        nearest, walked = rows.get(f"{method}+int4"), rows.get(f"{method}+gptq-int4")
        joint = rows.get(f"{method}+joint-int4")
        if nearest is not None and walked is not None and walked.divergence >= nearest.divergence:
            wrong.append(f"{method}: GPTQ has no less divergence than rounding to nearest")
        if nearest is not None and joint is not None and joint.divergence > nearest.divergence:
            wrong.append(f"{method}: joint has more divergence than pruning, then rounding to nearest")
    small = rows.get("sparsegpt+joint-int4")
    if small is not None and small.ratio > SMALLEST:
        wrong.append(f"SparseGPT with joint int4 takes {small.ratio:.3f} of the bytes, more than {SMALLEST}")
    return wrong


def main() -> int:
    """Print a line for each variant as it is there, the table, and the times."""
    only_speed = "--speed" in sys.argv
    asked = [name for name in sys.argv[1:] if "+" in name] or (list(FASTER) if only_speed else names())
    dtype = str(choose_dtype("auto", choose_device("cpu"))[0]).removeprefix("torch.")
    dense, tokenizer = bundled(dtype)
    calibration, evaluation = windows_of(tokenizer)
    rows: dict[str, Row] = {}
    models: dict[str, nn.Module] = {}
    with TemporaryDirectory() as scratch:
        for name in asked:
            took = make(name, Path(scratch, name), dtype, calibration, tokenizer)
            ids = evaluation.ids[:1] if only_speed else evaluation.ids
            rows[name], models[name] = measured(Path(scratch, name), dense, ids)
            row = rows[name]
            print(
                f"{name:<24} perplexity {row.perplexity:9.2f}  KL {row.divergence:7.4f}  bytes {row.ratio:.4f}  "
                f"{took:5.0f} s  {row.runtime}",
                flush=True,
            )
        times, slow = timed(models, evaluation.ids, dtype)
    wrong = [] if only_speed else broken(rows)
    print("\n".join([*wrong, "", table(rows, times)]))
    return int(slow or bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
