"""The model card of an export: what it is, what was measured of the variant it was made from, and what was not."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pruning.artifact_format import read_layout, stored_sizes
from pruning.artifact_header import Layout

CARD = "README.md"
NOT_MEASURED = "not measured"
NOT_RECORDED = "not recorded"
LONGEST = 200
"""Characters of a name that are shown."""

_MARKUP = re.compile(r"([\\`*_{}\[\]<>&|~$^!@#=]|(?<=[A-Za-z]):)")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_PATH = re.compile(r"[/\\~.]|[A-Za-z]:[/\\]")

Record = Mapping[str, Any]
Rows = list[tuple[str, str]]


def write_card(
    folder: Path,
    variant: Path,
    form: str,
    library: str | None,
    notes: tuple[str, ...],
    record: Record | None,
) -> None:
    """Write the card of what was exported from ``variant`` into ``folder``, beside the files that are there.

    ``form`` says which format they are in, ``library`` what loads them, by the hub's name, and ``notes`` are sentences
    on what the format does with the variant. ``record`` is that of the run that made and
    measured the variant, as JSON-ready values; of what it does not have, the card says that it was not measured.
    """
    layout, _ = read_layout(variant)
    found = record or {}
    exported = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    sizes: Rows = [
        ("Size on disk, as Poda stores it", _bytes(stored_sizes(variant).total_bytes)),
        ("Size on disk of this export, without this card", _bytes(exported)),
    ]
    lines = [
        *_front(layout, library),
        f"# {plain(title(layout))}",
        "",
        "A language model that was made and measured with Poda.",
        "",
        "## What it is",
        "",
        *_table([*_identity(layout), *_making(layout, found), ("Format", plain(form))]),
        "",
        "## What was measured",
        "",
        "Quality and speed were measured on the variant as Poda stores and runs it, and not on this export.",
        "",
        *_table([*_figures(found), *sizes]),
        *_provenance(found),
        "",
        "## What to know",
        "",
        *(f"- {note}" for note in (*notes, *_warnings(layout, found))),
        "",
    ]
    (folder / CARD).write_text("\n".join(lines), encoding="utf-8")


def title(layout: Layout) -> str:
    """The name of the model that a variant was made from, and the recipe, as far as it says."""
    parts = (_of(layout.about, "identity", "name"), layout.about.get("recipe"))
    return ", ".join(_last(part) for part in parts if isinstance(part, str) and part) or "model"


def plain(text: object) -> str:
    """``text`` in one line that Markdown shows letter by letter: no markup, no links, no end of a table's cell."""
    printable = "".join(letter if letter.isprintable() else " " for letter in str(text))
    line = " ".join(printable.split())
    short = line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
    return re.sub(r"(?i)\b(www)\.", r"\1\\.", _MARKUP.sub(r"\\\1", short))


def _front(layout: Layout, library: str | None) -> list[str]:
    """YAML front matter with what is known for certain, or nothing."""
    name = _of(layout.about, "identity", "name")
    on_hub = _of(layout.about, "identity", "kind") == "hub" and _HUB_ID.fullmatch(str(name))
    known = {"library_name": library, "base_model": name if on_hub else None}
    entries = [f"{key}: {json.dumps(value)}" for key, value in known.items() if value is not None]
    return ["---", *entries, "---", ""] if entries else []


def _identity(layout: Layout) -> Rows:
    """What the variant was made from."""
    identity = layout.about.get("identity")
    known: Mapping[str, Any] = identity if isinstance(identity, Mapping) else {}
    rows: Rows = [
        ("Made from", _named(known.get("name"))),
        *([("Revision on the hub", _named(known.get("revision")))] if known.get("kind") in ("hub", None) else []),
        ("SHA-256 of its files", _named(known.get("file_hash"))),
        ("Files", _named(known.get("source_file"))),
        ("Architecture", _named(known.get("architecture"))),
        ("Parameters", f"{layout.parameters:,}"),
    ]
    if layout.dense is not None:
        rows.append(("Parameters before", f"{layout.dense.parameters:,}"))
    return rows


def _making(layout: Layout, record: Record) -> Rows:
    """What was done."""
    weights = sum(entry.weights for entry in layout.layers.values())
    zeros = sum(entry.zeros for entry in layout.layers.values())
    codes = sorted({str(entry.codes) for entry in layout.layers.values() if entry.codes is not None})
    calibration = _of(record, "provenance", "calibration")
    rows: Rows = [
        ("Recipe", _named(layout.about.get("recipe"))),
        ("Zeros", f"{100 * zeros / weights:.3g}% of the weights in the layers that can be pruned"),
        ("Codes", ", ".join(codes) or "none: weights are numbers"),
        ("Computed in", layout.dtype),
    ]
    if isinstance(calibration, Mapping):
        rows.append(("Calibrated on", _text(calibration)))
    return rows


def _figures(record: Record) -> Rows:
    """Quality and speed, each with its spread where it has one."""
    windows = _of(record, "provenance", "evaluation", "windows")
    rows: Rows = []
    for name, label in (("perplexity", "Perplexity"), ("bits_per_byte", "Bits per byte")):
        figure = _of(record, "figures", name)
        value, low, high = (_of(figure, key) for key in ("value", "low", "high"))
        told = _number(value) if _is_number(value) else NOT_MEASURED
        if _is_number(value) and _is_number(low) and _is_number(high):
            over = f" over {windows:,} windows" if isinstance(windows, int) else ""
            told += f" (95% interval {_number(low)} to {_number(high)}{over})"
        if name == "perplexity" and record.get("collapsed") is True:
            told = "none: the model no longer predicts text"
        rows.append((label, told))
    for name, label in (
        ("time_to_first_token", "Time to first token"),
        ("time_per_output_token", "Time per output token"),
    ):
        value, tail = (_of(record, "figures", name, key) for key in ("value", "p95"))
        told = f"{_number(1000 * value)} ms" if _is_number(value) else NOT_MEASURED
        if _is_number(value) and _is_number(tail):
            told += f" (median; 95th percentile {_number(1000 * tail)} ms)"
        rows.append((label, told))
    return rows


def _provenance(record: Record) -> list[str]:
    """What the figures were measured with; nothing where there are none."""
    if not any(_is_number(_of(figure, "value")) for figure in (record.get("figures") or {}).values()):
        return []
    known = record.get("provenance") or {}
    versions = known.get("versions")
    rows: Rows = [
        ("Device", _named(known.get("device_name"))),
        ("Threads", _named(known.get("threads"))),
        ("Dtype", _named(known.get("dtype"))),
        ("Runtime", _named(known.get("runtime"))),
        ("Text", _text(known.get("evaluation"))),
        ("Timed", _timing(known.get("timing"))),
        ("Date", _named(known.get("date"))),
        (
            "Versions",
            ", ".join(f"{plain(name)} {plain(number)}" for name, number in versions.items())
            if isinstance(versions, Mapping)
            else NOT_RECORDED,
        ),
        ("Run", _named(record.get("run"))),
    ]
    return ["", "They were measured with", "", *_table(rows)]


def _text(text: Any) -> str:
    """The text of calibration or evaluation, which part of it, and its hash."""
    if not isinstance(text, Mapping):
        return NOT_RECORDED
    told = _named(text.get("source"))
    windows, length = text.get("windows"), text.get("length")
    if isinstance(windows, int) and isinstance(length, int):
        told += f", {windows:,} windows of {length:,} tokens"
    return told + (f", SHA-256 {plain(text['text_sha256'])}" if text.get("text_sha256") else "")


def _timing(timing: Any) -> str:
    if not isinstance(timing, Mapping):
        return NOT_RECORDED
    return (
        f"batch of {_named(timing.get('batch'))}, {_named(timing.get('prompt_tokens'))} tokens of prompt, "
        f"{_named(timing.get('output_tokens'))} of output, {_named(timing.get('iterations'))} iterations, "
        f"{_named(timing.get('timed'))}"
    )


def _warnings(layout: Layout, record: Record) -> list[str]:
    """What holds of any export of the variant."""
    found = []
    note = _of(layout.about, "identity", "note")
    if note:
        found.append(f"Of the model it was made from: {plain(note)}.")
    if record.get("collapsed") is True:
        found.append("The model has collapsed: it no longer predicts text.")
    if not (record.get("figures") or {}):
        found.append("There was no record of measurements when this was exported.")
    found.append("The licence of the model it was made from holds for it. Poda does not know which that is.")
    return found


def _table(rows: Rows) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {label} | {value} |" for label, value in rows)]


def _named(value: Any) -> str:
    """A name or a number as it was recorded; of a path the last part alone, as the rest tells of the machine."""
    if value is None or value == "" or isinstance(value, Mapping | list | tuple):
        return NOT_RECORDED
    return plain(_last(str(value)))


def _last(text: str) -> str:
    """The last part of what looks like a path, else ``text``."""
    return re.split(r"[/\\]", text.rstrip("/\\"))[-1] if _PATH.match(text) else text


def _of(values: Any, *path: str) -> Any:
    """The value at ``path`` in nested mappings, or None."""
    for name in path:
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(value: float) -> str:
    """Three significant figures, thousands separated."""
    rounded = float(f"{value:.3g}")
    places = 2 - math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{rounded:,.{max(0, places)}f}"


def _bytes(size: int) -> str:
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= factor:
            return f"{_number(size / factor)} {unit} ({size:,} bytes)"
    return f"{size:,} bytes"
