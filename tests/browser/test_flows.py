"""What people do on the pages, in a real browser against a real server."""

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from app.runs import queue, transitions
from app.runs.checkpoints import unfinished
from app.runs.store import RunState
from app.runs.sweep import PRESETS
from tests.app.factories import fill, leave_blocks, make_run, make_spec
from tests.browser.conftest import Server, Visitor

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

PRESET_SECONDS = 60
PAGES = ("", "compare", "models")


def open_page(one: Visitor, server: Server, path: str = "") -> Page:
    one.page.goto(f"{server.url}/{path}")
    expect(one.page.get_by_role("heading", level=1)).to_be_visible()
    expect(one.page.get_by_test_id("stStatusWidget")).to_have_count(0)
    return one.page


def test_the_first_request_may_be_for_any_page(server: Server, visitor: Callable[..., Visitor]) -> None:
    """A bookmark is opened right after the start, before any page has set up the navigation."""
    page = open_page(visitor(), server, "compare")
    expect(page.get_by_role("heading", level=1)).to_have_text("Compare")
    for title in ("Run", "Compare", "Models"):
        expect(page.get_by_test_id("stSidebarNav").get_by_role("link", name=title)).to_be_visible()


@pytest.mark.slow
def test_one_click_leads_to_the_first_own_point_on_a_chart(server: Server, visitor: Callable[..., Visitor]) -> None:
    """The whole way with nothing replaced: bundled model, worker process, compression, measurement, chart."""
    page = open_page(visitor(), server)
    preset = next(iter(PRESETS.values()))
    page.get_by_role("button", name=preset.title).click()
    expect(page.get_by_role("progressbar").first).to_be_visible()
    chart = page.locator(".st-key-so_far")
    expect(chart.locator(".js-plotly-plot .scatterlayer .point").first).to_be_visible(timeout=PRESET_SECONDS * 1000)
    wanted = {spec.run_id for spec in preset.request.specs()}
    expect(chart.locator(".scatterlayer .point")).to_have_count(len(wanted), timeout=2 * PRESET_SECONDS * 1000)
    expect(page.get_by_role("progressbar")).to_have_count(0)
    assert set(server.store.results()["run_id"]) == wanted


def test_a_running_run_moves_without_a_touch_and_survives_a_reload(
    server: Server, visitor: Callable[..., Visitor]
) -> None:
    run = make_run(server.store, state=RunState.RUNNING)
    page = open_page(visitor(), server)
    expect(page.get_by_text("block 13 of 30")).to_be_visible()
    move(server, run.key, 20)
    expect(page.get_by_text("block 21 of 30")).to_be_visible()
    page.reload()
    expect(page.get_by_text("block 21 of 30")).to_be_visible()


def test_cancelling_is_seen_at_once_and_in_every_browser(server: Server, visitor: Callable[..., Visitor]) -> None:
    run = make_run(server.store, state=RunState.RUNNING)
    mine, theirs = open_page(visitor(), server), open_page(visitor(), server)
    expect(theirs.get_by_text("block 13 of 30")).to_be_visible()
    mine.get_by_role("button", name="Cancel").click()
    for page in (mine, theirs):
        expect(page.get_by_text("Stopping at the next step")).to_be_visible()
    assert server.store.run(run.key).state is RunState.CANCELLING


def test_a_result_that_arrives_is_charted_without_a_touch(server: Server, visitor: Callable[..., Visitor]) -> None:
    make_run(server.store, make_spec("sparsegpt", 0.8), state=RunState.RUNNING)
    page = open_page(visitor(), server)
    expect(page.get_by_text("The first point appears here")).to_be_visible()
    make_run(server.store, make_spec(None))
    make_run(server.store, make_spec("wanda", 0.5))
    expect(page.locator(".st-key-so_far .scatterlayer .point")).to_have_count(2)


def test_choices_survive_a_reload(server: Server, visitor: Callable[..., Visitor]) -> None:
    page = open_page(visitor(), server)
    page.get_by_role("button", name="SparseGPT").click()
    page.wait_for_url("**methods=**")
    page.reload()
    expect(page.get_by_text("3 variants")).to_be_visible()


def test_removing_files_asks_first(server: Server, visitor: Callable[..., Visitor]) -> None:
    run = make_run(server.store, make_spec("wanda", 0.5), artifact=True)
    page = open_page(visitor(), server, "models")
    chooser = page.get_by_role("combobox", name="Variants to remove")
    # A list that opens while the page still moves is closed again.
    expect(page.get_by_test_id("stDataFrame").locator("canvas").first).to_be_visible()
    chooser.scroll_into_view_if_needed()
    chooser.click()
    chooser.press_sequentially("Wanda")
    expect(page.get_by_role("option", name="Wanda 50%")).to_be_visible()
    chooser.press("Enter")
    # An open list hides the rest of the page from those who cannot see it, and from this test.
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Remove 1 variant").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_text("The figures stay")).to_be_visible()
    assert queue.artifact_folder(run).exists()
    dialog.get_by_role("button", name="Remove files").click()
    expect(page.get_by_text("There is none yet")).to_be_visible()
    assert not queue.artifact_folder(run).exists()
    assert len(server.store.results()) == 1


def test_removing_unfinished_work_asks_first(server: Server, visitor: Callable[..., Visitor]) -> None:
    run = make_run(server.store, state=RunState.CANCELLED)
    leave_blocks(run.run_id, 12, 30)
    page = open_page(visitor(), server, "models")
    page.locator(".st-key-unfinished").get_by_role("button", name="Remove").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_text("will start from the first block")).to_be_visible()
    assert unfinished(run.run_id) is not None
    dialog.get_by_role("button", name="Remove").click()
    expect(page.get_by_text("Unfinished work")).to_have_count(0)
    assert unfinished(run.run_id) is None


def test_layers_are_shown_when_they_are_opened(server: Server, visitor: Callable[..., Visitor]) -> None:
    for share in (0.5, 0.6):
        make_run(server.store, make_spec("sparsegpt", share))
    page = open_page(visitor(), server, "compare")
    page.get_by_text("Layer by layer").click()
    expect(page.locator(".st-key-layer_map .js-plotly-plot .heatmaplayer image").first).to_be_visible()
    expect(page.get_by_text("2 layers pruned by Wanda")).to_be_visible()


@pytest.mark.parametrize("path", PAGES)
def test_a_narrow_window_does_not_scroll_sideways(server: Server, visitor: Callable[..., Visitor], path: str) -> None:
    fill(server.store, 14, artifacts=True)
    page = open_page(visitor(width=400, height=800), server, path)
    if path != "models":
        expect(page.locator(".js-plotly-plot").first).to_be_visible()
    wide = page.evaluate("""() => [document.documentElement, document.querySelector('[data-testid=stMain]')]
        .map(element => element.scrollWidth - element.clientWidth)""")
    assert wide == [0, 0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_grounds_follow_the_reader(server: Server, visitor: Callable[..., Visitor], scheme: str) -> None:
    fill(server.store, 6, others=False)
    page = open_page(visitor(scheme=scheme), server, "compare")
    expect(page.locator(".js-plotly-plot")).to_have_count(2)
    ground, ink = luminances(page, "[data-testid=stApp]"), luminances(page, "h1")
    assert (ground["background"] > 0.9) == (scheme == "light")
    assert (ground["background"] < 0.1) == (scheme == "dark")
    lighter, darker = sorted((ground["background"], ink["text"]), reverse=True)
    assert (lighter + 0.05) / (darker + 0.05) > 7
    axis = luminances(page, ".js-plotly-plot .ytick text", fill=True)["text"]
    lighter, darker = sorted((ground["background"], axis), reverse=True)
    assert (lighter + 0.05) / (darker + 0.05) > 3


def test_charts_have_a_name_for_those_who_cannot_see_them(server: Server, visitor: Callable[..., Visitor]) -> None:
    fill(server.store, 6, others=False)
    page = open_page(visitor(), server, "compare")
    expect(page.get_by_label("Perplexity against sparsity")).to_be_visible()
    expect(page.get_by_label("Perplexity against size on disk")).to_be_visible()


def move(server: Server, key: int, done: int) -> None:
    """The run is at block ``done``, as its worker would say."""
    transitions.beat(server.store, key, transitions.Position("compressing", done, 30, "blocks", 2, 5, 20.0))


def luminances(page: Page, selector: str, *, fill: bool = False) -> dict[str, Any]:
    """Relative luminance (WCAG 2) of an element's background and text."""
    found: dict[str, Any] = page.locator(selector).first.evaluate(
        """(element, fill) => {
            const light = colour => {
                const parts = colour.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255)
                    .map(part => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
                return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
            };
            const style = getComputedStyle(element);
            return {background: light(style.backgroundColor), text: light(fill ? style.fill : style.color)};
        }""",
        fill,
    )
    return found
