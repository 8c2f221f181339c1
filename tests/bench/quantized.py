"""Every quantization alone and after pruning: python -m tests.bench.quantized [RECIPE …] [--in FOLDER] [--speed].

A RECIPE is METHOD+SCHEME, either of them "none"; without any, all there are at 50%. The model is the bundled one; each
variant is saved, loaded back and measured in the dtype that Poda chooses on this machine, and decoding is timed in
turns with dense models in bfloat16 and float32. With ``--in`` variants are kept in a folder, and those that are there
are not made again; with ``--speed`` only decoding is timed. With ``--trained`` it is a tiny model in float32 that is
trained here on bytes of the bundled articles and was never rounded, and nothing is timed. Returns 1 when a limit is
passed.
"""

import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
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
from pruning.sources import VARIANT, parse_reference
from tests.bench.quality import CACHE, windows_of
from tests.pruning.folders import tiny_tokenizer
from tests.trained import trained, windows

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


@dataclass(frozen=True)
class Setting:
    """A model, which ``model`` makes anew in a dtype, and the text it is calibrated and measured on."""

    model: Callable[[str], nn.Module]
    dtype: str
    tokenizer: Any
    calibration: Windows
    evaluation: Tensor


def bundled() -> Setting:
    """The bundled model, 32 calibration windows of 512 tokens and 20 to measure on."""

    def model(dtype: str) -> nn.Module:
        return load_model(parse_reference("bundled"), device="cpu", dtype=dtype, cache=CACHE).model

    tokenizer = load_model(parse_reference("bundled"), device="cpu", dtype="float32", cache=CACHE).tokenizer
    calibration, evaluation = windows_of(tokenizer)
    dtype = str(choose_dtype("auto", choose_device("cpu"))[0]).removeprefix("torch.")
    return Setting(model, dtype, tokenizer, calibration, evaluation.ids)


def never_rounded() -> Setting:
    """The model that is trained here, 64 windows of 128 bytes and as many to measure on."""
    calibration = Windows(windows("calibration", 64))
    return Setting(lambda dtype: trained(), "float32", tiny_tokenizer(), calibration, windows("evaluation", 64))


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


def make(name: str, folder: Path, setting: Setting) -> float:
    """Save the variant at ``folder``; seconds of compression."""
    model = setting.model(setting.dtype)
    started = time.perf_counter()
    made = compress(model, recipe(name), setting.calibration)
    took = time.perf_counter() - started
    save_artifact(made.model, setting.tokenizer, folder, {})
    return took


def measured(folder: Path, dense: nn.Module, ids: Tensor) -> Row:
    """The variant in ``folder``, loaded back."""
    variant = load_variant(folder, device="cpu")
    perplexity, divergence = quality(variant.model, dense, ids)
    ratio = variant.sizes.pruned_layer_bytes / variant.sizes.dense16_pruned_layer_bytes
    return Row(perplexity, divergence, ratio, variant.runtime)


def timed(folders: dict[str, Path], setting: Setting) -> tuple[dict[str, float], bool]:
    """Milliseconds a token of the variants, timed in turns; whether one is slower than it must be."""
    models = {name: load_variant(folder, device="cpu").model for name, folder in folders.items()}
    models |= {f"dense {name}": setting.model(name) for name in ("float32", "bfloat16")}
    times = token_times(models, setting.evaluation, rounds=ROUNDS)
    middle = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    fastest = min((name for name in times if name.startswith("dense")), key=middle.__getitem__)
    print(f"decode, one sequence, variants in {setting.dtype}, {torch.get_num_threads()} threads, {ROUNDS} rounds:")
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
    """Markdown, a line for each variant; without times where none were measured."""
    heads = ["pruning", "quantization", "perplexity", "KL to dense", "bytes", *(["ms a token"] if times else [])]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, row in rows.items():
        figures = [f"{row.perplexity:.1f}", f"{row.divergence:.3f}", f"{row.ratio:.3f}"]
        figures += [f"{times[name]:.1f}"] if times else []
        lines.append(f"| {' | '.join([*name.split('+'), *figures])} |")
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
    words = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    words.add_argument("recipes", nargs="*", metavar="RECIPE")
    words.add_argument("--in", dest="kept", type=Path, metavar="FOLDER")
    words.add_argument("--speed", action="store_true")
    words.add_argument("--trained", action="store_true")
    asked = words.parse_args()
    setting = never_rounded() if asked.trained else bundled()
    rows: dict[str, Row] = {}
    with TemporaryDirectory() as scratch:
        recipes = asked.recipes or (list(FASTER) if asked.speed else names())
        folders = {name: Path(asked.kept or scratch, name) for name in recipes}
        dense = setting.model(setting.dtype)
        for name, folder in folders.items():
            took = make(name, folder, setting) if not (folder / VARIANT).is_file() else 0.0
            if asked.speed:
                continue
            row = rows[name] = measured(folder, dense, setting.evaluation)
            print(
                f"{name:<24} perplexity {row.perplexity:9.2f}  KL {row.divergence:7.4f}  bytes {row.ratio:.4f}  "
                f"{took:5.0f} s  {row.runtime}",
                flush=True,
            )
        times, slow = timed(folders, setting) if not asked.trained else ({}, False)
    print("\n".join([*broken(rows), "", table(rows, times)]))
    return int(slow or bool(broken(rows)))


if __name__ == "__main__":
    sys.exit(main())
