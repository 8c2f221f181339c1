"""The kernels as functions of tensors, every one of which is checked before C is entered."""

import ctypes
import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from pruning.kernels.build import NoKernelsError, built
from pruning.quantize import probe

PATHS = ("portable", "avx2", "avx512")
"""Instruction sets, as numbered in C; those before the best one of a CPU work on it as well."""

FORMATS: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The dtypes that are multiplied by codes, as numbered in C."""

INT4_STEP = 2
"""The group of int4 codes must be a multiple: a byte may not lie in two groups."""

_log = logging.getLogger(__name__)


class Product:
    """Multiplies by codes and scales that were checked once and stay in memory, unchanged, as long as this does."""

    def __init__(
        self, multiply: Callable[..., int], path: int, codes: Tensor, scale: Tensor, columns: int, group: int
    ) -> None:
        self.name = f"poda int{4 if group else 8} ({PATHS[path]})"
        self.dtype = scale.dtype
        self.columns = columns
        self._kept = codes, scale
        self._multiply = multiply
        self._weights = codes.data_ptr(), scale.data_ptr()
        self._rows = codes.shape[0]
        self._layout = self._rows, columns, group, FORMATS[scale.dtype]
        self._path = path

    def __call__(self, inputs: Tensor) -> Tensor:
        """``inputs`` (..., in), contiguous, on the CPU and of the dtype of the scales, to (..., out) in that dtype.

        Sums are made in float32. Raises ValueError where the inputs are others, MemoryError where they do not fit.
        """
        shape = inputs.shape
        if inputs.dtype is not self.dtype or not shape or shape[-1] != self.columns:
            raise ValueError(_refusal(f"inputs (..., {self.columns}) in {_name(self.dtype)}", inputs))
        if not (inputs.is_cpu and inputs.is_contiguous()):
            raise ValueError(_refusal("contiguous inputs on the CPU", inputs))
        output = torch.empty((*shape[:-1], self._rows), dtype=self.dtype)
        tokens = inputs.numel() // self.columns
        if not (tokens and self._rows):
            return output
        # Addresses of inputs and outputs, which live until the call returns.
        memory = inputs.data_ptr(), *self._weights, output.data_ptr()
        if self._multiply(*memory, tokens, *self._layout, torch.get_num_threads(), self._path):
            raise MemoryError(f"no memory for {tokens} tokens of {self.columns} inputs")
        return output


class Kernels:
    """The library in memory, computing with the instructions ``path``; products may be used by several threads."""

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        multiply = library.poda_multiply
        multiply.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 4 + [ctypes.c_int] * 3
        multiply.restype = ctypes.c_int
        self._multiply: Callable[..., int] = multiply
        self._number = PATHS.index(path)
        self.path = path
        self.threaded = bool(library.poda_has_threads())

    def int8(self, codes: Tensor, scale: Tensor) -> Product:
        """The product with int8 ``codes`` (out, in) that have one ``scale`` (out,) a row, in a dtype of FORMATS.

        Both are contiguous and on the CPU. Raises ValueError where anything differs.
        """
        if codes.dtype != torch.int8 or codes.ndim != 2 or not codes.shape[1] or scale.shape != codes.shape[:1]:
            raise ValueError(_refusal("int8 codes (out, in) and scales (out,)", codes, scale))
        return self._product(codes, scale, codes.shape[1], 0)

    def int4(self, codes: Tensor, scale: Tensor) -> Product:
        """The product with packed int4 ``codes`` (out, in / 2) that have a ``scale`` (out, in / group) for each group.

        The group is even; all else is as in :meth:`int8`. The even inputs' codes are in the low halves of the bytes.
        """
        wanted = "uint8 codes (out, in / 2) and scales (out, in / group), group even"
        if codes.dtype != torch.uint8 or codes.ndim != 2 or scale.ndim != 2 or len(scale) != len(codes):
            raise ValueError(_refusal(wanted, codes, scale))
        columns, groups = 2 * codes.shape[1], scale.shape[1]
        if not groups or not columns or columns % (INT4_STEP * groups):
            raise ValueError(_refusal(wanted, codes, scale))
        return self._product(codes, scale, columns, columns // groups)

    def _product(self, codes: Tensor, scale: Tensor, columns: int, group: int) -> Product:
        if scale.dtype not in FORMATS:
            raise ValueError(_refusal(f"scales in {', '.join(map(_name, FORMATS))}", codes, scale))
        if not (codes.is_contiguous() and scale.is_contiguous() and codes.is_cpu and scale.is_cpu):
            raise ValueError(_refusal("contiguous tensors on the CPU", codes, scale))
        return Product(self._multiply, self._number, codes, scale, columns, group)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refusal(wanted: str, *given: Tensor) -> str:
    told = (f"{_name(tensor.dtype)} {tuple(tensor.shape)} on {tensor.device}" for tensor in given)
    return f"the kernels take {wanted}: got {', '.join(told)}"


@cache
def _library() -> ctypes.CDLL:
    # torch is imported above: its OpenMP runtime is in memory, and the loader takes that one for ours.
    path = built()
    try:
        library = ctypes.CDLL(str(path))
        library.poda_best_path.restype = library.poda_has_threads.restype = ctypes.c_int
    except (OSError, AttributeError) as error:
        raise NoKernelsError(f"{path} does not load: {error}") from error
    return library


def paths() -> tuple[str, ...]:
    """The instruction sets that work on this CPU, the best one last. Raises NoKernelsError."""
    return PATHS[: _library().poda_best_path() + 1]


@cache
def kernels() -> Kernels | None:
    """The kernels with the best instructions of this CPU that compute rightly; None where there are none."""
    try:
        for path in reversed(paths()):
            found = Kernels(_library(), path)
            if _is_right(found):
                return found
            _log.warning("the kernels for %s compute something else than they should: not used", path)
    except NoKernelsError as error:
        _log.info("no kernels of Poda's own: %s", error)
    return None


def _is_right(found: Kernels) -> bool:
    """Whether products of whole numbers, exact in float32, come out so: a CPU is not taken at its word."""
    rows, columns, groups = 9, 170, 5
    codes, inputs = probe.drawn(rows, columns, -8, 7), probe.drawn(7, columns, -2, 2)
    whole = codes.to(torch.int8)
    packed = (whole[:, 0::2] & 15 | whole[:, 1::2] << 4).view(torch.uint8)
    one, each = probe.powers(rows, 1), probe.powers(rows, groups)
    weights = codes * each.repeat_interleave(columns // groups, dim=1)
    return torch.equal(found.int8(whole, one.flatten())(inputs), inputs @ (codes * one).t()) and torch.equal(
        found.int4(packed, each)(inputs), inputs @ weights.t()
    )
