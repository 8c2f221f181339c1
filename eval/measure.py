"""Everything that is measured of one variant, with where it came from."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from eval.figures import Figure
from eval.latency import LatencyProtocol, time_generation
from eval.memory import PeakMemory
from eval.perplexity import score
from eval.provenance import environment
from eval.size import size_figures
from pruning.errors import RunError
from pruning.progress import Progress, silent

if TYPE_CHECKING:
    from pruning.calibration import Windows
    from pruning.runtime import Variant


@dataclass(frozen=True)
class Measurement:
    """Figures by name, where they come from (JSON-ready), and whether the model has stopped predicting at all."""

    figures: dict[str, Figure]
    provenance: dict[str, object]
    collapsed: bool


def measure(
    variant: "Variant",
    windows: "Windows",
    *,
    protocol: LatencyProtocol | None = None,
    progress: Progress = silent,
) -> Measurement:
    """Measure quality, speed, size and memory of a variant that was loaded back from its artifact.

    Phases of ``progress``: "scoring" in tokens, called at every window, then "timing" in iterations, called at every
    token. Raises RunError when it does not fit in memory, and whatever ``progress`` raises.
    """
    model = variant.model.eval()
    try:
        with PeakMemory(variant.device) as memory:
            quality = score(model, variant.tokenizer, windows.ids, progress=progress)
            latency = time_generation(model, windows.ids, protocol, progress=progress)
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        raise RunError(
            f"measuring on windows of {windows.ids.shape[1]} tokens does not fit in the memory of {variant.device}: "
            "use a shorter evaluation length, a smaller model, or a 16-bit dtype"
        ) from error
    figures = {
        "perplexity": quality.perplexity,
        "bits_per_byte": quality.bits_per_byte,
        **size_figures(model, variant.sizes),
        **latency.figures,
        **memory.figures(),
    }
    provenance: dict[str, object] = {
        **environment(variant.device),
        "dtype": str(variant.dtype).removeprefix("torch."),
        "runtime": variant.runtime,
        "evaluation": {
            **windows.provenance,
            "windows": windows.ids.shape[0],
            "length": windows.ids.shape[1],
            "predicted_tokens": quality.tokens,
            "predicted_bytes": quality.text_bytes,
        },
        "timing": latency.protocol,
        "memory": {"host": memory.method},
    }
    return Measurement(figures=figures, provenance=provenance, collapsed=quality.collapsed)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """CUDA and MPS have a class for it; the CPU's allocator only has words."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
