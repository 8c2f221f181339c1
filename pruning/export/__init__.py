"""The formats a variant can be exported to, as data that imports without torch, and the way to one of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from pruning.disk import new_folder
from pruning.errors import InputError
from pruning.export.card import write_card
from pruning.export.files import Export

DEFAULT = "transformers"


@dataclass(frozen=True)
class ExportFormat:
    """One way to write a variant for other programs.

    ``module`` needs torch; its ``function`` takes the folder of a variant and gives an ``Export``. ``library`` is what
    loads the export, by the hub's name, where it has one.
    """

    name: str
    summary: str
    module: str
    function: str = "prepare"
    library: str | None = None


FORMATS: dict[str, ExportFormat] = {
    known.name: known
    for known in (
        ExportFormat(
            name="transformers",
            summary="a plain transformers folder, codes dequantized to 16 or 32 bits",
            module="pruning.export.plain",
            library="transformers",
        ),
        ExportFormat(
            name="compressed-tensors",
            summary="int8 and int4 codes as they are, for vLLM and transformers",
            module="pruning.export.compressed",
            library="transformers",
        ),
        ExportFormat(
            name="gguf",
            summary="one GGUF file in 16 bits (F16), for llama.cpp",
            module="pruning.export.gguf_file",
            function="f16",
        ),
        ExportFormat(
            name="gguf-q8_0",
            summary="one GGUF file rounded to 8 bits (Q8_0), for llama.cpp",
            module="pruning.export.gguf_file",
            function="q8_0",
        ),
    )
}


def export_variant(variant: Path, target: Path, name: str = DEFAULT, record: Mapping[str, Any] | None = None) -> None:
    """Write the variant in the folder ``variant`` to ``target``, in the format ``name``, whole or not at all.

    A model card goes with it. What was measured it takes from ``record``, that of the run which made the variant.
    Raises InputError when ``target`` holds something already, ``variant`` is no variant, or the format cannot hold it,
    and RunError for a full disk.
    """
    chosen = FORMATS.get(name)
    if chosen is None:
        raise InputError(f"there is no format {name!r} to export to: choose {' or '.join(FORMATS)}")
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise InputError(f"{target} is not empty: choose a folder that does not exist yet")
    export: Export = getattr(import_module(chosen.module), chosen.function)(variant)
    with new_folder(target.absolute(), export.needed, f"the exported model {target.name}") as temporary:
        export.put(temporary)
        write_card(temporary, variant, chosen.summary, chosen.library, export.notes, record)
