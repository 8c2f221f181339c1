"""Writes a variant as a plain transformers folder: zeros stored as any weight, codes dequantized."""

from pathlib import Path
from typing import Any

from pruning.artifact import dequantized_model
from pruning.export.files import Export, copy_companions, weights_notes


def prepare(variant: Path) -> Export:
    """``variant`` as AutoModelForCausalLM.from_pretrained takes it with nothing else installed."""
    model, layout = dequantized_model(variant)

    def put(folder: Path) -> None:
        copy_companions(variant, folder)
        plain: Any = model
        plain.save_pretrained(folder)

    return Export(sum(parameter.nbytes for parameter in model.parameters()), put, weights_notes(layout))
