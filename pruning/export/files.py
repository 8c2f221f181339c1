"""What all exports have in common."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pruning.artifact_header import Layout
from pruning.sources import VARIANT

_WORTH_SAYING = 0.01
"""The share of zeros from which they were made, and did not merely come about."""


@dataclass(frozen=True)
class Export:
    """An export that is ready to be written: ``put`` writes ``needed`` bytes of tensors, and more, into a folder.

    ``notes`` are sentences on what of the variant came out otherwise.
    """

    needed: int
    put: Callable[[Path], None]
    notes: tuple[str, ...] = ()


def copy_companions(variant: Path, target: Path) -> None:
    """Copy the files of ``variant`` beside its weights: configuration and tokenizer."""
    for file in variant.iterdir():
        if file.is_file() and file.name != VARIANT:
            shutil.copy2(file, target / file.name)


def zeros_notes(layout: Layout) -> tuple[str, ...]:
    """What becomes of zeros in a format that has no other place for them."""
    zeros = sum(record.zeros for record in layout.layers.values())
    if zeros < _WORTH_SAYING * sum(record.weights for record in layout.layers.values()):
        return ()
    return ("Zeros are stored here as any other weight: they save no bytes, and nothing is faster for them.",)


def weights_notes(layout: Layout) -> tuple[str, ...]:
    """What becomes of zeros and of codes in a format that has weights alone."""
    notes = list(zeros_notes(layout))
    codes = sorted({str(record.codes) for record in layout.layers.values() if record.codes is not None})
    if codes:
        notes.append(f"Codes of {' and '.join(codes)} are turned back into weights here: they save no bytes.")
    if any(record.activations for record in layout.layers.values()):
        notes.append("Poda rounds the inputs of layers when it runs this variant, and what runs this export does not.")
    return tuple(notes)
