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
from pruning.methods.sparsegpt import round_columns
from pruning.quantize.float8 import quantize_rows_float8
from pruning.quantize.grid import Grid, quantize_groups
from pruning.quantize.int4 import pack4
from pruning.quantize.int8 import quantize_rows
from pruning.quantize.layers import quantized_linear
from pruning.recipe import PruneStep, QuantizeStep, Recipe
from pruning.report import LayerReport
from pruning.statistics import Observed, UnusableStatisticsError

OUTLIER_FACTOR = 5.0
"""How many times the mean of its layer an outlier is (Yin et al. 2023 call it M)."""

UNSEEN = Observed(statistic=None, sample=None, tokens=0)


@dataclass(frozen=True)
class Transformed:
    """A layer's new weights (out, in), or its ``codes`` as they are stored and ``scale``; all None where nothing
    changes."""

    report: LayerReport
    weight: Tensor | None = None
    codes: Tensor | None = None
    scale: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """By the names that :func:`put` reads them back from."""
        parts = {"weight": self.weight, "codes": self.codes, "scale": self.scale}
        return {f"{self.report.name}/{part}": tensor for part, tensor in parts.items() if tensor is not None}


@dataclass(frozen=True)
class Subject:
    """A layer as it is before anything is done to it, and what must be known of it whatever is done.

    ``dense`` are its weights (out, in), ``inputs`` the sampled rows (rows, in) in float32 and ``output_norm`` the
    Frobenius norm of what the dense layer makes of them.
    """

    layer: LinearLayer
    dense: Tensor
    seen: Observed
    inputs: Tensor | None
    output_norm: float
    outlier_ratio: float | None


def examine(layer: LinearLayer, block: str, seen: Observed) -> Subject:
    """Look at ``layer`` once, for however many variants of it.

    Raises RunError when weights or statistics are not finite, naming ``block`` and layer.
    """
    dense = layer.weight()
    _check_finite(dense, f"the weights of {layer.name} in block {block}")
    if seen.statistic is not None:
        _check_finite(seen.statistic, f"what {layer.name} in block {block} was given on the calibration text")
    inputs = seen.sample.float() if seen.sample is not None else None
    return Subject(
        layer=layer,
        dense=dense,
        seen=seen,
        inputs=inputs,
        output_norm=float((inputs @ dense.float().T).norm()) if inputs is not None else 0.0,
        outlier_ratio=_outlier_ratio(dense, seen.statistic) if seen.statistic is not None else None,
    )


def transform(subject: Subject, recipe: Recipe, share: float) -> Transformed:
    """What ``recipe`` makes of a layer, which is left as it is; ``share`` of its weights go.

    Weights are pruned in float32 (float64 stays) and cast back once, or rounded to codes in the same pass.
    """
    started = time.perf_counter()
    layer, dense, seen, step = subject.layer, subject.dense, subject.seen, recipe.prune
    scheme = recipe.quantize if layer.quantizable else None
    notes: list[str] = []
    pruned = weight = rounded = None
    if step is not None and removal_count(dense.numel(), share) > 0:
        grid = grid_for(scheme, dense.dtype) if scheme is not None and scheme.what.rounding == "joint" else None
        pruned, note, rounded = _prune(layer.name, dense, seen, step, share, grid)
        notes += [note] if note is not None else []
        weight = cast(pruned, dense.dtype)
    result = weight if weight is not None else dense
    codes = scale = None
    if scheme is not None:
        if rounded is None:
            rounded, note = quantize(result, scheme, seen.statistic, keep_zeros=pruned is not None)
            notes += [note] if note is not None else []
        whole, scale = rounded
        result = _weights_of(whole, scale)
        codes = pack4(whole) if scheme.what.codes == "int4" else whole
        weight = None
    elif recipe.quantize is not None:
        notes.append(f"not quantized: {recipe.quantize} does not apply to experts kept in one tensor")
    zeros = result.numel() - int(result.count_nonzero())  # waits for the device, so that the time is that of the work
    seconds = time.perf_counter() - started
    inputs = subject.inputs if weight is not None or codes is not None else None
    report = LayerReport(
        name=layer.name,
        shape=(dense.shape[0], dense.shape[1]),
        requested_sparsity=share if step is not None else 0.0,
        sparsity=zeros / result.numel(),
        seconds=seconds,
        note="; ".join(notes) or None,
        tokens=seen.tokens,
        sampled=inputs.shape[0] if inputs is not None else 0,
        output_error=_output_error(dense, result, inputs, subject.output_norm) if inputs is not None else None,
        outlier_ratio=subject.outlier_ratio,
    )
    return Transformed(report, weight, codes, scale)


def grid_for(step: QuantizeStep, dtype: torch.dtype) -> Grid:
    """An empty grid for one layer with weights of ``dtype``."""
    assert step.group is not None
    return Grid(step.group, dtype)


def quantize(
    weight: Tensor, step: QuantizeStep, statistic: Tensor | None, *, keep_zeros: bool
) -> tuple[tuple[Tensor, Tensor], str | None]:
    """Codes (out, in), one element each, and scales of ``weight`` (out, in), and a note where that went another way.

    ``statistic`` is what the layer was given, for schemes that look at it. With ``keep_zeros`` zeros stay zero; without
    it they do wherever each weight becomes its nearest code.
    """
    scheme = step.what
    if scheme.codes == "int8":
        return quantize_rows(weight), None
    if scheme.codes == "float8":
        return quantize_rows_float8(weight), None
    assert step.group is not None
    if scheme.statistics == "none":
        return quantize_groups(weight, step.group), None
    if statistic is None:
        return quantize_groups(weight, step.group), "rounded to nearest: no calibration token reached it"
    grid = grid_for(step, weight.dtype)
    try:
        round_columns(weight, statistic, weight == 0 if keep_zeros else None, grid)
    except UnusableStatisticsError as error:
        return quantize_groups(weight, step.group), f"rounded to nearest: {error}"
    return grid.result(), None


def _weights_of(codes: Tensor, scale: Tensor) -> Tensor:
    """The weights (out, in) that ``codes`` (out, in) stand for, in the dtype of ``scale``."""
    groups = codes.to(scale.dtype).view(*scale.shape, -1)
    return groups.mul_(scale[..., None]).view(codes.shape)


def put(model: nn.Module, layer: LinearLayer, tensors: dict[str, Tensor], recipe: Recipe) -> None:
    """Write what :meth:`Transformed.tensors` gave of ``recipe`` into ``model``, on the layer's device."""
    place: dict[str, Any] = {"device": layer.weight().device}
    weight = tensors.get(f"{layer.name}/weight")
    if weight is not None:
        layer.set_weight(weight.to(**place))
    codes, scale = tensors.get(f"{layer.name}/codes"), tensors.get(f"{layer.name}/scale")
    if codes is not None and scale is not None:
        assert recipe.quantize is not None
        parent, _, leaf = layer.name.rpartition(".")
        activations = recipe.quantize.what.activations
        quantized = quantized_linear(codes.to(**place), scale.to(**place), layer.bias, activations=activations)
        setattr(model.get_submodule(parent), leaf, quantized)


def _prune(
    name: str, weight: Tensor, seen: Observed, step: PruneStep, share: float, grid: Grid | None
) -> tuple[Tensor, str | None, tuple[Tensor, Tensor] | None]:
    """The pruned weights (out, in), a note where another method had to step in, and codes and scales on ``grid``."""
    method, statistic = METHODS[step.method], seen.statistic
    drawn: dict[str, Any] = {"generator": _generator(step.seed, name)} if method.seeded else {}
    if method.needs_calibration and statistic is None:
        pruned = METHODS["magnitude"].load()(weight, None, share, step.pattern)
        return pruned, "pruned by magnitude: no calibration token reached it", None
    if not method.needs_calibration:
        return method.load()(weight, None, share, step.pattern, **drawn), None, None
    assert statistic is not None
    if method.statistics == "norms":
        statistic = seen.norms if seen.norms is not None else norms_of(statistic)
    if grid is not None:
        drawn["grid"] = grid
    try:
        pruned = method.load()(weight, statistic, share, step.pattern, **drawn)
        return pruned, None, grid.result() if grid is not None else None
    except UnusableStatisticsError as error:
        fallback = METHODS["wanda"].load()(weight, norms_of(statistic), share, step.pattern)
        return fallback, f"pruned by Wanda: {error}", None


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


def _output_error(dense: Tensor, result: Tensor, inputs: Tensor, output_norm: float) -> float:
    change = float((inputs @ (dense.float() - result.float()).T).norm())
    return change / output_norm if output_norm > 0 else 0.0


def _outlier_ratio(dense: Tensor, statistic: Tensor) -> float:
    scores = dense.float().abs().mul_(norms_of(statistic).float())
    return int((scores > OUTLIER_FACTOR * scores.mean()).sum()) / scores.numel()


def _check_finite(values: Tensor, what: str) -> None:
    # One sum tells in a quarter of the time; finite numbers whose sum passes the range are looked at one by one.
    if not bool(torch.isfinite(values.sum(dtype=torch.promote_types(values.dtype, torch.float32)))) and not bool(
        torch.isfinite(values).all()
    ):
        raise RunError(
            f"{what} are not finite numbers (NaN or infinity): the model is damaged, or its numbers pass the range of "
            "its dtype; try --dtype float32"
        )
