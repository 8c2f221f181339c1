"""How long-running work tells how far it is, and how it is asked to stop."""

from typing import Protocol


class Progress(Protocol):
    """Called at every step of a phase; may raise :class:`pruning.errors.CancelledError` to stop the work there."""

    def __call__(self, phase: str, done: int, total: int, unit: str) -> None:
        """``done`` of ``total`` steps counted in ``unit`` ("blocks", "tokens", "bytes") of ``phase`` are finished."""


def silent(phase: str, done: int, total: int, unit: str) -> None:
    """The callback of a caller that does not watch."""
