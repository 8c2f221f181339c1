"""The formats a variant can be exported to, as data that imports without torch, and the way to one of them."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from pruning.errors import InputError

DEFAULT = "transformers"


@dataclass(frozen=True)
class ExportFormat:
    """One way to write a variant for other programs; ``module`` has ``write(variant, target)``, which needs torch."""

    name: str
    summary: str
    module: str


FORMATS: dict[str, ExportFormat] = {
    known.name: known
    for known in (
        ExportFormat(
            name="transformers",
            summary="a plain transformers folder, codes dequantized to 16 or 32 bits",
            module="pruning.export.plain",
        ),
        ExportFormat(
            name="compressed-tensors",
            summary="int8 and int4 codes as they are, for vLLM and transformers",
            module="pruning.export.compressed",
        ),
    )
}


def export_variant(variant: Path, target: Path, name: str = DEFAULT) -> None:
    """Write the variant in the folder ``variant`` to ``target``, in the format ``name``, whole or not at all.

    Raises InputError when ``target`` holds something already, ``variant`` is no variant, or the format cannot hold it,
    and RunError for a full disk.
    """
    chosen = FORMATS.get(name)
    if chosen is None:
        raise InputError(f"there is no format {name!r} to export to: choose {' or '.join(FORMATS)}")
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise InputError(f"{target} is not empty: choose a folder that does not exist yet")
    import_module(chosen.module).write(variant, target.absolute())
