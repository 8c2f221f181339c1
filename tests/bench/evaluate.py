"""How close scoring text comes to the bare matrix products it cannot do without: ``python -m tests.bench.evaluate``."""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from app.paths import model_cache
from eval.perplexity import window_losses
from eval.provenance import device_name
from pruning.anatomy import decoder_blocks
from pruning.calibration import evaluation_windows
from pruning.models import load_model
from pruning.sources import parse_reference
from pruning.texts import load_text

TARGET = 0.80


def bare_products(model: Any, length: int) -> Callable[[int], None]:
    """The products of one window of ``length`` tokens: all linear layers, attention both ways, and the output head."""
    blocks = decoder_blocks(model)
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    like = next(model.parameters())
    weights = [layer.weight() for block in blocks for layer in block.layers]
    head = model.get_output_embeddings().weight
    inputs = {size: torch.randn(length, size).to(like) for size in {w.shape[1] for w in (*weights, head)}}
    queries = torch.randn(1, heads, length, width).to(like)
    scores = torch.rand(1, heads, length, length).to(like)

    def multiply(_: int) -> None:
        with torch.inference_mode():
            for weight in weights:
                linear(inputs[weight.shape[1]], weight)
            for _block in blocks:
                torch.matmul(queries, queries.transpose(-1, -2))
                torch.matmul(scores, queries)
            linear(inputs[head.shape[1]], head)

    return multiply


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall time of ``work``, the accelerator's queue included."""
    start = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def side_by_side(work: Callable[[int], None], windows: int) -> None:
    """Each window on one thread of its own, which is another way to do the same products."""
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(work, range(windows)))
    torch.set_num_threads(threads)


def main() -> None:
    """Print the ratio, measured in turns in one process so that drift of the machine falls on both sides."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    loaded = load_model(parse_reference(asked.model), device=asked.device, dtype=asked.dtype, cache=model_cache())
    model, device = loaded.model, loaded.device
    text = load_text("articles", "evaluation")
    ids: Tensor = evaluation_windows(loaded.tokenizer, text, asked.windows, asked.length).ids
    multiply = bare_products(model, asked.length)
    ways: dict[str, Callable[[], object]] = {
        "perplexity": lambda: window_losses(model, ids),
        "bare products": lambda: [multiply(window) for window in range(asked.windows)],
    }
    if device.type == "cpu":
        ways["bare products, windows side by side"] = lambda: side_by_side(multiply, asked.windows)
    for work in ways.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(asked.rounds):
        for name, work in ways.items():
            times[name].append(seconds(work, device))
    print(f"{device_name(device)}, {torch.get_num_threads()} threads, {loaded.dtype}")
    print(f"{asked.windows} × {asked.length} tokens")
    for name, samples in times.items():
        print(f"{name}: median {median(samples):.3f} s, {asked.windows * asked.length / median(samples):.0f} tokens/s")
    bare = min(median(samples) for name, samples in times.items() if name != "perplexity")
    print(
        f"speed of perplexity over the faster bare products: {bare / median(times['perplexity']):.2f} (target {TARGET})"
    )


if __name__ == "__main__":
    main()
