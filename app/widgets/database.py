"""The store as pages read it: opened once, results read again only when they changed."""

import pandas as pd
import streamlit as st

from app import paths
from app.runs import queue
from app.runs.store import Store
from pruning.errors import InputError


def open_store() -> Store:
    """The store, opened once for all pages and browsers; says why and ends the page when it cannot be opened."""
    try:
        return _opened(paths.database_url(), str(paths.home()))
    except InputError as error:
        st.error("The database cannot be opened", icon=":material/error:")
        st.text(str(error))
        st.stop()


def load_results(store: Store) -> pd.DataFrame:
    """All results, newest first; a copy that the page may change."""
    return _results(store, str(store.engine.url), store.results_version())


def load_disk_use(store: Store) -> queue.DiskUse:
    """What Poda's files take on disk."""
    return _disk_use(store, str(store.engine.url), store.version())


@st.cache_resource(show_spinner=False, max_entries=8)
def _opened(url: str, home: str) -> Store:
    return Store(url)


@st.cache_data(show_spinner=False, max_entries=8)
def _results(_store: Store, url: str, version: int) -> pd.DataFrame:
    return _store.results()


@st.cache_data(show_spinner=False, max_entries=8)
def _disk_use(_store: Store, url: str, version: int) -> queue.DiskUse:
    return queue.disk_use(_store)
