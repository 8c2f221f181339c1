"""Turns whatever a library raises over someone's files into a cause and a next step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pruning.errors import CancelledError, InputError, RunError

_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


@contextmanager
def reading(name: str, next_step: str) -> Iterator[None]:
    """Raise InputError "``name`` cannot be read (why): ``next_step``" for what goes wrong inside.

    Errors of Poda's own pass through; too little memory is a RunError.
    """
    try:
        yield
    except (InputError, RunError, CancelledError):
        raise
    # Damaged files make the libraries raise anything, down to a bare Exception from compiled code.
    except Exception as error:
        text = str(error)
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in text.lower() for sign in _NO_MEMORY):
            raise RunError(
                f"{name} does not fit in memory: choose a smaller model, --dtype bfloat16, or another --device"
            ) from error
        why = (text.strip() or type(error).__name__).splitlines()[0].rstrip(".:")
        raise InputError(f"{name} cannot be read ({why}): {next_step}") from error
