"""Finds the decoder blocks of a causal language model and the linear layers in them, by structure alone."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from pruning.errors import InputError
from pruning.experts import ExpertTensor, find_experts, see_in_use

PROBE_TOKENS = 8
"""Tokens run through a model to see how its experts use their tensors."""


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
class ExpertLayer(LinearLayer):
    """One expert's matrix in a 3-D tensor of its ``module``, which runs all experts: ``name`` is "….up_proj[3]"."""

    tensor: ExpertTensor
    index: int

    @property
    def _parameter(self) -> Tensor:
        return self.tensor.tensor[self.index]

    def weight(self) -> Tensor:
        """The weights as a view of shape (out, in)."""
        return self._parameter.T if self.tensor.transposed else self._parameter

    @property
    def quantizable(self) -> bool:
        """Whether a module of another kind can take the layer's place."""
        return False

    @property
    def bias(self) -> Tensor | None:
        """The bias (out,), where there is one."""
        biases = self.tensor.bias
        return biases[self.index] if biases is not None else None


@dataclass(frozen=True)
class Block:
    """One decoder block and its linear layers, in the order in which their weights are registered.

    Every expert is a layer of its own; a router is none.
    """

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
    _see_experts(model, best)
    return best


def prunable_layers(model: nn.Module) -> list[LinearLayer]:
    """The linear layers of all decoder blocks. Raises InputError as :func:`decoder_blocks` does."""
    return [layer for block in decoder_blocks(model) for layer in block.layers]


def expert_tensors(layers: Sequence[LinearLayer]) -> list[ExpertTensor]:
    """The 3-D tensors that experts among ``layers`` are part of, each once."""
    return list({layer.tensor.name: layer.tensor for layer in layers if isinstance(layer, ExpertLayer)}.values())


def all_expert_tensors(model: nn.Module) -> list[ExpertTensor]:
    """The 3-D tensors of experts in any entry of any module list, linear layers beside them or not."""
    found: dict[str, ExpertTensor] = {}
    for name, module in model.named_modules():
        for child, entry in module.named_children() if isinstance(module, nn.ModuleList) else ():
            found.update((tensor.name, tensor) for tensor in find_experts(entry, f"{name}.{child}.")[0])
    return list(found.values())


def _block(name: str, module: nn.Module) -> Block:
    tensors, routers = find_experts(module, f"{name}.")
    experts = {tensor.name: tensor for tensor in tensors}
    layers: list[LinearLayer] = []
    for path, entry in module.named_modules():
        full = f"{name}.{path}" if path else name
        if isinstance(entry, nn.Linear | Conv1D):
            if f"{full}.weight" not in routers:
                layers.append(LinearLayer(full, entry))
            continue
        for parameter, _ in entry.named_parameters(recurse=False):
            tensor = experts.get(f"{full}.{parameter}")
            if tensor is not None:
                layers += [ExpertLayer(f"{tensor.name}[{e}]", entry, tensor, e) for e in range(len(tensor.tensor))]
    return Block(name, module, layers)


class _SeenError(Exception):
    """Ends a forward pass of which nothing more is needed."""


def _see_experts(model: nn.Module, blocks: Sequence[Block]) -> None:
    """Run a few tokens through the first blocks, where it is not known yet how their experts use their tensors."""
    unseen: dict[tuple[type[nn.Module], str], tuple[Block, ExpertTensor]] = {}
    for block in blocks:
        for tensor in expert_tensors(block.layers):
            unseen.setdefault((type(tensor.module), tensor.parameter), (block, tensor))
    wanted = [(block, tensor) for block, tensor in unseen.values() if not tensor.seen]
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if not wanted or embedding is None or any(tensor.tensor.is_meta for _, tensor in wanted):
        return
    ids = torch.arange(PROBE_TOKENS, device=embedding.weight.device)[None] % embedding.num_embeddings

    def stop(*_: object) -> None:
        raise _SeenError

    def forward() -> None:
        with suppress(_SeenError):
            model(ids)

    training = [module for module in model.modules() if module.training]
    handle = wanted[-1][0].module.register_forward_hook(stop)
    try:
        with torch.no_grad():
            model.eval()
            see_in_use([tensor for _, tensor in wanted], forward)
    finally:
        handle.remove()
        for module in training:
            module.training = True


@dataclass(frozen=True)
class Unpruned:
    """A parameter that is a matrix or more and is left as it is: its weights, tied ones counted once, and why."""

    name: str
    weights: int
    reason: str


def unpruned(model: nn.Module) -> list[Unpruned]:
    """Every parameter that is a matrix or more and no prunable layer's weight, in the order of the model.

    Raises InputError as :func:`decoder_blocks` does.
    """
    blocks = decoder_blocks(model)
    layers = [layer for block in blocks for layer in block.layers]
    pruned = {layer.tensor.name if isinstance(layer, ExpertLayer) else f"{layer.name}.weight" for layer in layers}
    routers = {name for block in blocks for name in find_experts(block.module, f"{block.name}.")[1]}
    experts = {id(tensor.module) for tensor in expert_tensors(layers)}
    vocabulary = max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=0)
    first: dict[int, str] = {}
    left: list[Unpruned] = []
    for path, module in model.named_modules():
        inside = any(path == block.name or path.startswith(f"{block.name}.") for block in blocks)
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{leaf}" if path else leaf
            known = first.setdefault(id(parameter), name)
            if parameter.ndim < 2 or name in pruned:
                continue
            if known != name:
                left.append(Unpruned(name, 0, f"tied: it is {known}"))
            elif name in routers:
                left.append(Unpruned(name, parameter.numel(), "router"))
            elif id(module) in experts:
                left.append(Unpruned(name, parameter.numel(), "biases of experts"))
            else:
                left.append(Unpruned(name, parameter.numel(), _reason(module, parameter, vocabulary, inside)))
    return left


def _reason(module: nn.Module, parameter: Tensor, vocabulary: int, inside: bool) -> str:
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.Linear | Conv1D) and not inside:
        head = parameter.shape[1 if isinstance(module, Conv1D) else 0] == vocabulary
        return "output head" if head else "linear layer outside of the decoder blocks"
    if isinstance(module, _ConvNd):
        return "convolution"
    return f"parameter of {type(module).__name__}, which is no linear layer"
