"""How large a variant is: on disk, in memory, and how many of the dense model's weights are removed."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from eval.figures import Figure
from pruning.anatomy import all_expert_tensors, prunable_layers
from pruning.quantize.layer import QuantizedLinear

if TYPE_CHECKING:
    from pruning.artifact import StoredSizes


def size_figures(model: nn.Module, sizes: "StoredSizes") -> dict[str, Figure]:
    """Bytes of the saved artifact and of the loaded ``model``, bits a weight, and zeros as counted in the weights.

    ``size_on_disk`` is the whole folder, ``size_of_pruned_layers`` what the pruned layers take of it, and
    ``bits_per_weight`` 8 × bytes of the weight file over the parameters of the model. ``sparsity`` is the share of the
    dense model's weights in prunable layers that are removed: zero, or gone with a smaller layer. ``sparsity_of_model``
    is that share of all its parameters, tied ones counted once.
    """
    counts = [(count_zeros(weight), weight.numel()) for _, weight in prunable_weights(model)]
    whole = [(count_zeros(weight), weight.numel()) for weight in _all_weights(model)]
    gone = sizes.dense16_pruned_layer_bytes // 2 - sizes.pruned_layer_weights
    gone_of_model = sizes.dense16_bytes // 2 - sizes.parameters
    return {
        "size_on_disk": Figure(value=sizes.total_bytes, unit="bytes"),
        "size_of_pruned_layers": Figure(value=sizes.pruned_layer_bytes, unit="bytes"),
        "bits_per_weight": Figure(value=8 * sizes.weight_file_bytes / sizes.parameters, unit="bits"),
        "resident_size": Figure(value=resident_bytes(model), unit="bytes"),
        "sparsity": Figure(value=_removed(counts, gone), unit="fraction"),
        "sparsity_of_model": Figure(value=_removed(whole, gone_of_model), unit="fraction"),
    }


def prunable_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and stored weights of every prunable layer, whatever its storage: codes where it is quantized."""
    quantized = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    for name, module in quantized.items():
        yield name, module.whole_codes()
    if quantized:
        # Of the prunable layers only experts in one tensor are not, and the anatomy would not know the others.
        yield from ((tensor.name, tensor.tensor) for tensor in all_expert_tensors(model))
        return
    for layer in prunable_layers(model):
        yield layer.name, layer.weight()


def count_zeros(weight: Tensor) -> int:
    """How many entries are exactly zero, of either sign."""
    return weight.numel() - int(torch.count_nonzero(weight))


def resident_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, each storage counted once however many tensors share it."""
    storages = {}
    for tensor in (*model.parameters(), *model.buffers()):
        storage = tensor.untyped_storage()
        storages[storage.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _all_weights(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            yield module.whole_codes()
            if module.bias is not None:
                yield module.bias


def _removed(counts: list[tuple[int, int]], gone: int) -> float:
    return (sum(zeros for zeros, _ in counts) + gone) / (sum(numel for _, numel in counts) + gone)
