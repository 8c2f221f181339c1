"""2:4 layers on CUDA through torch's semi-structured tensors, where the card has them, agrees and gets faster."""

import time
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.sparse import to_sparse_semi_structured

KEPT, GROUP = 2, 4

TOLERANCE = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-7}
"""By dtype that has kernels, how far outputs may be apart as a share of the sum of magnitudes.

Sums are made in another order, and rounded once.
"""

ROUNDS = 11
CALLS = 20


@dataclass(frozen=True)
class Tried:
    """What became of 2:4 layers: how many there are, how many could run sparse, and how many do.

    ``speed`` is the time of one token through dense layers over that through sparse ones, of all that could; None where
    none could.
    """

    layers: int
    possible: int = 0
    sparse: int = 0
    speed: float | None = None

    @property
    def words(self) -> str:
        """For the runtime of a variant; empty where it has no 2:4 layers."""
        if not self.layers:
            return ""
        if self.speed is None:
            return "2:4 as dense, as there is no sparse kernel for it here"
        if not self.sparse:
            return f"2:4 as dense, as sparse kernels are not faster here: {self.speed:.2f} of the speed"
        return f"torch semi-structured 2:4 in {self.sparse} of {self.layers} layers"


NONE_TRIED = Tried(0)


class SemiStructuredLinear(nn.Module):
    """A linear layer of 2:4 weights (out, in) that keeps two of four, and two bits for each that say where it was."""

    bias: Tensor | None

    def __init__(self, sparse: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = sparse.shape
        self._sparse = sparse
        self.register_buffer("bias", bias)
        # What the tensor is made of, to be counted with the memory of the model.
        for part in ("packed", "meta"):
            self.register_buffer(part, getattr(sparse, part, None), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """``inputs`` (..., in) to (..., out)."""
        return functional.linear(inputs.contiguous(), self._sparse, self.bias)


def use_where_faster(model: nn.Module) -> Tried:
    """Replace the 2:4 layers of ``model``, on CUDA, by sparse ones where those compute the same, faster.

    Layers of one shape are timed once, in turns with dense ones.
    """
    layers = {name: module for name, module in model.named_modules() if is_semi_structured(module)}
    seconds: dict[tuple[int, ...], tuple[float, float]] = {}
    possible = sparse = 0
    whole = kept = 0.0
    for name, layer in layers.items():
        made = converted(layer)
        if made is None or not agree(layer, made):
            continue
        shape = layer.out_features, layer.in_features, layer.bias is not None
        if shape not in seconds:
            seconds[shape] = timed(layer, made)
        dense_seconds, sparse_seconds = seconds[shape]
        possible += 1
        whole, kept = whole + dense_seconds, kept + sparse_seconds
        if sparse_seconds < dense_seconds:
            model.set_submodule(name, made)
            sparse += 1
    return Tried(len(layers), possible, sparse, whole / kept if possible else None)


def is_semi_structured(module: nn.Module) -> bool:
    """Whether it is a linear layer, half of whose weights are zero: of each four consecutive inputs at least two."""
    if type(module) is not nn.Linear or module.in_features % GROUP:
        return False
    kept = (module.weight.detach().reshape(-1, GROUP) != 0).sum(dim=1)
    return bool((kept <= KEPT).all()) and int(kept.sum()) > 0


def converted(layer: nn.Linear) -> SemiStructuredLinear | None:
    """The layer as a sparse one; None where device, dtype or shape have no kernel."""
    weight = layer.weight.detach()
    if weight.device.type != "cuda" or weight.dtype not in TOLERANCE:
        return None
    try:
        return SemiStructuredLinear(to_sparse_semi_structured(weight.contiguous()), layer.bias)
    except (RuntimeError, NotImplementedError, ValueError):
        return None


@torch.no_grad()
def agree(dense: nn.Linear, sparse: nn.Module) -> bool:
    """Whether both compute the same up to rounding, for one token and for some, where the sparse one can be called."""
    weight = dense.weight
    generator = torch.Generator().manual_seed(dense.in_features)
    for tokens in (1, 17):
        inputs = torch.randn(tokens, dense.in_features, generator=generator).to(weight)
        try:
            found = sparse(inputs)
        except (RuntimeError, NotImplementedError):
            return False
        magnitude = inputs.float().abs() @ weight.float().abs().t()
        if dense.bias is not None:
            magnitude += dense.bias.float().abs()
        apart = (found.float() - dense(inputs).float()).abs()
        if not bool((apart <= TOLERANCE[weight.dtype] * magnitude).all()):
            return False
    return True


@torch.no_grad()
def timed(dense: nn.Linear, sparse: nn.Module) -> tuple[float, float]:
    """Median seconds that one token takes through each of them, in turns."""
    inputs = torch.ones(1, 1, dense.in_features, device=dense.weight.device, dtype=dense.weight.dtype)
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for layer, times in zip((dense, sparse), samples, strict=True):
            _wait_for(inputs)
            started = time.perf_counter()
            for _ in range(CALLS):
                layer(inputs)
            _wait_for(inputs)
            times.append((time.perf_counter() - started) / CALLS)
    return median(samples[0]), median(samples[1])


def _wait_for(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
