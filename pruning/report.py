"""What a compression did, layer by layer, in figures that are JSON as they stand."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class LayerReport:
    """What was done to one layer.

    ``requested_sparsity`` is the layer's own share and ``sparsity`` the share of zeros counted afterwards.
    ``output_error`` is ‖X(W - W')ᵀ‖ / ‖XWᵀ‖ (Frobenius) over ``sampled`` of the calibration ``tokens`` that reached
    the layer. ``outlier_ratio`` is the share of the dense layer's |W_ij|·‖x_j‖ that pass five times their mean (Yin et
    al. 2023, equation 2). Both are None where the method looked at no text. ``seconds`` are those of pruning and
    quantizing alone; ``note`` says where the layer was not treated as asked.
    """

    name: str
    shape: tuple[int, int]
    requested_sparsity: float
    sparsity: float
    seconds: float
    note: str | None = None
    tokens: int = 0
    sampled: int = 0
    output_error: float | None = None
    outlier_ratio: float | None = None


@dataclass(frozen=True)
class Compression:
    """A compressed model and how it came about.

    ``model`` is the one that was given, changed in place, or a smaller one where its structure was pruned. ``seconds``
    is the wall time of the work: of this call, and of the ``resumed`` blocks that were found finished when those were
    made. ``together`` is set where statistics were shared: the number of variants that every block was made in one go
    for, or the least of these where the work was stopped in between; then ``seconds`` counts what was done once for
    all of them, ``common_seconds``, and this variant's own work. ``removed`` says in words what a structured method
    took out, and ``note`` where the whole was not treated as asked. Layers are those of the dense model, by its names.
    """

    model: nn.Module
    layers: tuple[LayerReport, ...]
    seconds: float
    resumed: int = 0
    together: int | None = None
    common_seconds: float | None = None
    removed: tuple[str, ...] = ()
    note: str | None = None
