"""The layer report of one variant: a map of the model, a table, and where layers were not treated as asked."""

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app.layer_charts import layer_map
from app.layers import fallbacks, layers_frame, layers_table, removed_words, same_share, unpruned_words
from app.widgets.messages import say_note
from app.wording import percent


def show_layers(record: Mapping[str, Any]) -> None:
    """Show what was done to each layer of a finished run."""
    layers = layers_frame(record)
    if layers.empty:
        st.caption("Nothing was noted layer by layer when this variant was made. Run it again to see its layers here.")
        return
    removed = removed_words(record)
    if removed is not None:
        say_note("What was removed", removed)
    unusual = fallbacks(layers)
    if unusual:
        say_note("Not every layer could be treated as asked", "\n".join(unusual))
    chart = layer_map(layers)
    share = same_share(layers)
    if chart is not None:
        with st.container(border=True, key="layer_map_card"):
            st.subheader(chart.title)
            st.caption(chart.caption)
            st.plotly_chart(chart.figure, key="layer_map", alt=chart.alt, config={"displayModeBar": False})
    elif share is not None:
        st.caption(
            f"Every layer lost the same share, {percent(round(share, 4))}. The method looked at no text, so how much "
            "each layer's output changed is not known."
        )
    st.dataframe(
        layers_table(layers),
        hide_index=True,
        key="layers",
        alt="Every layer with what was done to it",
        height=420,
        column_config={"Layer": st.column_config.TextColumn(pinned=True)},
    )
    left = unpruned_words(record)
    if left is not None:
        st.text(left)
