"""What every export takes from the variant's folder as it is."""

import shutil
from pathlib import Path

from pruning.sources import VARIANT


def copy_companions(variant: Path, target: Path) -> None:
    """Copy the files of ``variant`` beside its weights: configuration and tokenizer."""
    for file in variant.iterdir():
        if file.is_file() and file.name != VARIANT:
            shutil.copy2(file, target / file.name)
