"""The models that can be chosen: bundled first, then what people added, by the name people know them by."""

from dataclasses import dataclass

import streamlit as st

from app.runs.library import added_models
from app.runs.store import Store
from app.wording import shortened
from pruning.errors import InputError
from pruning.sources import BUNDLED, ModelCard, describe, parse_reference

# Long enough not to read headers at every click, short enough to notice a folder that was moved.
_FRESH_SECONDS = 30


@dataclass(frozen=True)
class Entry:
    """A model on the list: what to write to mean it, and its card or why it cannot be used."""

    reference: str
    card: ModelCard | None
    problem: str | None

    @property
    def name(self) -> str:
        """The name people know it by; the reference where a revision or a problem makes that unclear."""
        if self.card is None or "@" in self.reference:
            return shortened(self.reference)
        return self.card.title


def known_models(store: Store) -> list[Entry]:
    """Every model on the list, the bundled one first."""
    return [look_up(reference) for reference in (BUNDLED, *added_models(store))]


@st.cache_data(show_spinner=False, ttl=_FRESH_SECONDS, max_entries=256)
def look_up(reference: str) -> Entry:
    """What can be told of a model without loading it."""
    try:
        return Entry(reference, describe(parse_reference(reference)), None)
    except InputError as error:
        return Entry(reference, None, str(error))
