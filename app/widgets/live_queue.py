"""The live queue: every run one line, polled while something is active."""

import pandas as pd
import streamlit as st

from app.runs import queue
from app.runs.checkpoints import unfinished
from app.runs.store import ACTIVE, Run, RunState, Store
from app.status import LOOKS, latest_attempts, names, outcome_words, progress_words, share_done
from app.widgets.database import load_results
from app.wording import counted

# Often enough to look alive; drawing takes the processor from the run that is being timed.
_BUSY_SECONDS = 2.0
# A run may be asked for in another browser or from the terminal.
_IDLE_SECONDS = 10.0
_WAITING_SHOWN = 8
_ENDED_SHOWN = 5


def live_queue(store: Store) -> None:
    """Show what is worked on, what waits and what ended, and keep it current without touching the rest of the page.

    When a result arrives, or the queue runs empty or fills, the whole page is drawn again.
    """
    queue.ensure_workers(store)
    drawn_for = _situation(store, queue.queue_view(store))
    busy = drawn_for[0]
    st.fragment(_draw, run_every=_BUSY_SECONDS if busy else _IDLE_SECONDS)(store, drawn_for)


def _situation(store: Store, runs: list[Run]) -> tuple[bool, int]:
    return any(run.state in ACTIVE for run in runs), store.results_version()


def _draw(store: Store, drawn_for: tuple[bool, int]) -> None:
    queue.ensure_workers(store)
    runs = queue.queue_view(store)
    if _situation(store, runs) != drawn_for:
        st.rerun()
    active = [run for run in runs if run.state in ACTIVE]
    ended = [run for run in latest_attempts(runs) if run.state not in ACTIVE][:_ENDED_SHOWN]
    named = names([*active, *ended])
    st.subheader("Queue")
    if not runs:
        st.caption("Runs appear here as soon as one is started, with how far each one is and the time left.")
        return
    with st.container(border=True, gap="medium"):
        if len(active) > 1:
            _all_at_once(store, active)
        for run in active[:_WAITING_SHOWN]:
            _active_line(store, run, named[run.key])
        if len(active) > _WAITING_SHOWN:
            st.caption(f"and {len(active) - _WAITING_SHOWN:,} more waiting behind these")
        results = load_results(store)
        for run in ended:
            _ended_line(store, run, named[run.key], results)


def _all_at_once(store: Store, active: list[Run]) -> None:
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption(f"{counted(len(active), 'run')} to go")
        st.space("stretch")
        st.button(
            "Cancel all",
            key="cancel_all",
            type="tertiary",
            icon=":material/cancel:",
            on_click=_cancel,
            args=(store, [run.key for run in active]),
        )


def _active_line(store: Store, run: Run, name: str) -> None:
    with st.container(key=f"run_{run.key}", gap="xsmall"):
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            _recipe(run, name)
            st.space("stretch")
            st.button(
                "Cancel",
                key=f"cancel_{run.key}",
                type="tertiary",
                icon=":material/cancel:",
                disabled=run.state is RunState.CANCELLING,
                on_click=_cancel,
                args=(store, [run.key]),
            )
        if run.state is not RunState.QUEUED:
            st.progress(share_done(run), text=progress_words(run))


def _ended_line(store: Store, run: Run, name: str, results: pd.DataFrame) -> None:
    # Plain text: an error may repeat what a person or a file said.
    words = outcome_words(run, results, unfinished(run.run_id) if LOOKS[run.state].again else None)
    with st.container(key=f"run_{run.key}", gap="xsmall"):
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            _recipe(run, name)
            if LOOKS[run.state].again:
                st.space("stretch")
                st.button(
                    "Run again",
                    key=f"again_{run.key}",
                    type="tertiary",
                    icon=":material/replay:",
                    on_click=_again,
                    args=(store, run.key),
                )
            else:
                st.text(words, width="stretch")
        if LOOKS[run.state].again:
            st.text(words)


def _recipe(run: Run, name: str) -> None:
    look = LOOKS[run.state]
    st.text(name, width="content")
    st.badge(look.title, icon=look.icon, color=look.colour)


def _cancel(store: Store, keys: list[int]) -> None:
    for key in keys:
        queue.cancel(store, key)


def _again(store: Store, key: int) -> None:
    queue.again(store, key)
    queue.ensure_workers(store)
