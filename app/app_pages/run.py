"""Run: choose a model and how to shrink it, start, and watch."""

import streamlit as st

from app.asking import UNSTRUCTURED, ask_for, request_for
from app.charts import perplexity_against_sparsity
from app.estimate import ModelSize, estimate, in_words
from app.protocols import latest_protocol
from app.runs.history import expected_seconds
from app.runs.spec import BUNDLED_ARTICLES, CalibrationSpec, EvaluationSpec
from app.runs.store import ACTIVE
from app.runs.sweep import PRESETS, SweepRequest
from app.widgets.chart import show_axes, show_chart
from app.widgets.database import load_results, open_store
from app.widgets.library import known_models, look_up
from app.widgets.live_queue import live_queue
from app.widgets.messages import say_problem
from app.wording import counted
from pruning.allocation import ALLOCATIONS, UNIFORM
from pruning.errors import InputError
from pruning.methods import METHODS
from pruning.quantize import SCHEMES

SHOWN_AT_ONCE = 30
SPARSITIES = ["10%", "20%", "30%", "40%", "50%", "60%", "70%"]
TEXTS = {BUNDLED_ARTICLES: "news articles (come with Poda)", "wikitext2": "WikiText-2 (downloaded)"}
STATISTICS = {
    "auto": "whichever is best",
    "sequential": "the model as it is pruned",
    "shared": "the whole model, once for all",
}
STRUCTURED = [name for name, method in METHODS.items() if method.kind != "weights"]
DEVICES = {"auto": "the fastest one here", "cpu": "CPU", "cuda": "NVIDIA GPU", "mps": "Apple GPU"}
DTYPES = {"auto": "what suits the device", "bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}


def described(*kinds: str) -> str:
    """What the methods of some kinds do, for the help beside them."""
    offered = [method for method in METHODS.values() if method.kind in kinds]
    return "\n\n".join(f"**{method.title}** {method.summary}. {method.paper}." for method in offered)


def start(request: SweepRequest) -> None:
    """Ask for every run of the sweep, and say what came of it."""
    try:
        submitted = ask_for(store, request)
    except InputError as error:
        st.session_state["start_problem"] = str(error)
        return
    st.session_state["start_problem"] = None
    new = sum(not one.reused for one in submitted)
    there = len(submitted) - new
    parts = [f"{counted(new, 'run')} started"] if new else []
    parts += [f"{counted(there, 'run')} there already"] if there else []
    st.toast(", ".join(parts), icon=":material/check:")


st.title("Run")
st.markdown("How small and fast can a model get before it stops being good enough? Shrink one and measure it here.")
store = open_store()
results = load_results(store)

with st.grid(len(PRESETS), min_column_width=200):
    for place, (name, preset) in enumerate(PRESETS.items()):
        with st.container(border=True, height="stretch"):
            st.markdown(f"{preset.description}.")
            st.space("stretch")
            st.button(
                preset.title,
                key=f"preset_{name}",
                # One button stands out: the first look as long as nothing was measured, then the form's own.
                type="primary" if results.empty and place == 0 else "secondary",
                icon=":material/play_arrow:",
                on_click=start,
                args=(preset.request,),
            )

form, watch = st.columns([2, 3], gap="large")
with form:
    st.subheader("What to make")
    titles = {entry.reference: entry.name for entry in known_models(store)}
    model = st.selectbox(
        "Model",
        list(titles),
        format_func=lambda reference: titles.get(reference, reference),
        accept_new_options=True,
        placeholder="Choose, or write a folder, a GGUF file or owner/name",
        help="You can also write a folder, a .gguf file, or a hub id such as owner/name.",
        key="model",
        bind="query-params",
    )
    single = st.pills(
        "How to choose the weights to remove (method)",
        [name for name, method in METHODS.items() if method.kind == "weights"],
        selection_mode="multi",
        default=["wanda"],
        format_func=lambda name: METHODS[name].title,
        help=described("weights"),
        key="methods",
        bind="query-params",
        wrap=True,
    )
    whole = (
        st.pills(
            "Or remove whole parts, which is faster everywhere (structured pruning)",
            STRUCTURED,
            selection_mode="multi",
            format_func=lambda name: METHODS[name].title,
            help=described("width", "depth") + "\n\nThe share to remove is one of all weights in the model's blocks.",
            key="parts",
            bind="query-params",
            wrap=True,
        )
        if STRUCTURED
        else []
    )
    methods = [*single, *whole]
    offered = list(dict.fromkeys(pattern for name in methods for pattern in METHODS[name].patterns))
    patterns = st.pills(
        "Where they may be (pattern)",
        [UNSTRUCTURED, *offered],
        selection_mode="multi",
        default=[UNSTRUCTURED],
        format_func=lambda pattern: "anywhere" if pattern == UNSTRUCTURED else pattern,
        help="2:4 keeps two weights of each four in a row, which some GPUs can use. It fixes the share at 50%.",
        disabled=not methods,
        key="patterns",
        bind="query-params",
    )
    shares = st.multiselect(
        "What share to remove (sparsity)",
        SPARSITIES,
        default=["50%"],
        accept_new_options=True,
        placeholder="Choose, or write one such as 55%",
        disabled=not methods or UNSTRUCTURED not in patterns,
        key="sparsities",
        bind="query-params",
    )
    stored = st.pills(
        "How to store the weights that are kept (quantization)",
        ["none", *SCHEMES],
        selection_mode="multi",
        default=["none"],
        format_func=lambda name: SCHEMES[name].title if name in SCHEMES else "as they are",
        help="\n\n".join(f"**{scheme.title}** {scheme.summary}." for scheme in SCHEMES.values()),
        key="stored",
        bind="query-params",
        wrap=True,
    )
    grouped = [scheme for name, scheme in SCHEMES.items() if name in (stored or []) and scheme.groups]
    sizes = sorted({size for scheme in grouped for size in scheme.groups})
    groups = (
        st.pills(
            "How many weights share a scale (group size)",
            sizes,
            selection_mode="multi",
            default=[grouped[0].groups[0]],
            help="Smaller groups follow the weights more closely and take more bytes for their scales.",
            key="groups",
            bind="query-params",
        )
        if grouped
        else []
    )
    with st.expander("More on how weights are removed", icon=":material/layers:"):
        allocations = st.pills(
            "How to spread it over the layers (allocation)",
            list(ALLOCATIONS),
            selection_mode="multi",
            default=[UNIFORM],
            format_func=lambda name: ALLOCATIONS[name].title,
            help="The share of the whole stays what is asked for.\n\n"
            + "\n\n".join(
                f"**{one.title}**: {one.summary}.{f' {one.paper}.' if one.paper else ''}"
                for one in ALLOCATIONS.values()
            ),
            disabled=not methods,
            key="allocations",
            bind="query-params",
        )
        statistics = st.pills(
            "What methods look at when they read text (statistics)",
            list(STATISTICS),
            default="auto",
            required=True,
            format_func=STATISTICS.__getitem__,
            help="**The model as it is pruned**: each block sees what the pruned blocks before it give (sequential). "
            "**The whole model, once for all**: one reading of the text serves every variant, in a fraction of the "
            "time, at some cost in quality where much is removed (shared). **Whichever is best**: once for all "
            "where that was measured to cost nothing, and several variants can use it.",
            disabled=not methods,
            key="statistics",
            bind="query-params",
        )
    with st.expander("Text, windows and device", icon=":material/tune:"):
        st.caption("Text that methods look at to see which weights matter (calibration).")
        calibration_text = st.selectbox(
            "Calibration text",
            list(TEXTS),
            format_func=lambda text: TEXTS.get(text, text),
            accept_new_options=True,
            help="You can also write the path of a text file, or a dataset's name.",
            key="cal_text",
            bind="query-params",
        )
        with st.container(horizontal=True):
            calibration_windows = st.number_input(
                "Windows", 1, 1024, CalibrationSpec().windows, key="cal_windows", bind="query-params"
            )
            calibration_length = st.number_input(
                "Tokens each", 8, 8192, CalibrationSpec().length, key="cal_length", bind="query-params"
            )
            seed = st.number_input("Seed", 0, 2**31 - 1, CalibrationSpec().seed, key="seed", bind="query-params")
        st.caption("Text to measure on (evaluation). More of it gives a narrower interval and takes longer.")
        evaluation_text = st.selectbox(
            "Evaluation text",
            list(TEXTS),
            format_func=lambda text: TEXTS.get(text, text),
            accept_new_options=True,
            help="You can also write the path of a text file, or a dataset's name.",
            key="eval_text",
            bind="query-params",
        )
        with st.container(horizontal=True):
            evaluation_windows = st.number_input(
                "Windows", 1, 4096, EvaluationSpec().windows, key="eval_windows", bind="query-params"
            )
            evaluation_length = st.number_input(
                "Tokens each", 8, 8192, EvaluationSpec().length, key="eval_length", bind="query-params"
            )
        with st.container(horizontal=True):
            device = st.selectbox(
                "Device",
                list(DEVICES),
                format_func=lambda name: DEVICES.get(name, name),
                accept_new_options=True,
                help="You can also write one of several GPUs, such as cuda:1.",
                key="device",
                bind="query-params",
            )
            dtype = st.selectbox(
                "Weights in", list(DTYPES), format_func=DTYPES.__getitem__, key="dtype", bind="query-params"
            )

    request = None
    try:
        request = request_for(
            model=model or "",
            methods=methods,
            shares=shares,
            patterns=patterns,
            stored=stored,
            groups=groups,
            allocations=tuple(allocations) if methods else (UNIFORM,),
            statistics=statistics if methods and statistics else "auto",
            calibration={
                "source": calibration_text,
                "windows": calibration_windows,
                "length": calibration_length,
                "seed": seed,
            },
            evaluation={"source": evaluation_text, "windows": evaluation_windows, "length": evaluation_length},
            device=device,
            dtype=dtype,
        )
        card = look_up(request.model).card
        known = ModelSize.known(card.parameters, card.title, results) if card is not None else None
        there = {*results["run_id"], *(run.run_id for run in store.runs(ACTIVE))}
        st.text(in_words(estimate(request.specs(), there, known, lambda spec: expected_seconds(store, spec))))
        left_out = request.left_out()
        if left_out:
            st.text(f"Left out, as there is no such combination: {', '.join(left_out)}.")
    except InputError as error:
        request = None
        say_problem("This cannot be run", str(error))
    st.button(
        "Start",
        key="start",
        type="secondary" if results.empty else "primary",
        icon=":material/play_arrow:",
        disabled=request is None,
        on_click=start,
        args=(request,),
        width="stretch",
    )
    if st.session_state.get("start_problem"):
        say_problem("The runs were not started", st.session_state["start_problem"])

with watch:
    live_queue(store)
    latest = latest_protocol(results)
    if latest is None:
        show_axes(key="so_far")
    else:
        show_chart(
            "quality by sparsity",
            perplexity_against_sparsity,
            results[results["protocol"] == latest.key].head(SHOWN_AT_ONCE),
            key="so_far",
            missing="None of the latest runs has a measured perplexity.",
        )
