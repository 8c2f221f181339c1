"""What one variant looks like on a chart of quality: its trace, its place when it collapsed, what a pointer reads."""

import math
from collections.abc import Hashable, Iterator

import pandas as pd
import plotly.graph_objects as go

from app.palette import GREY, UNPRUNED, method_colour, method_dash, method_rank, method_title, quantization_marker
from app.wording import figures, percent, plain_html, shortened, size
from pruning.quantize import SCHEMES

MEGABYTE = 1e6


def groups(drawn: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Compressed rows that belong to one line, with its name: same method, quantization and calibration."""
    made = drawn[(drawn["method"] != UNPRUNED) | (drawn["quantize"] != "none")]
    # The text is named only where it tells lines apart.
    several = made.loc[made["calibration"] != "", "calibration"].nunique() > 1
    keyed = made.assign(text=made["calibration"] if several else "")
    found = keyed[["method", "quantize", "text"]].drop_duplicates().itertuples(index=False, name=None)
    lines: list[tuple[str, str, str]] = [(str(method), str(scheme), str(text)) for method, scheme, text in found]
    for method, quantize, text in sorted(lines, key=lambda line: (method_rank(line[0]), line[1] != "none", *line)):
        steps = [] if method == UNPRUNED else [method_title(method)]
        name = " + ".join([*steps, *([SCHEMES[quantize].title] if quantize in SCHEMES else [])])
        belongs = (keyed["method"] == method) & (keyed["quantize"] == quantize) & (keyed["text"] == text)
        yield plain_html(f"{name} ({shortened(text)})" if text else name), keyed[belongs]


def dense_of(drawn: pd.DataFrame) -> pd.DataFrame:
    """The newest unpruned, unquantized row, as a frame of one row or none."""
    dense = drawn[(drawn["method"] == UNPRUNED) & (drawn["quantize"] == "none")]
    return dense.sort_values("finished_at").tail(1)


def draw_variants(figure: go.Figure, rows: pd.DataFrame, name: str, edge: float, *, say_share: bool = False) -> None:
    """Draw one group: a line through its unstructured variants, N:M ones off the line, collapsed ones at ``edge``.

    N:M is a stronger demand at the same sparsity, so a line through it would show a dent that is not there.
    """
    alive = rows[~rows["collapsed"]].sort_values("x")
    unstructured = alive["pattern"] == ""
    _draw(figure, alive[unstructured], name, line=True, say_share=say_share)
    _draw(figure, alive[~unstructured], name, line=False, listed=not unstructured.any())
    collapsed = rows[rows["collapsed"]]
    if collapsed.empty:
        return
    figure.add_trace(
        go.Scatter(
            x=collapsed["x"],
            y=[edge] * len(collapsed),
            name=f"{name}: collapsed",
            legendgroup=name,
            showlegend=alive.empty,
            mode="markers+text",
            text=["collapsed"] * len(collapsed),
            textposition="bottom center",
            marker={"color": method_colour(collapsed["method"].iloc[0]), "size": 11, "symbol": "x"},
            customdata=_details(collapsed),
            hovertemplate="%{customdata}<extra></extra>",
            cliponaxis=False,
        )
    )


def draw_dense(figure: go.Figure, dense: pd.DataFrame) -> None:
    """Draw the unpruned model as a grey mark; nothing when it was not measured."""
    _draw(figure, dense[dense["perplexity"].notna()], method_title(UNPRUNED), line=False)


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
    figure: go.Figure, rows: pd.DataFrame, name: str, *, line: bool, say_share: bool = False, listed: bool = True
) -> None:
    if rows.empty:
        return
    method, value = rows["method"].iloc[0], rows["perplexity"]
    colour = method_colour(method)
    labels = [_mark(row, say_share=say_share) for row in rows.to_dict("records")]
    figure.add_trace(
        go.Scatter(
            x=rows["x"],
            y=value,
            name=name,
            legendgroup=name,
            showlegend=listed,
            mode="+".join(["markers", *(["lines"] if line else []), *(["text"] if any(labels) else [])]),
            text=labels,
            textposition="middle right",
            line={"color": colour, "dash": method_dash(method), "width": 2},
            marker={
                "color": colour,
                "size": 10,
                "symbol": [
                    quantization_marker(scheme, dtype)
                    for scheme, dtype in zip(rows["quantize"], rows["dtype"], strict=True)
                ],
                "line": {"width": 2, "color": colour},
            },
            error_y={
                "type": "data",
                "array": (rows["perplexity_high"] - value).fillna(0.0),
                "arrayminus": (value - rows["perplexity_low"]).fillna(0.0),
                "color": colour,
                "thickness": 1,
                "width": 4,
            },
            customdata=_details(rows),
            hovertemplate="%{customdata}<extra></extra>",
        )
    )


def _mark(row: dict[Hashable, object], *, say_share: bool) -> str:
    if row["pattern"]:
        return f" {plain_html(str(row['pattern']))}"
    share = _number(row["sparsity_asked"])
    return f" {percent(share)}" if say_share and share else ""


def _details(rows: pd.DataFrame) -> list[str]:
    """What a pointer over each point reads."""
    return ["<br>".join(_lines(row)) for row in rows.to_dict("records")]


def _lines(row: dict[Hashable, object]) -> Iterator[str]:
    yield f"<b>{plain_html(str(row['label']))}</b>"
    if row["collapsed"]:
        yield "collapsed: it no longer predicts text"
    value, low, high = (_number(row.get(f"perplexity{suffix}")) for suffix in ("", "_low", "_high"))
    if value is not None:
        interval = f" (95%: {figures(low)} to {figures(high)})" if low is not None and high is not None else ""
        yield f"perplexity {figures(value)}{interval}"
    stored, dense16 = _number(row.get("size_on_disk")), _number(row.get("dense16_bytes"))
    if stored is not None and dense16:
        yield f"{size(stored)} on disk, {figures(stored / dense16)}× dense in 16 bits"
    if row["calibration"]:
        yield f"calibrated on {plain_html(shortened(str(row['calibration']), 60))}"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
