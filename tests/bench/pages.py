"""How much longer each page takes with a thousand recorded runs than empty, in Chromium against a real server.

``python -m tests.bench.pages [RUNS]``. A page is there when its script has ended and all its charts are drawn; where a
page has charts, it draws the axes of the first when empty.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from app.runs.store import Store
from tests.app.factories import fill
from tests.browser.conftest import CHROMIUM, FLAGS, serve

ALLOWED_SECONDS = 0.5
ROUNDS = 7
# The page, and how many charts it draws when empty and when full.
PAGES = {"run": ("", 1, 1), "compare": ("compare", 1, 2), "models": ("models", 0, 0)}


def main() -> None:
    """Measure and print; the exit code says whether every page stayed within the limit."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as full, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        before = seconds(browser, Path(empty), 0)
        after = seconds(browser, Path(full), runs)
        browser.close()
    print(f"median of {ROUNDS} loads, in seconds; at most {ALLOWED_SECONDS} more with {runs:,} runs")
    print(f"{'page':10}{'empty':>8}{'full':>8}{'more':>8}{'ratio':>8}")
    for page in PAGES:
        more = after[page] - before[page]
        print(f"{page:10}{before[page]:8.2f}{after[page]:8.2f}{more:8.2f}{after[page] / before[page]:8.2f}")
    sys.exit(any(after[page] - before[page] > ALLOWED_SECONDS for page in PAGES))


def seconds(browser: Browser, home: Path, runs: int) -> dict[str, float]:
    """The median time of each page over a store of ``runs`` finished runs."""
    os.environ["PODA_HOME"] = str(home)
    store = Store()
    fill(store, runs, others=False, artifacts=True)
    store.close()
    with serve(home) as url:
        found = {}
        for name, (path, *charts) in PAGES.items():
            page = browser.new_page(viewport={"width": 1300, "height": 900})
            # The first load fills the server's caches and the browser's, as it would for anybody.
            times = [load(page, f"{url}/{path}", charts[runs > 0]) for _ in range(ROUNDS + 1)]
            found[name] = statistics.median(times[1:])
            page.close()
    return found


def load(page: Page, url: str, charts: int) -> float:
    """Seconds until the page is there."""
    began = time.perf_counter()
    page.goto(url)
    page.locator("h1").wait_for()
    page.locator("[data-testid=stApp][data-test-script-state=notRunning]").wait_for()
    if charts:
        page.locator(".js-plotly-plot:has(.main-svg)").nth(charts - 1).wait_for()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
