"""Compare: what each variant cost in quality and bought in bytes and time."""

import json
from functools import partial

import streamlit as st

from app.charts import TIMINGS, latency_bars, perplexity_against_sparsity, quality_against_size
from app.listings import FIGURE_HEADERS, distinct_labels, fold_equal, in_recipe_order, results_csv, results_table
from app.protocols import left_out, not_faster, protocols, way_titles
from app.provenance import provenance_table
from app.widgets.chart import show_chart
from app.widgets.database import load_results, open_store
from app.widgets.messages import say_note

SHOWN_AT_ONCE = 40
FEW = 40

st.title("Compare")
store = open_store()
results = load_results(store)

if results.empty:
    with st.container(border=True):
        st.markdown(
            "What each variant cost in quality, and what it bought in bytes and time, will be here "
            "as soon as a run is finished."
        )
        if st.button("Make the first run", type="primary", icon=":material/play_circle:"):
            st.switch_page("app_pages/run.py")
    st.stop()

everything = protocols(results)
with st.container(horizontal=True, vertical_alignment="bottom"):
    models = list(dict.fromkeys(protocol.model for protocol in everything))
    model = st.selectbox("Model", models, key="of", bind="query-params", width=320)
    ways = [protocol for protocol in everything if protocol.model == model]
    titles = way_titles(ways)
    title = st.selectbox("Measured on", list(titles), key="measured", bind="query-params", width=480)
chosen = titles.get(title, ways[0])
apart = left_out(chosen, everything)
if apart is not None:
    say_note("Figures that were measured differently are kept apart", apart)

comparable = in_recipe_order(results[results["protocol"] == chosen.key]).reset_index(drop=True)
names = distinct_labels(comparable)
newest = comparable["key"].nlargest(SHOWN_AT_ONCE).index
preset = [name for place, name in enumerate(names) if place in newest]
if len(names) <= FEW:
    picked = st.pills(
        "Variants", names, selection_mode="multi", default=preset, key=f"variants_{chosen.key}", wrap=True
    )
else:
    picked = st.multiselect("Variants", names, default=preset, key=f"variants_{chosen.key}")
    if len(names) > SHOWN_AT_ONCE:
        st.caption(f"{len(names):,} variants are comparable; the newest {SHOWN_AT_ONCE} are shown until you choose.")
shown = comparable[[name in set(picked) for name in names]]
if shown.empty:
    st.caption("Choose at least one variant to see its figures.")
    st.stop()

quality, bytes_ = st.columns(2)
with quality:
    show_chart(
        "quality by sparsity",
        perplexity_against_sparsity,
        shown,
        key="quality_by_sparsity",
        missing="None of these variants has a measured perplexity.",
    )
with bytes_:
    show_chart(
        "quality by size",
        quality_against_size,
        shown,
        key="quality_by_size",
        missing="None of these variants has a measured size.",
    )

timings = {timing.title: timing for timing in TIMINGS}
timing = timings.get(
    st.segmented_control(
        "Waiting time", list(timings), default=TIMINGS[0].title, key="waiting", required=True, bind="query-params"
    ),
    TIMINGS[0],
)
show_chart(
    timing.title,
    partial(latency_bars, timing=timing),
    shown,
    key="waiting_bars",
    missing="None of these variants was timed this way.",
)
slow = not_faster(shown)
if slow is not None:
    st.caption(slow)

st.subheader("Every figure")
differing, same = fold_equal(results_table(shown))
st.dataframe(
    differing,
    hide_index=True,
    key="figures",
    alt="Every figure of the chosen variants, one row a variant",
    column_config={
        "Variant": st.column_config.TextColumn(pinned=True, width="medium"),
        "Measured": st.column_config.DatetimeColumn(format="D MMM YYYY, HH:mm"),
        **{header: st.column_config.NumberColumn() for header in FIGURE_HEADERS if header in differing},
    },
)
if same:
    st.text("The same for all: " + "; ".join(f"{header.lower()}: {value}" for header, value in same.items()))
st.download_button(
    "Download as CSV",
    results_csv(shown),
    file_name="poda-results.csv",
    mime="text/csv",
    icon=":material/download:",
    on_click="ignore",
)

measured = st.expander("How it was measured", icon=":material/fact_check:", key="how_measured", on_change="rerun")
if measured.open:
    with measured:
        keys = dict(zip(distinct_labels(shown), shown["key"], strict=True))
        variant = st.selectbox("Variant", list(keys), key="how_measured_variant", width=320)
        record = store.record(int(keys[variant]))
        st.dataframe(
            provenance_table(record), hide_index=True, height="content", alt="Everything that decides these figures"
        )
        st.download_button(
            "Download the record as JSON",
            json.dumps(record, indent=2),
            file_name=f"poda-{record['run']}.json",
            mime="application/json",
            icon=":material/download:",
            on_click="ignore",
        )
