"""Problems and notes in plain text: what people typed, or a file said, is never read as Markdown."""

import streamlit as st


def say_problem(title: str, message: str) -> None:
    """Say what cannot be done, why, and what to do. ``title`` is Poda's own words, ``message`` may quote anything."""
    _say(":red[:material/error:]", title, message)


def say_note(title: str, message: str) -> None:
    """Say something worth knowing before reading on."""
    _say(":material/info:", title, message)


def _say(icon: str, title: str, message: str) -> None:
    with st.container(border=True, gap="xsmall"):
        st.markdown(f"{icon} **{title}**")
        st.text(message)
