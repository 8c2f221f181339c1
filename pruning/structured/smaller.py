"""Builds a smaller model of the same class from a smaller configuration, and moves parameters into it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]  # it has no type hints
from torch import Tensor, nn
from transformers.utils import logging

from pruning.anatomy import Block
from pruning.errors import InputError

Changes = dict[str, Any]
"""New values of attributes of a configuration, by name."""


def text_config(model: nn.Module) -> Any:
    """The configuration of the language model in ``model``. Raises InputError when it has none."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise InputError(
            f"{type(model).__name__} has no configuration that a smaller model could be made from: "
            "choose a method that removes single weights"
        )
    text: Any = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return text


def changed_config(model: nn.Module, changes: Changes) -> Any:
    """A configuration as that of ``model`` with other values, made as reading it from a file would make it.

    Raises whatever the class raises of values it does not take.
    """
    config: Any = model.config
    text = text_config(model)
    data = config.to_dict()
    inner = data
    if text is not config:
        inner = data[next(key for key in config.sub_configs if getattr(config, key, None) is text)]
    names = getattr(type(text), "attribute_map", {})
    inner.update({names.get(name, name): value for name, value in changes.items()})
    made = type(config).from_dict(data)
    made._attn_implementation = config._attn_implementation
    return made


def empty_model(model: nn.Module, changes: Changes) -> nn.Module | None:
    """A model of the class of ``model`` after ``changes``, its parameters without memory; None where there is none."""
    build: Any = type(model)
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    state = torch.get_rng_state()  # some classes draw numbers even so
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # a refusal is an answer, and nothing to tell a person of
    try:
        config = changed_config(model, changes)
        with init_empty_weights(include_buffers=False):
            made: nn.Module = build._from_config(config, dtype=dtype)
    except Exception:  # a class may refuse values in any way it likes
        return None
    finally:
        logging.set_verbosity(verbosity)
        torch.set_rng_state(state)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        made.generation_config = generation
    return made.eval().requires_grad_(False)


def fewer_blocks(model: nn.Module, blocks: Sequence[Block], kept: Sequence[int]) -> nn.Module:
    """A model without memory that has only the blocks ``kept`` of ``model``, each of the kind it was.

    Lists with an entry for each block are cut, lists of block numbers renumbered. Raises InputError when no
    configuration gives such a model.
    """
    config = text_config(model)
    data = config.to_dict()
    wanted = [shapes(blocks[index].module) for index in kept]
    lists = {name: cut for name, value in data.items() if (cut := _cut(name, value, len(blocks), kept)) is not None}
    # Some count the first blocks, which are of another kind than those after them.
    counts: list[Changes] = [{}]
    counts += [
        {name: sum(index < value for index in kept)}
        for name, value in data.items()
        if type(value) is int and 0 < value < len(blocks) and "layer" not in name
    ]
    for name in _counters(config, len(blocks)):
        for count in counts:
            made = empty_model(model, {**lists, **count, name: len(kept)})
            found = blocks_at(made, blocks[0]) if made is not None else []
            if made is not None and [shapes(block) for block in found] == wanted:
                return made
    raise InputError(
        f"no {type(config).__name__} describes a {type(model).__name__} without the blocks that matter least: "
        "choose another sparsity, or a method that removes single weights"
    )


def _counters(config: Any, blocks: int) -> list[str]:
    """Attributes that may be the number of blocks, the likeliest first."""
    named = ["num_hidden_layers"] if getattr(config, "num_hidden_layers", None) == blocks else []
    other = [name for name, value in config.to_dict().items() if type(value) is int and value == blocks]
    return list(dict.fromkeys([*named, *sorted(other, key=lambda name: "layer" not in name)]))


def _cut(name: str, value: Any, blocks: int, kept: Sequence[int]) -> Any | None:
    """What becomes of a list that says something of each block, or names some of them; None for anything else."""
    if not isinstance(value, list | tuple) or not value:
        return None
    if len(value) == blocks:
        return [value[index] for index in kept]
    numbers = all(type(entry) is int and 0 <= entry < blocks for entry in value) and len(set(value)) == len(value)
    if numbers and re.search("layer|block", name):
        return [place for place, index in enumerate(kept) if index in value]
    return None


def blocks_at(model: nn.Module, first: Block) -> list[nn.Module]:
    """The entries of the module list of ``model`` that stands where ``first`` stands in the model it is from."""
    try:
        return [module for _, module in model.get_submodule(first.name.rpartition(".")[0]).named_children()]
    except AttributeError:
        return []


def shapes(module: nn.Module) -> dict[str, torch.Size]:
    """Of every parameter of ``module``, by name."""
    return {name: parameter.shape for name, parameter in module.named_parameters()}


def move_block(old: nn.Module, new: nn.Module, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Give ``new`` its parameters: ``tensors`` by name, else those of ``old``; buffers of ``old`` that fit as well."""
    for name, parameter in old.named_parameters():
        taken = parameter if tensors is None else nn.Parameter(tensors[name], requires_grad=False)
        _set(new, name, taken)
    _move_buffers(old, new)


def move_rest(old: nn.Module, new: nn.Module, blocks: Sequence[str]) -> None:
    """Make each parameter of ``old`` outside of ``blocks`` (their names) that of ``new``; tied ones stay tied."""
    inside = tuple(f"{name}." for name in blocks)
    for name, parameter in old.named_parameters(remove_duplicate=False):
        if not name.startswith(inside):
            _set(new, name, parameter)
    _move_buffers(old, new, inside)


def _move_buffers(old: nn.Module, new: nn.Module, leaving: tuple[str, ...] = ()) -> None:
    known = dict(new.named_buffers())
    for name, buffer in old.named_buffers():
        if not (leaving and name.startswith(leaving)) and name in known and known[name].shape == buffer.shape:
            path, _, leaf = name.rpartition(".")
            new.get_submodule(path)._buffers[leaf] = buffer


def _set(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    there = owner._parameters[leaf]
    assert there is not None
    assert there.shape == parameter.shape, f"{name} does not fit"
    owner._parameters[leaf] = parameter
