"""Entry point of the dashboard: page config and navigation, nothing else."""

from pathlib import Path

import streamlit as st

ASSETS = Path(__file__).parent.parent / "assets"

st.set_page_config(page_title="Poda", page_icon=str(ASSETS / "logo-icon.svg"), layout="wide")
st.logo(str(ASSETS / "logo.svg"), icon_image=str(ASSETS / "logo-icon.svg"), size="large")

page = st.navigation(
    [
        st.Page(
            "app_pages/run.py",
            title="Run",
            icon=":material/play_circle:",
            help="Choose a model and how to shrink it, start, and watch.",
            default=True,
        ),
        st.Page(
            "app_pages/compare.py",
            title="Compare",
            icon=":material/insights:",
            help="What each variant cost in quality and bought in bytes and time.",
        ),
        st.Page(
            "app_pages/models.py",
            title="Models",
            icon=":material/deployed_code:",
            help="Models that are here, models to add, and the disk that variants take.",
        ),
    ]
)
page.run()
