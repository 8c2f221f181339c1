"""Writes a variant as a plain transformers folder: zeros stored as any weight, codes dequantized."""

from pathlib import Path
from typing import Any

from pruning.artifact import dequantized_model
from pruning.disk import new_folder
from pruning.export.files import copy_companions


def write(variant: Path, target: Path) -> None:
    """Write ``variant`` to ``target``, which AutoModelForCausalLM.from_pretrained takes with nothing else installed."""
    model, _ = dequantized_model(variant)
    needed = sum(parameter.nbytes for parameter in model.parameters())
    with new_folder(target, needed, f"the exported model {target.name}") as temporary:
        copy_companions(variant, temporary)
        plain: Any = model
        plain.save_pretrained(temporary)
