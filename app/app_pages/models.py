"""Models: what is here, what can be added, and the disk that variants take."""

import streamlit as st

from app import paths
from app.listings import distinct_labels, variants_table
from app.runs import queue
from app.runs.checkpoints import removable, remove_unfinished
from app.runs.library import add_model, forget_model
from app.widgets.database import load_disk_use, load_results, open_store
from app.widgets.library import known_models
from app.widgets.messages import say_problem
from app.wording import counted, figures, size
from pruning.errors import InputError
from pruning.sources import BUNDLED, SUGGESTIONS, parse_reference


def add(text: str) -> None:
    """Put a model on the list, or keep why it cannot be for the page to say."""
    try:
        reference = str(parse_reference(text))
    except InputError as error:
        st.session_state["model_problem"] = str(error)
        return
    st.session_state["model_problem"] = None
    if reference == BUNDLED or not add_model(store, reference):
        st.toast("This model is on the list already", icon=":material/check:")


@st.dialog("Remove the files of variants?", icon=":material/delete:")
def confirm_removal(labels: list[str], run_ids: list[str], bytes_: int) -> None:
    """Ask before files are removed."""
    st.markdown(
        f"This frees about **{size(bytes_)}**. The figures stay; to load or export "
        f"{'this variant' if len(run_ids) == 1 else 'these variants'} again, run the recipe again."
    )
    for label in labels:
        st.text(label)
    with st.container(horizontal=True, horizontal_alignment="right"):
        if st.button("Keep the files", key="keep_files"):
            st.rerun()
        if st.button("Remove files", key="remove_files", type="primary", icon=":material/delete:"):
            freed = sum(queue.remove_artifact(store, run_id) for run_id in run_ids)
            st.session_state["removed"] = freed
            st.rerun()


@st.dialog("Remove unfinished work?", icon=":material/delete:")
def confirm_unfinished(bytes_: int, runs: int) -> None:
    """Ask before what a stopped run would go on from is removed."""
    st.markdown(
        f"This frees about **{size(bytes_)}**. {counted(runs, 'run')} that "
        f"{'was' if runs == 1 else 'were'} stopped will start from the first block when started again."
    )
    with st.container(horizontal=True, horizontal_alignment="right"):
        if st.button("Keep it", key="keep_unfinished"):
            st.rerun()
        if st.button("Remove", key="remove_unfinished", type="primary", icon=":material/delete:"):
            st.session_state["removed"] = remove_unfinished(store)
            st.rerun()


st.title("Models")
store = open_store()

st.header("What is here")
for entry in known_models(store):
    with st.container(border=True, key=f"model_{entry.reference}"):
        about, action = st.columns([5, 1], vertical_alignment="center")
        with about:
            if entry.card is None:
                st.text(entry.name)
                say_problem("This model cannot be used now", entry.problem or "")
            else:
                st.text(entry.name)
                facts = [
                    f"{figures(entry.card.parameters / 1e6)} million parameters" if entry.card.parameters else None,
                    size(entry.card.source_bytes) if entry.card.source_bytes else None,
                    "comes with Poda" if entry.reference == BUNDLED else entry.reference,
                    entry.card.note,
                ]
                st.text(", ".join(fact for fact in facts if fact is not None))
        if entry.reference != BUNDLED:
            action.button(
                "Take off the list",
                key=f"forget_{entry.reference}",
                help="Its files and the runs made of it stay.",
                type="tertiary",
                icon=":material/playlist_remove:",
                on_click=forget_model,
                args=(store, entry.reference),
            )

st.header("Add a model")
with (
    st.form("add_model", border=False),
    st.container(horizontal=True, vertical_alignment="bottom"),
):
    written = st.text_input(
        "Folder, GGUF file or hub id",
        key="new_model",
        placeholder="/home/me/models/my-model, model.gguf, or owner/name@revision",
        help="A folder as transformers saves it, in safetensors. Files stay where they are.",
    )
    if st.form_submit_button("Add", icon=":material/add:"):
        add(written)
        st.rerun()
if st.session_state.get("model_problem"):
    say_problem("This model cannot be added", st.session_state["model_problem"])

st.caption(
    "Models on the Hugging Face hub to start with, the smallest first. They are downloaded when a run needs them; "
    "a gated one needs its licence accepted and your own token."
)
known = {entry.reference for entry in known_models(store)}
with st.container(border=True):
    for suggestion in SUGGESTIONS:
        owner, _, name = suggestion.name.partition("/")
        with st.container(horizontal=True, vertical_alignment="center", key=f"suggestion_{name}"):
            st.markdown(
                f"**{name}** by {owner}  \n:gray[{figures(suggestion.parameters / 1e6)} million parameters, "
                f"about {size(2 * suggestion.parameters)} in 16 bits; {suggestion.note}]",
                width="stretch",
            )
            st.button(
                "On the list" if suggestion.name in known else "Add",
                key=f"suggest_{suggestion.name}",
                icon=":material/lock:" if suggestion.gated else ":material/add:",
                disabled=suggestion.name in known,
                on_click=add,
                args=(suggestion.name,),
            )

st.header("Variants on disk")
if st.session_state.get("removed") is not None:
    st.toast(f"{size(st.session_state.pop('removed'))} freed", icon=":material/check:")
results = load_results(store)
use = load_disk_use(store)
kept = results[results["run_id"].isin(list(use.variants))].reset_index(drop=True)
if kept.empty:
    with st.container(border=True):
        st.markdown("Every finished run leaves its variant here, ready to be loaded or exported. There is none yet.")
        if st.button("Make the first run", icon=":material/play_circle:"):
            st.switch_page("app_pages/run.py")
else:
    with st.container(horizontal=True):
        st.metric("Variants", size(sum(use.variants.values())), border=True)
        st.metric("Converted models", size(use.model_cache), border=True, help="Made once from another format.")
        st.metric("Free on this disk", size(use.free), border=True)
    names = distinct_labels(kept)
    st.dataframe(
        variants_table(kept, use.variants),
        hide_index=True,
        key="variants",
        alt="Variants whose files are on disk, with their sizes",
        column_config={"Made": st.column_config.DatetimeColumn(format="D MMM YYYY, HH:mm")},
    )
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = st.multiselect("Variants to remove", names, key="to_remove", placeholder="Choose variants")
        places = [names.index(name) for name in chosen if name in names]
        run_ids = [str(kept["run_id"].iloc[place]) for place in places]
        if st.button(
            f"Remove {counted(len(run_ids), 'variant')}" if run_ids else "Remove",
            key="remove",
            icon=":material/delete:",
            disabled=not run_ids,
        ):
            confirm_removal(chosen, run_ids, sum(use.variants[run_id] for run_id in run_ids))
if use.checkpoints:
    st.subheader("Unfinished work")
    left = removable(store)
    with st.container(border=True, key="unfinished"):
        about, action = st.columns([5, 1], vertical_alignment="center")
        about.text(
            f"{size(sum(use.checkpoints.values()))}: finished blocks of {counted(len(use.checkpoints), 'variant')}. "
            "A run that was stopped goes on from them when it is started again; they go when it is done."
        )
        if action.button(
            "Remove",
            key="ask_unfinished",
            icon=":material/delete:",
            disabled=not left,
            help=None if left else "All of it belongs to runs that wait or are worked on.",
        ):
            confirm_unfinished(sum(left.values()), len(left))
st.caption("Everything is kept in this folder; PODA_HOME moves it.")
st.code(str(paths.home()), language=None)
