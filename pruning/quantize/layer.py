"""What all linear layers with codes in place of weights have in common."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from pruning.kernels.library import Product
from pruning.quantize import Codes

FEW_TOKENS = 16
"""Up to this many tokens at once a kernel for few of them is used on a CPU; more go through the dequantized weights.

Measured by ``python -m tests.bench.lowbit`` on a 2-core Xeon with AVX-512, layers of 192×576 to 4096×4096, as a
multiple of the speed of the faster dense layer: for 1 token int8 has 1.5 to 2.6 and int4 1.5 to 3.6, at 16 still 1.3 to
2.2 and 0.9 to 2.1, where dequantizing first has 0.5 to 1.0 and 0.3 to 0.5.
"""


class QuantizedLinear(nn.Module):
    """A linear layer that keeps ``codes`` as they are stored, ``scale`` and ``bias`` (out,) or None.

    Its weights are code × scale; ``scale`` is (out,), or (out, in / group) where ``group`` consecutive inputs share
    one, and the layer computes in its dtype. With ``activations`` inputs are rounded to the kind of the codes as well,
    each token with a scale of its own. :meth:`prepare` brings the codes into the layout that the kernel of their device
    reads, in the same bytes; the state dict is portable only before that.
    """

    kind: ClassVar[Codes]

    codes: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None = None, *, activations: bool = False) -> None:
        super().__init__()
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("scale", scale.contiguous())
        self.register_buffer("bias", bias)
        self.activations = activations
        self._biased = bias is not None
        self._product: Product | None = None
        """The product with few tokens where our own kernels make it; it reads the codes where they lie now."""

    def __getstate__(self) -> dict[str, Any]:
        """All but what copies of the codes are not read by."""
        return {**super().__getstate__(), "_product": None}  # type: ignore[no-untyped-call]  # torch has no types for it

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """To another device or dtype, where the product has to be made anew."""
        self._product = None
        return super()._apply(fn, recurse)  # type: ignore[no-any-return,no-untyped-call]  # torch has no types for it

    @property
    def out_features(self) -> int:
        """Rows of the weights."""
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        """Columns of the weights."""
        return self.codes.shape[1]

    @property
    def group(self) -> int | None:
        """How many consecutive inputs share a scale; None where each row has one."""
        return self.in_features // self.scale.shape[1] if self.scale.ndim == 2 else None

    @property
    @abstractmethod
    def runtime(self) -> str:
        """Which kernels a call uses on the device and in the dtype the layer has now.

        It begins with "dequantized" where the weights are made anew in every call and nothing else.
        """

    def prepare(self) -> None:
        """Make ready for the device the layer is on; by default there is nothing to do."""

    def few_tokens(self, inputs: Tensor) -> Tensor | None:
        """What our own kernel makes of ``inputs`` (..., in); None where it was not chosen or they are not for it."""
        product = self._product
        if (
            product is None
            or inputs.dtype is not product.dtype
            or inputs.numel() > FEW_TOKENS * product.columns
            or not inputs.is_cpu
            or (inputs.requires_grad and torch.is_grad_enabled())
        ):
            return None
        output = product(inputs.contiguous())
        return output.add_(cast(Tensor, self.bias)) if self._biased else output

    def _few_and_many(self, kernel: str) -> str:
        return (
            f"{kernel} up to {FEW_TOKENS} tokens, dequantized to {str(self.scale.dtype).removeprefix('torch.')} above"
        )

    def whole_codes(self) -> Tensor:
        """The codes (out, in), one element each."""
        return self.codes

    def dequantized(self) -> Tensor:
        """The weights (out, in) as the dtype of ``scale`` holds them."""
        # In place: a second buffer of this size costs more in page faults than the multiplication itself.
        weights = self.whole_codes().to(self.scale.dtype)
        if self.scale.ndim == 1:
            return weights.mul_(self.scale[:, None])
        weights.view(*self.scale.shape, -1).mul_(self.scale[..., None])
        return weights

    def forward(self, inputs: Tensor) -> Tensor:
        """``inputs`` (..., in) to (..., out)."""
        return functional.linear(inputs, self.dequantized(), self.bias)

    def extra_repr(self) -> str:
        """The shape, as torch prints it for a linear layer, and how the weights are stored."""
        shape = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{shape}, codes={self.kind}, group={self.group}, activations={self.activations}"


def check_codes(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless ``codes`` (out, in) are of ``dtype`` and there is one ``scale`` for each row."""
    if codes.dtype != dtype or codes.ndim != 2 or scale.shape != codes.shape[:1]:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"codes must be {name} of shape (out, in) with one scale per row: got {codes.dtype} "
            f"{tuple(codes.shape)} and scales {tuple(scale.shape)}"
        )
