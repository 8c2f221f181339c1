"""A chart in its card: question, how to read it, figure; or what will be here."""

import streamlit as st

from app.charts import Chart


def show_chart(chart: Chart | None, *, key: str, missing: str) -> None:
    """Draw ``chart`` with the words that belong to it; ``missing`` says what will be here when there is none yet."""
    with st.container(border=True, key=f"{key}_card"):
        if chart is None:
            st.caption(missing)
            return
        st.subheader(chart.title)
        st.caption(chart.caption)
        st.plotly_chart(chart.figure, key=key, alt=chart.alt, config={"displayModeBar": False})
