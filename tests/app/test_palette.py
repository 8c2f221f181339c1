"""Colours can be told apart from both grounds, and marks without colour."""

import tomllib
from dataclasses import replace
from pathlib import Path

import plotly.graph_objects as go
import pytest

from app.palette import GREY, Look, marker, method_colour, method_dash, method_mark, method_rank, quantization_hatch
from pruning.methods import METHODS
from pruning.quantize import SCHEMES

THEME = tomllib.loads((Path(__file__).parents[2] / ".streamlit" / "config.toml").read_text(encoding="utf-8"))["theme"]
# WCAG 2.2: 4.5 for text, 3 for graphics and for what only shows a state.
TEXT, GRAPHICS = 4.5, 3.0


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert contrast("#777777", "#FFFFFF") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_the_theme_is_legible(mode: str) -> None:
    theme = THEME[mode]
    for ground in (theme["backgroundColor"], theme["secondaryBackgroundColor"]):
        assert contrast(theme["textColor"], ground) > 7
        assert contrast(theme["linkColor"], ground) > TEXT
    assert contrast("#FFFFFF", theme["primaryColor"]) > TEXT
    assert contrast(theme["primaryColor"], theme["backgroundColor"]) > GRAPHICS


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("method", [*METHODS, "none"])
def test_marks_stand_out_from_both_grounds(mode: str, method: str) -> None:
    assert contrast(method_colour(method), THEME[mode]["backgroundColor"]) > GRAPHICS


def test_no_two_methods_are_taken_for_each_other() -> None:
    """Neither by their lines nor by single points, whose mark is all there is of a method measured once."""
    assert len({(method_colour(method), method_dash(method)) for method in METHODS}) == len(METHODS)
    assert len({(method_colour(method), method_mark(method)) for method in METHODS}) == len(METHODS)


def test_methods_keep_their_looks() -> None:
    looks = {name: (method_colour(name), method_dash(name), method_mark(name)) for name in METHODS}
    assert looks["magnitude"] == ("#D55E00", "dot", "")
    assert looks["wanda"] == ("#0072B2", "solid", "")
    assert looks["sparsegpt"] == ("#009E73", "dash", "")


def test_methods_that_nobody_gave_a_look_have_one_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: (method_colour(name), method_dash(name)) for name in METHODS}
    for number in range(6):
        monkeypatch.setitem(METHODS, f"new-{number}", replace(METHODS["wanda"], name=f"new-{number}"))
    test_no_two_methods_are_taken_for_each_other()
    assert {name: (method_colour(name), method_dash(name)) for name in before} == before
    for mode in ("light", "dark"):
        for name in METHODS:
            test_marks_stand_out_from_both_grounds(mode, name)


def test_a_method_that_is_no_more_is_grey_and_last_of_nothing() -> None:
    assert method_colour("forgotten") == GREY
    assert method_dash("forgotten") == "solid"
    assert method_rank("none") == 0


def test_every_scheme_has_a_marker_and_a_hatch_of_its_own() -> None:
    assert marker("none", "float32", "forgotten") == "circle-open"
    plain = {marker("none", dtype) for dtype in ("bfloat16", "float16", "float32")}
    assert plain == {"circle", "circle-open"}
    assert not plain & {marker(scheme, "bfloat16") for scheme in SCHEMES}
    assert len({marker(scheme, "bfloat16") for scheme in SCHEMES}) == len(SCHEMES)
    assert quantization_hatch("none") == ""
    assert all(quantization_hatch(scheme) for scheme in SCHEMES)


def test_a_mark_is_inside_of_every_marker_that_has_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from app import palette

    monkeypatch.setitem(palette._LOOKS, "wanda", Look("#0072B2", "solid", "x"))
    shown = [
        marker("none", "bfloat16", "wanda"),
        marker("none", "float32", "wanda"),
        marker("int8", "float32", "wanda"),
        marker("gptq-int4", "float32", "wanda"),
    ]
    assert shown == ["circle-x", "circle-x-open", "square-x", "diamond-tall-dot"]
    every = [marker(scheme, "bfloat16", method) for scheme in SCHEMES for method in METHODS]
    for symbol in [*shown, *every]:
        go.Scatter(marker={"symbol": symbol})  # Plotly refuses what it does not know
