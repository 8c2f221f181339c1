"""What happens to one layer: prune, fall back where that cannot be, quantize, and report."""

import hashlib
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pruning.anatomy import LinearLayer
from pruning.errors import RunError
from pruning.mask import removal_count
from pruning.methods import METHODS
from pruning.quantize.int8 import Int8Linear, quantize_rows
from pruning.recipe import PruneStep, Recipe
from pruning.report import LayerReport
from pruning.statistics import Observed, UnusableStatisticsError

OUTLIER_FACTOR = 5.0
"""How many times the mean of its layer an outlier is (Yin et al. 2023 call it M)."""

UNSEEN = Observed(statistic=None, sample=None, tokens=0)


@dataclass(frozen=True)
class Transformed:
    """A layer's new weights (out, in), or its int8 ``codes`` and ``scale``; all None where nothing changes."""

    report: LayerReport
    weight: Tensor | None = None
    codes: Tensor | None = None
    scale: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """By the names that :func:`put` reads them back from."""
        parts = {"weight": self.weight, "codes": self.codes, "scale": self.scale}
        return {f"{self.report.name}/{part}": tensor for part, tensor in parts.items() if tensor is not None}


def transform(layer: LinearLayer, block: str, seen: Observed, recipe: Recipe, share: float) -> Transformed:
    """What ``recipe`` makes of ``layer``, which is left as it is; ``share`` of its weights go.

    Weights are pruned in float32 (float64 stays) and cast back once. Raises RunError when weights or statistics are
    not finite, naming ``block`` and layer.
    """
    started = time.perf_counter()
    dense = layer.weight()
    _check_finite(dense, f"the weights of {layer.name} in block {block}")
    step = recipe.prune
    notes: list[str] = []
    weight: Tensor | None = None
    if seen.statistic is not None:
        _check_finite(seen.statistic, f"what {layer.name} in block {block} was given on the calibration text")
    if step is not None and removal_count(dense.numel(), share) > 0:
        pruned, note = _prune(layer.name, dense, seen, step, share)
        weight = cast(pruned, dense.dtype)
        notes += [note] if note is not None else []
    result = weight if weight is not None else dense
    codes = scale = None
    if recipe.quantize is not None and layer.quantizable:
        codes, scale = quantize_rows(result)
        result = codes.to(scale.dtype) * scale[:, None]
        weight = None
    elif recipe.quantize is not None:
        notes.append(f"not quantized: {recipe.quantize} does not apply to experts kept in one tensor")
    zeros = result.numel() - int(result.count_nonzero())  # waits for the device, so that the time is that of the work
    seconds = time.perf_counter() - started
    sample = seen.sample if weight is not None or codes is not None else None
    report = LayerReport(
        name=layer.name,
        shape=(dense.shape[0], dense.shape[1]),
        requested_sparsity=share if step is not None else 0.0,
        sparsity=zeros / result.numel(),
        seconds=seconds,
        note="; ".join(notes) or None,
        tokens=seen.tokens,
        sampled=sample.shape[0] if sample is not None else 0,
        output_error=_output_error(dense, result, sample) if sample is not None else None,
        outlier_ratio=_outlier_ratio(dense, seen.statistic) if seen.statistic is not None else None,
    )
    return Transformed(report, weight, codes, scale)


def put(model: nn.Module, layer: LinearLayer, tensors: dict[str, Tensor]) -> None:
    """Write what :meth:`Transformed.tensors` gave into ``model``, on the layer's device."""
    place: dict[str, Any] = {"device": layer.weight().device}
    weight = tensors.get(f"{layer.name}/weight")
    if weight is not None:
        layer.set_weight(weight.to(**place))
    codes, scale = tensors.get(f"{layer.name}/codes"), tensors.get(f"{layer.name}/scale")
    if codes is not None and scale is not None:
        parent, _, leaf = layer.name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, Int8Linear(codes.to(**place), scale.to(**place), layer.bias))


def _prune(name: str, weight: Tensor, seen: Observed, step: PruneStep, share: float) -> tuple[Tensor, str | None]:
    method, statistic = METHODS[step.method], seen.statistic
    drawn = {"generator": _generator(step.seed, name)} if method.seeded else {}
    if method.needs_calibration and statistic is None:
        pruned = METHODS["magnitude"].load()(weight, None, share, step.pattern)
        return pruned, "pruned by magnitude: no calibration token reached it"
    if not method.needs_calibration:
        return method.load()(weight, None, share, step.pattern, **drawn), None
    assert statistic is not None
    if method.statistics == "norms":
        statistic = seen.norms if seen.norms is not None else norms_of(statistic)
    try:
        return method.load()(weight, statistic, share, step.pattern, **drawn), None
    except UnusableStatisticsError as error:
        fallback = METHODS["wanda"].load()(weight, norms_of(statistic), share, step.pattern)
        return fallback, f"pruned by Wanda: {error}"


def norms_of(statistic: Tensor) -> Tensor:
    """The norms (in,) of the input features, from themselves or from the Gram matrix (in, in)."""
    return statistic if statistic.ndim == 1 else statistic.diagonal().sqrt()


def cast(pruned: Tensor, dtype: torch.dtype) -> Tensor:
    """``pruned`` in ``dtype``, in which a kept weight too small for it becomes the smallest there is, not zero."""
    cast = pruned.to(dtype)
    if dtype == torch.float16:
        limits = torch.finfo(dtype)
        smallest = torch.full_like(cast, limits.smallest_normal * limits.eps).copysign(pruned.to(dtype))
        cast = torch.where((cast == 0) & (pruned != 0), smallest, cast)
    return cast


def _generator(seed: int, name: str) -> torch.Generator:
    """Numbers that follow from seed and layer alone, whatever was drawn before."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _output_error(dense: Tensor, result: Tensor, sample: Tensor) -> float:
    inputs = sample.float()
    before = inputs @ dense.float().T
    change = inputs @ (dense.float() - result.float()).T
    norm = float(before.norm())
    return float(change.norm()) / norm if norm > 0 else 0.0


def _outlier_ratio(dense: Tensor, statistic: Tensor) -> float:
    scores = dense.float().abs().mul_(norms_of(statistic).float())
    return int((scores > OUTLIER_FACTOR * scores.mean()).sum()) / scores.numel()


def _check_finite(values: Tensor, what: str) -> None:
    if not bool(torch.isfinite(values).all()):
        raise RunError(
            f"{what} are not finite numbers (NaN or infinity): the model is damaged, or its numbers pass the range of "
            "its dtype; try --dtype float32"
        )
