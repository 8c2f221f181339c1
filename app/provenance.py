"""How one run was measured, as lines to read."""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd


def provenance_table(record: Mapping[str, Any]) -> pd.DataFrame:
    """One line for each thing that decides the figures of ``record``: what was asked, then what was found."""
    spec = {name: value for name, value in record["spec"].items() if name != "recipe"}
    lines = [
        ("run", f"{record['run']}, attempt {record['attempt']}"),
        ("recipe", record["recipe"]),
        ("started", record["started_at"]),
        ("finished", record["finished_at"]),
        *_flat("asked", spec),
        *_flat("", record["provenance"]),
    ]
    return pd.DataFrame([(name, str(value)) for name, value in lines if value is not None], columns=["What", "Value"])


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}, {key}" if name else str(key).replace("_", " "), inner)
    elif isinstance(value, list):
        yield name, ", ".join(map(_in_one_line, value)) or None
    else:
        yield name.replace("_", " "), value


def _in_one_line(value: Any) -> str:
    """Of several facts the first names what the others are about."""
    if not isinstance(value, Mapping):
        return str(value)
    first, *rest = (str(one) for one in value.values())
    return f"{first} ({', '.join(rest)})" if rest else first
