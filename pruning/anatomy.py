"""Finds the decoder blocks of a causal language model and the linear layers in them, by structure alone."""

from dataclasses import dataclass, field

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pruning.errors import InputError


@dataclass(frozen=True)
class LinearLayer:
    """One linear layer, read and written as (out, in) whatever way it stores its weights."""

    name: str
    module: nn.Module

    @property
    def _parameter(self) -> Tensor:
        parameter = self.module.weight
        assert isinstance(parameter, Tensor)
        return parameter

    def weight(self) -> Tensor:
        """The weights as a view of shape (out, in)."""
        parameter = self._parameter.detach()
        return parameter.T if isinstance(self.module, Conv1D) else parameter

    def set_weight(self, weight: Tensor) -> None:
        """Write ``weight`` (out, in) into the layer's own storage, so that what is tied to it stays tied."""
        self.weight().copy_(weight)

    @property
    def out_features(self) -> int:
        """Rows of :meth:`weight`."""
        return self.weight().shape[0]

    @property
    def in_features(self) -> int:
        """Columns of :meth:`weight`."""
        return self.weight().shape[1]

    @property
    def quantizable(self) -> bool:
        """Whether a module of another kind can take the layer's place."""
        return True

    @property
    def bias(self) -> Tensor | None:
        """The bias (out,), where there is one."""
        bias = getattr(self.module, "bias", None)
        return bias.detach() if isinstance(bias, Tensor) else None


@dataclass(frozen=True)
class Block:
    """One decoder block and its linear layers in the order in which they are registered."""

    name: str
    module: nn.Module
    layers: list[LinearLayer] = field(repr=False)


def decoder_blocks(model: nn.Module) -> list[Block]:
    """The decoder blocks in order.

    They are the entries of the module list that holds the most weights in linear layers; of lists inside each other,
    the outermost. Raises InputError when there is none.
    """
    best: list[Block] = []
    most = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        blocks = [_block(f"{name}.{child}" if name else child, entry) for child, entry in module.named_children()]
        weights = sum(layer.weight().numel() for block in blocks for layer in block.layers)
        if weights > most and all(block.layers for block in blocks):
            best, most = blocks, weights
    if not best:
        raise InputError(
            f"{type(model).__name__} has no list of decoder blocks with linear layers in them: "
            "choose a causal language model"
        )
    return best


def prunable_layers(model: nn.Module) -> list[LinearLayer]:
    """The linear layers of all decoder blocks. Raises InputError as :func:`decoder_blocks` does."""
    return [layer for block in decoder_blocks(model) for layer in block.layers]


def _block(name: str, module: nn.Module) -> Block:
    layers = [
        LinearLayer(f"{name}.{child}" if child else name, entry)
        for child, entry in module.named_modules()
        if isinstance(entry, nn.Linear | Conv1D)
    ]
    return Block(name, module, layers)
