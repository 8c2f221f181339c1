"""What a compression did to each layer, as a table: from the record of one run."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from app.wording import counted, figures, significant

_NAMED = 3
_PERCENT = 100


def layers_frame(record: Mapping[str, Any]) -> pd.DataFrame:
    """One row a layer in the order of the model; empty for a run that changed none.

    ``block`` is the number of its block and ``part`` what it is called in there, without the number of an expert;
    shares and errors are fractions, and NaN where they were not measured.
    """
    rows = []
    for layer in record.get("layers", ()):
        block, part = _place(layer["name"])
        rows.append(
            {
                "name": layer["name"],
                "block": block,
                "part": part,
                "asked": layer.get("requested_sparsity"),
                "removed": layer.get("sparsity"),
                "error": layer.get("output_error"),
                "outliers": layer.get("outlier_ratio"),
                "tokens": layer.get("tokens"),
                "seconds": layer.get("seconds"),
                "note": layer.get("note") or "",
            }
        )
    columns = ["name", "block", "part", "asked", "removed", "error", "outliers", "tokens", "seconds", "note"]
    frame = pd.DataFrame(rows, columns=columns)
    numbers = ["asked", "removed", "error", "outliers", "tokens", "seconds"]
    frame[numbers] = frame[numbers].astype(float)
    return frame


def layers_table(layers: pd.DataFrame) -> pd.DataFrame:
    """The same for people to read: percent, three significant figures, columns without any value left out."""
    percents = {
        "asked": "Asked to remove (%)",
        "removed": "Removed (%)",
        "error": "Change of its output (%)",
        "outliers": "Outliers (%)",
    }
    table = {"Layer": layers["name"].to_list()}
    table |= {
        header: [significant(_PERCENT * value) for value in layers[source]] for source, header in percents.items()
    }
    table |= {
        # Of a method that looks at no text there is nothing to say.
        "Tokens seen": [int(value) if value > 0 else None for value in layers["tokens"]],
        "Time (s)": [significant(value) for value in layers["seconds"]],
        "Note": layers["note"].to_list(),
    }
    shown = pd.DataFrame(table)
    return shown.drop(columns=[name for name in shown if shown[name].replace("", None).isna().all()])


def fallbacks(layers: pd.DataFrame) -> list[str]:
    """Where layers were not treated as asked, and why: a sentence for each reason."""
    return list(_fallbacks(layers))


def removed_words(record: Mapping[str, Any]) -> str | None:
    """What was taken out of the model as a whole, and where that is not what was asked for; None for nothing."""
    compression = record["provenance"].get("compression") or {}
    parts = [str(compression["note"])] if compression.get("note") else []
    parts += [", ".join(map(str, compression["removed"]))] if compression.get("removed") else []
    return "\n".join(parts) or None


def unpruned_words(record: Mapping[str, Any]) -> str | None:
    """What of the model was left as it is, by reason; None where the record does not say."""
    compression = record["provenance"].get("compression") or {}
    weights: dict[str, list[int]] = {}
    for entry in compression.get("unpruned") or ():
        weights.setdefault(str(entry["reason"]), []).append(int(entry["weights"]))
    if not weights:
        return None
    reasons = []
    for reason, counts in weights.items():
        said = f"{figures(sum(counts) / 1e6)} million weights" if sum(counts) else "no weights of its own"
        reasons.append(f"{reason} ({f'{len(counts):,} tensors, ' if len(counts) > 1 else ''}{said})")
    return f"Left as it is: {'; '.join(reasons)}."


def same_share(layers: pd.DataFrame) -> float | None:
    """The share that every layer lost, within a tenth of a percent; None where they differ."""
    removed = layers["removed"].dropna()
    if removed.empty or removed.max() - removed.min() > 1e-3:
        return None
    return float(removed.mean())


def _fallbacks(layers: pd.DataFrame) -> Iterator[str]:
    noted = layers[layers["note"] != ""]
    for note, found in noted.groupby("note", sort=False):
        names = found["name"].to_list()
        more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
        yield f"{counted(len(names), 'layer')} {note} ({', '.join(names[:_NAMED])}{more})."


def _place(name: str) -> tuple[int | None, str]:
    """``"model.layers.3.mlp.experts.up_proj[7]"`` is block 3, "mlp.experts.up_proj"."""
    found = re.search(r"(?:^|\.)(\d+)\.(.+)$", name)
    if found is None:
        return None, name
    return int(found[1]), re.sub(r"\[\d+\]$", "", re.sub(r"\.\d+(?=\.)", "", found[2]))
