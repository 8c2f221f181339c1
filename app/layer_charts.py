"""A table of layers in, Plotly figure out: how much each layer's output changed, and what it lost. No Streamlit."""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from app.charts import Chart, blank_figure
from app.layers import same_share
from app.wording import figures, percent, plain_html

# Blue to yellow: read the same by colour-blind readers, and in grey.
SCALE = "Cividis"
_ROW_HEIGHT = 26
_AROUND = 110


def layer_map(layers: pd.DataFrame) -> Chart | None:
    """Two maps of the model, block by block: change of each layer's output, and the share it lost where those differ.

    None when neither says anything. Experts of a block are shown as their mean.
    """
    placed = layers[layers["block"].notna()]
    maps = [
        (source, title)
        for source, title in (("error", "change of its output"), ("removed", "weights removed"))
        if placed[source].notna().any() and not (source == "removed" and same_share(layers) is not None)
    ]
    if not maps:
        return None
    parts = list(dict.fromkeys(placed["part"]))
    figure = make_subplots(
        rows=len(maps), cols=1, shared_xaxes=True, vertical_spacing=0.12, figure=blank_figure("", None)
    )
    height = _AROUND + len(maps) * (_ROW_HEIGHT * len(parts) + 20)
    for place, (source, title) in enumerate(maps, start=1):
        grid = 100 * placed.pivot_table(index="part", columns="block", values=source, aggfunc="mean").reindex(parts)
        figure.add_trace(
            go.Heatmap(
                z=grid.to_numpy(),
                x=[int(block) for block in grid.columns],
                y=[plain_html(part) for part in parts],
                coloraxis=f"coloraxis{'' if place == 1 else place}",
                hovertemplate=f"block %{{x}}, %{{y}}<br>{title}: %{{z:.3g}}%<extra></extra>",
            ),
            row=place,
            col=1,
        )
        # Measured from the top of the plot, of which each map takes its part.
        middle = 1 - (place - 0.5) / len(maps)
        figure.update_layout(
            {
                f"coloraxis{'' if place == 1 else place}": {
                    "colorscale": SCALE,
                    "cmin": 0 if source == "error" else None,
                    "colorbar": {
                        "title": {"text": f"{title} (%)", "side": "right"},
                        "len": 1 / len(maps),
                        "y": middle,
                        "thickness": 12,
                    },
                }
            }
        )
    figure.update_layout(height=height, showlegend=False)
    figure.update_xaxes(showgrid=False)
    figure.update_xaxes(title={"text": "block of the model, from the input on"}, row=len(maps), col=1)
    figure.update_yaxes(autorange="reversed", showgrid=False, automargin=True)
    return Chart(
        title="Which layers does it hurt?",
        caption=_caption(layers, placed),
        figure=figure,
        alt=f"Maps of {len(layers):,} layers by block. {_said(layers)}",
    )


def _caption(layers: pd.DataFrame, placed: pd.DataFrame) -> str:
    parts = []
    if layers["error"].notna().any():
        parts.append(
            "How much each layer's output on calibration text differs from the dense layer's, given the same input "
            "(relative error; lower is better)."
        )
    share = same_share(layers)
    if share is not None:
        parts.append(f"Every layer lost the same share, {percent(round(share, 4))}.")
    if placed.duplicated(["block", "part"]).any():
        parts.append("Experts of a block are shown as their mean.")
    return " ".join(parts)


def _said(layers: pd.DataFrame) -> str:
    """Both ends in words, for people who cannot see the chart."""
    sentences = []
    for source, said in (("error", "The output changes"), ("removed", "The share removed goes")):
        known = layers[layers[source].notna()].sort_values(source)
        if not known.empty:
            least, most = known.iloc[0], known.iloc[-1]
            sentences.append(
                f"{said} from {figures(100 * least[source])}% ({least['name']}) "
                f"to {figures(100 * most[source])}% ({most['name']})."
            )
    return " ".join(sentences)
