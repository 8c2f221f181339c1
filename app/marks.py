"""What one variant looks like on a chart of quality: its trace, its place when it collapsed, what a pointer reads."""

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import pandas as pd
import plotly.graph_objects as go

from app.palette import (
    GREY,
    UNPRUNED,
    marker,
    method_colour,
    method_dash,
    method_mark,
    method_rank,
    method_title,
    scheme_title,
)
from app.wording import figures, percent, plain_html, shortened, size
from pruning.allocation import ALLOCATIONS, UNIFORM
from pruning.quantize import SCHEMES

MEGABYTE = 1e6
INSIDE = "#FFFFFF"

# Where lines of one method end near each other, their names shall not lie on each other.
_PLACES = {"owl": "bottom left"}

SPREAD = set(ALLOCATIONS) - {UNIFORM}
"""Allocations under which layers lose different shares."""

# Plain rows, not frames: selecting from many small frames takes longer than drawing them.
Row = dict[Hashable, Any]


def groups(drawn: pd.DataFrame) -> Iterator[tuple[str, list[Row]]]:
    """Compressed rows that belong to one line, with its name: same method, quantization, allocation and calibration.

    Statistics make lines of their own only where the same sparsity was made from both kinds: elsewhere those of the
    dense model were chosen because they cost nothing.
    """
    made = [row for row in drawn.to_dict("records") if row["method"] != UNPRUNED or row["quantize"] != "none"]
    # The text is named only where it tells lines apart.
    several = len({row["calibration"] for row in made if row["calibration"]}) > 1
    lines: dict[Line, list[Row]] = {}
    for row in made:
        stored = scheme_title(row["quantize"], row["quantize_group"])
        line = Line(row["method"], row["quantize"], stored, row["allocation"], row["calibration"] if several else "")
        lines.setdefault(line, []).append(row)
    for line in sorted(lines, key=_rank):
        apart = _by_statistics(lines[line])
        for statistics, rows in apart.items():
            told = [ALLOCATIONS[line.allocation].title] if line.allocation in SPREAD else []
            told += [statistics] if len(apart) > 1 else []
            yield plain_html(_line_name(line, told)), rows


class Line(NamedTuple):
    """What variants on one line have in common."""

    method: str
    quantize: str
    stored: str
    allocation: str
    calibration: str


def _rank(line: Line) -> tuple[object, ...]:
    scheme = list(SCHEMES).index(line.quantize) if line.quantize in SCHEMES else -1
    return method_rank(line.method), scheme, line.allocation in SPREAD, *line


def _by_statistics(rows: list[Row]) -> dict[str, list[Row]]:
    """All rows together unless the same variant is among them from both kinds of statistics."""
    kinds: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: str(row["statistics"])):
        kinds.setdefault(row["statistics"], []).append(row)
    variants = [{(row["sparsity_asked"], row["pattern"]) for row in kind} for kind in kinds.values()]
    return kinds if len(variants) > 1 and set.intersection(*variants) else {"": rows}


def _line_name(line: Line, told: list[str]) -> str:
    steps = [] if line.method == UNPRUNED else [method_title(line.method)]
    name = " + ".join([*steps, *([line.stored] if line.stored else [])])
    details = [*told, *([shortened(line.calibration)] if line.calibration else [])]
    return f"{name} ({', '.join(details)})" if details else name


def dense_of(drawn: pd.DataFrame) -> pd.DataFrame:
    """The newest unpruned, unquantized row, as a frame of one row or none."""
    dense = drawn[(drawn["method"] == UNPRUNED) & (drawn["quantize"] == "none")]
    return dense.sort_values("finished_at").tail(1)


def draw_variants(figure: go.Figure, rows: Sequence[Row], name: str, edge: float, *, say_share: bool = False) -> None:
    """Draw one group: a line through its unstructured variants, N:M ones off the line, collapsed ones at ``edge``.

    N:M is a stronger demand at the same sparsity, so a line through it would show a dent that is not there.
    """
    alive = sorted((row for row in rows if not row["collapsed"]), key=lambda row: float(row["x"]))
    unstructured = [row for row in alive if not row["pattern"]]
    _draw(figure, unstructured, name, line=True, say_share=say_share)
    _draw(figure, [row for row in alive if row["pattern"]], name, line=False, listed=not unstructured)
    collapsed = [row for row in rows if row["collapsed"]]
    if not collapsed:
        return
    figure.add_trace(
        go.Scatter(
            x=[row["x"] for row in collapsed],
            y=[edge] * len(collapsed),
            name=f"{name}: collapsed",
            legendgroup=name,
            showlegend=not alive,
            mode="markers+text",
            text=["collapsed"] * len(collapsed),
            textposition="bottom center",
            marker={"color": method_colour(collapsed[0]["method"]), "size": 11, "symbol": "x"},
            customdata=[_details(row) for row in collapsed],
            hovertemplate="%{customdata}<extra></extra>",
            cliponaxis=False,
        )
    )


def draw_dense(figure: go.Figure, dense: pd.DataFrame) -> None:
    """Draw the unpruned model as a grey mark; nothing when it was not measured."""
    measured = dense[dense["perplexity"].notna()]
    _draw(figure, measured.to_dict("records"), method_title(UNPRUNED), line=False)


def draw_source(figure: go.Figure, dense: pd.DataFrame) -> None:
    """Draw the file the person started from: its own bytes, the perplexity of dense since the weights are the same."""
    known = dense[dense["source_bytes"].notna() & dense["perplexity"].notna()]
    if known.empty:
        return
    row = known.iloc[0]
    figure.add_trace(
        go.Scatter(
            x=[row["source_bytes"] / MEGABYTE],
            y=[row["perplexity"]],
            name="the file you started from",
            mode="markers",
            marker={"color": GREY, "size": 13, "symbol": "star-open", "line": {"width": 2}},
            customdata=[
                f"<b>{plain_html(shortened(str(row['source_name'])))}</b><br>{size(row['source_bytes'])} as it came"
                "<br>perplexity of dense: its weights are the same"
            ],
            hovertemplate="%{customdata}<extra></extra>",
        )
    )


def _draw(
    figure: go.Figure, rows: Sequence[Row], name: str, *, line: bool, say_share: bool = False, listed: bool = True
) -> None:
    if not rows:
        return
    method = rows[0]["method"]
    colour = method_colour(method)
    labels = [_mark(row, say_share=say_share) for row in rows]
    places = ["middle right"] * len(rows)
    if rows[-1]["allocation"] in SPREAD:
        # Lines of one method differ in nothing else that is drawn.
        labels[-1] = f"{ALLOCATIONS[rows[-1]['allocation']].title}{labels[-1]} "
        places[-1] = _PLACES.get(rows[-1]["allocation"], "top left")
    figure.add_trace(
        go.Scatter(
            x=[row["x"] for row in rows],
            y=[row["perplexity"] for row in rows],
            name=name,
            legendgroup=name,
            showlegend=listed,
            mode="+".join(["markers", *(["lines"] if line else []), *(["text"] if any(labels) else [])]),
            text=labels,
            textposition=places,
            line={"color": colour, "dash": method_dash(method), "width": 2},
            marker={
                "color": colour,
                "size": 10,
                "symbol": [marker(row["quantize"], row["dtype"], method) for row in rows],
                # What is inside of a mark is drawn in the colour of its line.
                "line": {"width": 2, "color": INSIDE if method_mark(method) else colour},
            },
            error_y={
                "type": "data",
                "array": [_distance(row["perplexity"], row["perplexity_high"]) for row in rows],
                "arrayminus": [_distance(row["perplexity_low"], row["perplexity"]) for row in rows],
                "color": colour,
                "thickness": 1,
                "width": 4,
            },
            customdata=[_details(row) for row in rows],
            hovertemplate="%{customdata}<extra></extra>",
        )
    )


def _distance(low: float, high: float) -> float:
    return 0.0 if math.isnan(low) or math.isnan(high) else high - low


def _mark(row: Row, *, say_share: bool) -> str:
    if row["pattern"]:
        return f" {plain_html(row['pattern'])}"
    return f" {percent(row['sparsity_asked'])}" if say_share and row["sparsity_asked"] else ""


def _details(row: Row) -> str:
    """What a pointer over the point reads."""
    return "<br>".join(_lines(row))


def _lines(row: Row) -> Iterator[str]:
    yield f"<b>{plain_html(row['label'])}</b>"
    if row["collapsed"]:
        yield "collapsed: it no longer predicts text"
    value, low, high = (_number(row.get(f"perplexity{suffix}")) for suffix in ("", "_low", "_high"))
    if value is not None:
        interval = f" (95%: {figures(low)} to {figures(high)})" if low is not None and high is not None else ""
        yield f"perplexity {figures(value)}{interval}"
    stored, dense16 = _number(row.get("size_on_disk")), _number(row.get("dense16_bytes"))
    if stored is not None and dense16:
        yield f"{size(stored)} on disk, {figures(stored / dense16)}× dense in 16 bits"
    if row["allocation"] in SPREAD:
        yield f"spread over the layers by {ALLOCATIONS[row['allocation']].title}"
    if row["statistics"] == "shared":
        yield "statistics of the dense model, shared with other variants"
    if row["calibration"]:
        yield f"calibrated on {plain_html(shortened(row['calibration'], 60))}"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
