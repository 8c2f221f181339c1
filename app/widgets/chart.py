"""A chart in its card: question, how to read it, figure; or what will be here."""

from collections.abc import Callable
from datetime import datetime

import pandas as pd
import streamlit as st

from app.charts import Chart, no_points_yet

Draw = Callable[[pd.DataFrame], Chart | None]


def show_chart(what: str, draw: Draw, results: pd.DataFrame, *, key: str, missing: str) -> None:
    """Draw ``results`` with the words that belong to it; ``missing`` says why there is nothing.

    ``what`` names what ``draw`` draws: a chart of the same runs is drawn once.
    """
    chart = _drawn(draw, results, what, tuple(zip(results["run_id"], results["finished_at"], strict=True)))
    if chart is not None:
        _show(chart, key)
        return
    with st.container(border=True, key=f"{key}_card"):
        st.caption(missing)


def show_axes(*, key: str) -> None:
    """The place of a chart before there is anything to draw in it."""
    _show(no_points_yet(), key)


def _show(chart: Chart, key: str) -> None:
    with st.container(border=True, key=f"{key}_card"):
        st.subheader(chart.title)
        st.caption(chart.caption)
        st.plotly_chart(chart.figure, key=key, alt=chart.alt, config={"displayModeBar": False})


# What was measured does not change any more, so the ids and the times of the runs stand for their figures.
@st.cache_resource(show_spinner=False, max_entries=64)
def _drawn(_draw: Draw, _results: pd.DataFrame, what: str, runs: tuple[tuple[str, datetime], ...]) -> Chart | None:
    return _draw(_results)
