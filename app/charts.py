"""Results in, Plotly figures out: quality against sparsity, quality against size, and latency. No Streamlit."""

import math
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from app.listings import distinct_labels, in_recipe_order
from app.marks import MEGABYTE, dense_of, draw_dense, draw_source, draw_variants, groups
from app.palette import GREY, UNPRUNED, method_colour, quantization_hatch
from app.wording import figures, plain_html, shortened, size
from pruning.quantize import SCHEMES

MILLISECOND = 1e-3
_SPARSITY_QUESTION = "How much quality does each sparsity cost?"
_SPARSITY_AXIS = "weights removed (sparsity)"
_QUALITY_AXIS = "perplexity, lower is better"
# From this ratio on, the largest perplexity would press all others against the axis.
_WIDE = 4
# Figures whose columns are missing until some run has one.
_NEEDED = ("perplexity", "perplexity_low", "perplexity_high", "sparsity", "size_on_disk")
# With more points than this, their labels lie on each other; the pointer still reads them.
_LABELLED = 14
_HEIGHT = 400
# The height of a line of a legend in pixels, and what finds room on it in the narrowest window; a mark in letters.
_LEGEND_LINE, _LEGEND_LETTERS, _LEGEND_MARK = 22, 42, 8
_TRANSPARENT = "rgba(0,0,0,0)"


@dataclass(frozen=True)
class Chart:
    """A figure, the question or finding it answers, how to read it, and what a screen reader says in its place."""

    title: str
    caption: str
    figure: go.Figure
    alt: str


@dataclass(frozen=True)
class Timing:
    """One latency that the bars can show: its column of the results, and how it is said."""

    column: str
    title: str
    plain: str


TIMINGS = (
    Timing("time_per_output_token", "Time per output token", "The wait for each further piece of a word"),
    Timing("time_to_first_token", "Time to first token", "The wait before the first piece of a word"),
    Timing("prefill_time", "Prefill time", "The time to read the prompt"),
)


def no_points_yet() -> Chart:
    """The axes of :func:`perplexity_against_sparsity`, so that the place does not jump when the first point comes."""
    figure = blank_figure(_SPARSITY_AXIS, _QUALITY_AXIS)
    figure.update_xaxes(ticksuffix="%", dtick=10, range=[-4, 76])
    figure.update_yaxes(range=[0, 1], showticklabels=False)
    return Chart(
        title=_SPARSITY_QUESTION,
        caption="The first point appears here as soon as a run is finished.",
        figure=figure,
        alt="Axes of perplexity against sparsity, without any point yet.",
    )


def perplexity_against_sparsity(results: pd.DataFrame) -> Chart | None:
    """Lines of perplexity by sparsity, one a method and quantization; None when nothing was measured."""
    drawn = _with_quality(results)
    if drawn.empty:
        return None
    # Rounding makes small weights zero as well, which is not what was asked to be removed.
    measured = drawn["sparsity"].where(drawn["quantize"] == "none")
    drawn = drawn.assign(x=100 * measured.fillna(drawn["sparsity_asked"]))
    figure = blank_figure(_SPARSITY_AXIS, _QUALITY_AXIS)
    edge = _quality_axis(figure, drawn)
    figure.update_xaxes(ticksuffix="%", dtick=10, range=[-4, max(drawn["x"].max(), 20) + 6])
    for name, rows in groups(drawn):
        draw_variants(figure, rows, name, edge)
    dense = dense_of(drawn)
    draw_dense(figure, dense)
    _make_room(figure)
    caption = "How surprised the model is by real text (perplexity), with its 95% interval."
    if dense["perplexity"].notna().any():
        figure.add_hline(y=dense["perplexity"].iloc[0], line={"color": GREY, "width": 1.5, "dash": "dot"})
        caption += " The dotted line is the dense model."
    return Chart(
        title=_SPARSITY_QUESTION,
        caption=caption,
        figure=figure,
        alt=f"Perplexity against sparsity. {_said(drawn)}",
    )


def quality_against_size(results: pd.DataFrame) -> Chart | None:
    """Perplexity by bytes on disk, with the dense size in 16 bits and the source file marked; None without sizes."""
    drawn = _with_quality(results)
    drawn = drawn[drawn["size_on_disk"].notna()]
    if drawn.empty:
        return None
    drawn = drawn.assign(x=drawn["size_on_disk"] / MEGABYTE)
    figure = blank_figure("MB on disk, smaller is better", _QUALITY_AXIS)
    edge = _quality_axis(figure, drawn)
    for name, rows in groups(drawn):
        draw_variants(figure, rows, name, edge, say_share=len(drawn) <= _LABELLED)
    dense = dense_of(drawn)
    draw_dense(figure, dense)
    draw_source(figure, dense)
    _make_room(figure)
    widest = max(drawn["x"].max(), dense["source_bytes"].max() / MEGABYTE if not dense.empty else 0.0)
    caption = "What is saved and loaded again: zeros in a dense file save nothing, so pruned layers keep a bitmask."
    dense16 = drawn["dense16_bytes"].max()
    if pd.notna(dense16):
        widest = max(widest, dense16 / MEGABYTE)
        figure.add_vline(x=dense16 / MEGABYTE, line={"color": GREY, "width": 1, "dash": "dot"})
        caption += f" The dotted line is the dense model in 16 bits, {size(dense16)}: ratios are to it."
    figure.update_xaxes(range=[0, 1.08 * widest])
    return Chart(
        title="How good is each size?",
        caption=caption,
        figure=figure,
        alt=f"Perplexity against size on disk. {_said(drawn)}",
    )


def latency_bars(results: pd.DataFrame, timing: Timing = TIMINGS[0]) -> Chart | None:
    """Bars of the median with whiskers to the 95th percentile, in the order of the recipes: never ranked."""
    median = f"{timing.column}_p50"
    if results.empty or median not in results or results[median].isna().all():
        return None
    drawn = in_recipe_order(results[results[median].notna()])
    middle = drawn[median] / MILLISECOND
    slow = drawn[f"{timing.column}_p95"] / MILLISECOND
    places = list(range(len(drawn)))
    figure = blank_figure("milliseconds, shorter is better", None)
    figure.add_trace(
        go.Bar(
            x=middle,
            y=places,
            orientation="h",
            marker={
                "color": [method_colour(method) for method in drawn["method"]],
                "pattern": {
                    "shape": [quantization_hatch(scheme) for scheme in drawn["quantize"]],
                    "fillmode": "overlay",
                    "fgcolor": "#FFFFFF",
                    "fgopacity": 0.7,
                    "solidity": 0.2,
                },
            },
            error_x={
                "type": "data",
                "array": (slow - middle).clip(lower=0),
                "arrayminus": [0] * len(drawn),
                "width": 5,
                "color": GREY,
            },
            customdata=[
                f"<b>{plain_html(label)}</b><br>median {figures(p50)} ms, 95% of them under {figures(p95)} ms"
                f"<br>runtime: {plain_html(str(runtime))}"
                for label, p50, p95, runtime in zip(drawn["label"], middle, slow, drawn["runtime"], strict=True)
            ],
            hovertemplate="%{customdata}<extra></extra>",
            showlegend=False,
        )
    )
    names = [
        f"{plain_html(shortened(label, 28))}, {figures(value)}"
        for label, value in zip(distinct_labels(drawn), middle, strict=True)
    ]
    figure.update_layout(height=90 + 30 * len(drawn), bargap=0.3, margin={"b": 60})
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(tickvals=places, ticktext=names, range=[len(drawn) - 0.4, -0.6], showgrid=False)
    return Chart(
        title=f"{timing.title}: each run was timed alone, so this is no ranking",
        caption=f"{timing.plain}. The bar is the median, the whisker the 95th percentile{_hatched(drawn)}."
        f"{_dequantized(drawn)}",
        figure=figure,
        alt=f"{timing.title} of {len(drawn)} variants, each timed alone and not ranked. "
        f"Medians from {figures(middle.min())} to {figures(middle.max())} ms.",
    )


def _hatched(drawn: pd.DataFrame) -> str:
    """What the hatches that are drawn stand for, to go on a sentence with."""
    bits = {SCHEMES[scheme].bits for scheme in drawn["quantize"] if scheme in SCHEMES}
    told = [words for number, words in ((8, "8 bits are hatched"), (4, "4 bits are cross-hatched")) if number in bits]
    return f"; {' and '.join(told)}" if told else ""


def _dequantized(drawn: pd.DataFrame) -> str:
    """A sentence on variants that no kernel for few bits ran."""
    labels = drawn.loc[drawn["runtime"].str.startswith("dequantized"), "label"]
    if labels.empty:
        return ""
    named = shortened(", ".join(dict.fromkeys(labels)), 80)
    return (
        f" Dequantized at every step, as there is no kernel for it here: {named}. The time is not what an engine for "
        "few bits would give."
    )


def blank_figure(across: str, up: str | None) -> go.Figure:
    """Axes on no ground of their own, with what they show and its unit."""
    figure = go.Figure()
    figure.update_layout(
        height=_HEIGHT,
        margin={"l": 10, "r": 10, "t": 10, "b": 10},
        paper_bgcolor=_TRANSPARENT,
        plot_bgcolor=_TRANSPARENT,
        hovermode="closest",
        legend={"orientation": "h", "yanchor": "top", "y": -0.2, "xanchor": "left", "x": 0, "title": {"text": ""}},
    )
    figure.update_xaxes(title={"text": across}, automargin=True, zeroline=False)
    figure.update_yaxes(title={"text": up}, automargin=True, zeroline=False)
    return figure


def _make_room(figure: go.Figure) -> None:
    """A legend of many lines makes the figure longer, not what is drawn in it smaller."""
    lines, used = 1, 0
    for trace in figure.data:
        if trace.showlegend is not False:
            width = len(trace.name) + _LEGEND_MARK
            lines, used = (lines, used + width) if used + width <= _LEGEND_LETTERS else (lines + 1, width)
    figure.update_layout(height=_HEIGHT + _LEGEND_LINE * max(0, lines - 2))


def _with_quality(results: pd.DataFrame) -> pd.DataFrame:
    """The rows that have a place on a chart of quality: a perplexity, or the finding that there is none left."""
    complete = results.reindex(columns=[*results.columns, *(name for name in _NEEDED if name not in results)])
    return complete[complete["perplexity"].notna() | complete["collapsed"]]


def _quality_axis(figure: go.Figure, drawn: pd.DataFrame) -> float:
    """Scale the quality axis to what is finite, logarithmic when the range is wide; returns the edge for the rest."""
    alive = drawn.loc[~drawn["collapsed"], "perplexity"]
    top = drawn.loc[~drawn["collapsed"], "perplexity_high"].fillna(alive).max()
    bottom = drawn.loc[~drawn["collapsed"], "perplexity_low"].fillna(alive).min()
    if alive.empty:
        bottom, top = 10.0, 1000.0
    if top / bottom > _WIDE:
        low, high = math.log10(bottom) - 0.15, math.log10(top) + 0.3
        ticks = _round_values(10**low, 10**high)
        figure.update_yaxes(type="log", range=[low, high], tickvals=ticks, ticktext=[f"{tick:,g}" for tick in ticks])
        return float(10 ** (high - 0.07))
    spread = max(top - bottom, 0.1 * top)
    high = top + 0.35 * spread
    figure.update_yaxes(type="linear", range=[max(0.0, bottom - 0.3 * spread), high])
    return float(high - 0.07 * spread)


def _round_values(low: float, high: float) -> list[float]:
    steps = (1, 2, 5) if high / low < 2000 else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]


def _said(drawn: pd.DataFrame) -> str:
    """The drawn range in one to three sentences, for people who cannot see the chart."""
    sentences = []
    dense = dense_of(drawn)
    if dense["perplexity"].notna().any():
        sentences.append(f"Dense: {figures(dense['perplexity'].iloc[0])}.")
    made = drawn[~drawn["collapsed"] & ((drawn["method"] != UNPRUNED) | (drawn["quantize"] != "none"))]
    if not made.empty:
        ordered = made.sort_values("perplexity")
        best, worst = ordered.iloc[0], ordered.iloc[-1]
        sentences.append(
            f"Compressed variants go from {figures(best['perplexity'])} ({best['label']}) "
            f"to {figures(worst['perplexity'])} ({worst['label']})."
        )
    if drawn["collapsed"].any():
        sentences.append(f"Collapsed: {', '.join(drawn.loc[drawn['collapsed'], 'label'])}.")
    return " ".join(sentences)
