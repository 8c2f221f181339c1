"""Width and depth pruning of 25% beside chance, and how fast they decode: python -m tests.bench.structured [PART …].

Parts are "quality" (perplexity on the bundled model, beside five random models of the same size for each), "fitted"
(random widths of which the kept weights are fitted as well) and "speed"; without any, "quality" and "speed".
"""

import sys
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from eval.latency import LatencyProtocol, time_generation
from pruning.anatomy import decoder_blocks
from pruning.calibration import Windows
from pruning.device import choose_device, choose_dtype
from pruning.recipe import PruneStep
from pruning.structured import Restructured
from pruning.structured.depth import prune_depth, without_blocks
from pruning.structured.parts import Part
from pruning.structured.width import prune_width
from tests.bench.quality import bundled, perplexity, windows_of

SPARSITY = 0.25
SEEDS = 5
FASTER = 1.2
"""How many times as fast as the dense model one of the two must decode."""

ROUNDS = 9
PROTOCOL = LatencyProtocol(prompt_tokens=64, output_tokens=32, warmup=0, iterations=1, minimum_seconds=0)


def step(method: str) -> PruneStep:
    """A quarter of the weights in blocks."""
    return PruneStep(method=method, sparsity=SPARSITY)


def widths_of(model: Any) -> dict[str, int]:
    """What the blocks of a narrower Llama keep, as prune_width takes it."""
    config = model.config
    return {"self_attn.o_proj": config.num_key_value_heads, "mlp.down_proj": config.intermediate_size}


def random_widths(like: nn.Module, windows: Windows, seed: int, fitted: bool) -> nn.Module:
    """A model as narrow as ``like`` whose channels and heads are drawn by chance."""
    generator = torch.Generator().manual_seed(seed)

    def draw(weight: Tensor, gram: Tensor, part: Part, keep: int) -> Tensor:
        return torch.randperm(part.units, generator=generator)[:keep].sort().values

    used = windows if fitted else Windows(windows.ids[:1])  # what is not fitted looks at no text
    model, _ = bundled()
    return prune_width(model, step("width"), used, widths=widths_of(like), choose=draw, compensate=fitted).model


def random_blocks(count: int, seed: int) -> nn.Module:
    """The bundled model without ``count`` blocks that are drawn by chance."""
    model, _ = bundled()
    blocks = decoder_blocks(model)
    drawn = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))[:count].tolist()
    return without_blocks(model, blocks, drawn)


def made(method: str, windows: Windows) -> Restructured:
    """The variant of ``method``, with what it is and how long it took in print."""
    model, _ = bundled()
    started = time.perf_counter()
    prune = prune_width if method == "width" else prune_depth
    result = prune(model, step(method), windows)
    print(f"{method}: {result.note}; {time.perf_counter() - started:.0f} s", flush=True)
    return result


def chance(name: str, limit: float, values: list[float]) -> bool:
    """Print the perplexities of random models; whether one is not above ``limit``."""
    print(f"  {name:<24} {' '.join(f'{value:9.1f}' for value in values)}", flush=True)
    return min(values) <= limit


def token_times(models: dict[str, nn.Module], ids: Tensor) -> dict[str, float]:
    """Median seconds for each output token, the models taking turns."""
    samples: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(ROUNDS + 1):
        for name, model in models.items():
            figure = time_generation(model, ids, PROTOCOL).figures["time_per_output_token"]
            if turn:  # the first is a warm-up
                samples[name].append(figure.value)
    return {name: median(values) for name, values in samples.items()}


def main() -> int:
    """Print all figures; 1 when chance does as well, or neither is fast enough."""
    parts = sys.argv[1:] or ["quality", "speed"]
    dense, tokenizer = bundled()
    calibration, evaluation = windows_of(tokenizer)
    width, depth = made("width", calibration).model, made("depth", calibration)
    failed = False
    if "quality" in parts or "fitted" in parts:
        own = {"width": perplexity(width, evaluation.ids), "depth": perplexity(depth.model, evaluation.ids)}
        print(f"perplexity: dense {perplexity(dense, evaluation.ids):.1f}, width {own['width']:.1f}, ", end="")
        print(f"depth {own['depth']:.1f}; by chance, seeds 0 to {SEEDS - 1}:", flush=True)
    for fitted in (False, True):
        if ("fitted" if fitted else "quality") in parts:
            drawn = (random_widths(width, calibration, seed, fitted) for seed in range(SEEDS))
            name = "random widths, fitted" if fitted else "random widths"
            failed |= chance(name, own["width"], [perplexity(model, evaluation.ids) for model in drawn])
    if "quality" in parts:
        shorter = (random_blocks(len(depth.removed), seed) for seed in range(SEEDS))
        failed |= chance("random blocks", own["depth"], [perplexity(model, evaluation.ids) for model in shorter])
    if "speed" in parts:
        product = choose_dtype("auto", choose_device("cpu"))[0]
        for dtype in dict.fromkeys([torch.float32, product]):
            models = {"dense": dense, "width": width, "depth": depth.model}
            times = token_times({name: model.to(dtype) for name, model in models.items()}, evaluation.ids)
            print(f"{str(dtype).removeprefix('torch.')}, batch 1: dense {times['dense'] * 1e3:.1f} ms a token", end="")
            ratios = {name: times["dense"] / times[name] for name in ("width", "depth")}
            print("".join(f", {name} {ratio:.2f}x as fast" for name, ratio in ratios.items()), flush=True)
            failed |= max(ratios.values()) < FASTER
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
