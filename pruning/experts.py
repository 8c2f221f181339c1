"""Experts whose weights are kept in one 3-D tensor: finds them, their routers, and what each expert is given."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

EAGER = "eager"
"""What transformers calls the implementation that multiplies the tokens of one expert at a time."""

# Which way each class of experts stores each of its tensors, as it was seen to use them: true for (in, out).
_TRANSPOSED: WeakKeyDictionary[type[nn.Module], dict[str, bool]] = WeakKeyDictionary()

_PRODUCTS = {
    torch.ops.aten.mm: 0,
    torch.ops.aten.bmm: 0,
    torch.ops.aten.addmm: 1,
    torch.ops.aten.baddbmm: 1,
}
"""Matrix products, and which argument is the first of their two factors."""


@dataclass(frozen=True)
class ExpertTensor:
    """A parameter (experts, rows, columns) of ``module``, and its full ``name``; ``width`` is its router's input's."""

    name: str
    module: nn.Module
    parameter: str
    width: int

    @property
    def tensor(self) -> Tensor:
        """The weights of all experts."""
        tensor = getattr(self.module, self.parameter)
        assert isinstance(tensor, Tensor)
        return tensor.detach()

    @property
    def transposed(self) -> bool:
        """Whether each expert is stored as (in, out): as seen in use, else as the shapes make likely."""
        return self._known()[self.parameter] if self.seen else self._looks_transposed()

    @property
    def seen(self) -> bool:
        """Whether a tensor of this class of experts was seen in use."""
        return self.parameter in self._known()

    def learn(self, *, transposed: bool) -> None:
        """Remember which way it was seen to be used."""
        _TRANSPOSED.setdefault(type(self.module), {})[self.parameter] = transposed

    def _known(self) -> dict[str, bool]:
        return _TRANSPOSED.get(type(self.module), {})

    @property
    def bias(self) -> Tensor | None:
        """The biases (experts, out), where there are any."""
        for name, parameter in self.module.named_parameters(recurse=False):
            if parameter.ndim == 2 and name.startswith(self.parameter) and len(parameter) == len(self.tensor):
                return parameter.detach()
        return None

    def _looks_transposed(self) -> bool:
        rows, columns = self.tensor.shape[1:]
        if rows == columns:
            return False
        if self.bias is not None:
            return self.bias.shape[1] == columns
        # The first tensor of a module takes the hidden states, the last one gives them back.
        names = [name for name, parameter in self.module.named_parameters(recurse=False) if parameter.ndim == 3]
        inward = columns if self.parameter != names[-1] or len(names) == 1 else rows
        return inward != self.width and self.width in (rows, columns)


def find_experts(root: nn.Module, prefix: str = "") -> tuple[list[ExpertTensor], set[str]]:
    """The expert tensors in ``root``, and the names of the parameters of all routers in it.

    Experts are a module with 3-D parameters, or a list of modules alike, as many as there are rows in a matrix beside
    it, which is their router. Names start with ``prefix``.
    """
    tensors: dict[str, ExpertTensor] = {}
    routers: set[str] = set()
    matrices = dict(_matrices(root))
    for path, module, count in _candidates(root):
        found = _routers_of(path, count, matrices)
        routers.update(prefix + name for name in found)
        for name, parameter in module.named_parameters(recurse=False):
            if found and parameter.ndim == 3:
                full = f"{prefix}{path}.{name}" if path else prefix + name
                tensors[full] = ExpertTensor(full, module, name, matrices[found[0]][1])
    return list(tensors.values()), routers


def _candidates(root: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Path, module and number of what may be experts."""
    for path, module in root.named_modules():
        if isinstance(module, nn.ModuleList):
            kinds = {(type(entry), tuple(p.shape for p in entry.parameters())) for entry in module}
            if len(module) > 1 and len(kinds) == 1 and any(True for _ in module.parameters()):
                yield path, module, len(module)
        for count in _stacks(module):
            yield path, module, count


def _stacks(module: nn.Module) -> set[int]:
    if isinstance(module, _ConvNd):
        return set()
    shapes = (parameter.shape for parameter in module.parameters(recurse=False) if parameter.ndim == 3)
    return {shape[0] for shape in shapes if min(shape) > 1}


def _matrices(root: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Shapes (out, in) of all that may be the matrix of a router, by name of the parameter."""
    for path, module in root.named_modules():
        if _stacks(module):
            continue  # its 2-D parameters are biases
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 2:
                out, width = reversed(parameter.shape) if isinstance(module, Conv1D) else parameter.shape
                yield f"{path}.{name}" if path else name, (out, width)


def _routers_of(path: str, count: int, matrices: dict[str, tuple[int, int]]) -> list[str]:
    """The matrices of ``count`` rows outside of ``path``, in the closest module around it that has one."""
    around = path
    while around:
        around = around.rpartition(".")[0]
        near = f"{around}." if around else ""
        found = [
            name
            for name, (out, _) in matrices.items()
            if out == count and name.startswith(near) and not name.startswith(f"{path}.")
        ]
        if found:
            return found
    return []


@contextmanager
def one_expert_at_a_time(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Meanwhile the experts ``modules`` run the implementation in which each multiplies its own tokens."""
    configs: dict[int, Any] = {}
    for module in modules:
        config = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            configs[id(config)] = config
    before = {key: config._experts_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._experts_implementation = EAGER
        yield
    finally:
        for key, config in configs.items():
            config._experts_implementation = before[key]


class ExpertWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """While it is active, ``listen`` is told of every product with an expert's matrix.

    It is given the tensor, the number of the expert, whether the matrix is stored as (in, out), and the expert's
    inputs (tokens, in). Of inputs that are padded so that all experts go in one product, rows of zeros are left out.
    """

    def __init__(
        self, tensors: Sequence[ExpertTensor], listen: Callable[[ExpertTensor, int, bool, Tensor], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listen = listen
        self._tensors = [(tensor, tensor.tensor) for tensor in tensors]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = _PRODUCTS.get(func.overloadpacket)
        if first is not None:
            left, right = args[first], args[first + 1]
            self._look(right, left)
            self._look(left.mT, right.mT)
        return func(*args, **(kwargs or {}))

    def _look(self, matrix: Tensor, inputs: Tensor) -> None:
        """Tell of ``inputs`` (…, tokens, in) if ``matrix`` (…, in, out) belongs to experts."""
        address = matrix.data_ptr()
        for tensor, whole in self._tensors:
            start = whole.data_ptr()
            if not start <= address < start + whole.nbytes:
                continue
            expert, rest = divmod((address - start) // whole.element_size(), whole.stride(0))
            transposed = _same_place(matrix, whole)
            if rest or not (transposed or _same_place(matrix.mT, whole)):
                return
            if matrix.ndim == 2:
                self._listen(tensor, expert, transposed, inputs)
                return
            for place, rows in enumerate(inputs):
                self._listen(tensor, expert + place, transposed, rows[(rows != 0).any(dim=-1)])


def _same_place(matrix: Tensor, whole: Tensor) -> bool:
    return matrix.shape[-2:] == whole.shape[1:] and matrix.stride()[-2:] == whole.stride()[1:]


def see_in_use(tensors: Sequence[ExpertTensor], forward: Callable[[], object]) -> None:
    """Learn from a pass of ``forward`` which way each class of experts stores its tensors."""

    def learn(tensor: ExpertTensor, expert: int, transposed: bool, inputs: Tensor) -> None:
        tensor.learn(transposed=transposed)

    with one_expert_at_a_time([tensor.module for tensor in tensors]), ExpertWatch(tensors, learn):
        forward()
