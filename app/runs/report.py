"""Records as lines of text for a terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.wording import figures as significant
from app.wording import once_for_all, percent, size


def summary(record: Mapping[str, Any]) -> str:
    """What came of a run, a figure a line."""
    provenance, figures = record["provenance"], record["figures"]
    compression = provenance.get("compression") or {}
    lines = [
        f"{record['recipe']}  {provenance['model']['name']}  run {record['run']}",
        f"{provenance['dtype']} on {provenance['device_name']} ({provenance['runtime']})",
    ]
    if record["collapsed"]:
        lines.append("collapsed: it no longer predicts text")
    width = max(map(len, figures), default=0) + 2
    for name, figure in figures.items():
        spread = ""
        if figure.get("low") is not None and figure.get("high") is not None:
            spread = f"  ({written(figure['low'], figure['unit'])} to {written(figure['high'], figure['unit'])})"
        elif figure.get("p95") is not None:
            spread = f"  (p95 {written(figure['p95'], figure['unit'])})"
        elif name == "compression_time":
            common = once_for_all(compression.get("common_seconds"), compression.get("together"))
            spread = f"  ({common})" if common else ""
        lines.append(f"  {name.replace('_', ' ').ljust(width)}{written(figure['value'], figure['unit'])}{spread}")
    return "\n".join(lines)


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """A line for each run, the columns aligned."""
    shown = ("perplexity", "size_on_disk", "time_per_output_token")
    rows = [("run", "state", "recipe", "model", "perplexity", "on disk", "a token")]
    for record in records:
        figures = record["figures"]
        values = [written(figures[name]["value"], figures[name]["unit"]) if name in figures else "" for name in shown]
        model = Path(record["spec"]["model"]).name
        rows.append((record["run"], record["status"], record["recipe"], model, *values))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def written(value: float | None, unit: str) -> str:
    """A number with its unit, three significant figures."""
    if value is None:
        return "none"
    if unit == "bytes":
        return size(value)
    if unit == "fraction":
        return percent(value)
    if unit == "s" and 0 < value < 1:
        return f"{significant(value * 1000)} ms"
    return f"{significant(value)} {unit}" if unit != "perplexity" else significant(value)
