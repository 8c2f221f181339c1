"""Compare: what each variant cost in quality and bought in bytes and time."""

import json
from functools import partial

import streamlit as st

from app.charts import TIMINGS, latency_bars, perplexity_against_sparsity, quality_against_size
from app.listings import FIGURE_HEADERS, distinct_labels, fold_equal, in_recipe_order, results_csv, results_table
from app.palette import UNPRUNED
from app.protocols import left_out, not_faster, out_of_date, protocols, way_titles
from app.provenance import provenance_table
from app.widgets.chart import show_axes, show_chart
from app.widgets.database import load_results, open_store
from app.widgets.layers import show_layers
from app.widgets.messages import say_note

FEW = 30
NEWEST = 20

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
    show_axes(key="quality_by_sparsity")
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
few = len(names) <= FEW
newest = set(comparable["key"].nlargest(len(names) if few else NEWEST).index)
preset = [name for place, name in enumerate(names) if place in newest]
if few:
    picked = st.pills(
        "Variants", names, selection_mode="multi", default=preset, key=f"variants_{chosen.key}", wrap=True
    )
else:
    picked = st.multiselect("Variants", names, default=preset, key=f"variants_{chosen.key}")
    st.caption(f"{len(names):,} variants are comparable; the newest {NEWEST} are shown until you choose.")
shown = comparable[[name in set(picked) for name in names]]
if shown.empty:
    st.caption("Choose at least one variant to see its figures.")
    st.stop()

stale = out_of_date(shown)
if stale is not None:
    say_note("Some figures are out of date", stale)

# Only the view that is open is drawn: charts and tables of many variants take the browser longest.
quality, waiting, table = st.tabs(["Quality and size", "Waiting time", "Every figure"], key="view", bind="query-params")
if quality.open:
    by_sparsity, by_size = quality.columns(2)
    with by_sparsity:
        show_chart(
            "quality by sparsity",
            perplexity_against_sparsity,
            shown,
            key="quality_by_sparsity",
            missing="None of these variants has a measured perplexity.",
        )
    with by_size:
        show_chart(
            "quality by size",
            quality_against_size,
            shown,
            key="quality_by_size",
            missing="None of these variants has a measured size.",
        )

if waiting.open:
    with waiting:
        timings = {timing.title: timing for timing in TIMINGS}
        asked = st.segmented_control(
            "Which wait", list(timings), default=TIMINGS[0].title, key="waiting", required=True, bind="query-params"
        )
        timing = timings.get(asked, TIMINGS[0])
        show_chart(
            timing.title,
            partial(latency_bars, timing=timing),
            shown,
            key="waiting_bars",
            missing="None of these variants was timed this way.",
        )
        slow = not_faster(shown)
        if slow is not None:
            st.text(slow)

if table.open:
    with table:
        differing, same = fold_equal(results_table(shown))
        st.dataframe(
            differing,
            hide_index=True,
            height="content",
            key="figures",
            alt="Every figure of the chosen variants, one row a variant",
            column_config={
                "Variant": st.column_config.TextColumn(pinned=True, width="medium"),
                "Measured": st.column_config.DatetimeColumn(format="D MMM YYYY, HH:mm"),
                **{header: st.column_config.NumberColumn() for header in FIGURE_HEADERS if header in differing},
            },
        )
        if same:
            # Plain text: a text's name is what somebody called a file.
            st.text("The same for all: " + "; ".join(f"{header.lower()}: {value}" for header, value in same.items()))
        st.download_button(
            "Download as CSV",
            results_csv(shown),
            file_name="poda-results.csv",
            mime="text/csv",
            icon=":material/download:",
            on_click="ignore",
        )

by_layer = st.expander("Layer by layer", icon=":material/layers:", key="by_layer", on_change="rerun")
if by_layer.open:
    with by_layer:
        pruned = {
            name: int(key)
            for name, key, method, scheme in zip(
                distinct_labels(shown), shown["key"], shown["method"], shown["quantize"], strict=True
            )
            if method != UNPRUNED or scheme != "none"
        }
        if not pruned:
            st.caption("The dense model keeps all of its layers as they are: choose a compressed variant above.")
        else:
            newest_made = list(pruned.values()).index(max(pruned.values()))
            layered = st.selectbox("Variant", list(pruned), index=newest_made, key="by_layer_variant", width=320)
            show_layers(store.record(pruned.get(layered, next(iter(pruned.values())))))

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
