"""What all exports have in common."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pruning.sources import VARIANT


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
