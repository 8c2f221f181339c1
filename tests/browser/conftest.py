"""A real server with a home of its own, and a headless Chromium that may not leave this machine."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Request, sync_playwright

from app.runs.store import Store

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
START_SECONDS = 60
LOCAL = {"localhost", "127.0.0.1", "::1"}


@dataclass(frozen=True)
class Server:
    """A running dashboard: its address, and the store it reads."""

    url: str
    home: Path
    store: Store


@dataclass
class Visitor:
    """One browser profile with one page, and every address outside this machine that it asked for."""

    page: Page
    context: BrowserContext
    abroad: list[str]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A dashboard with an empty store."""
    monkeypatch.setenv("PODA_HOME", str(tmp_path))
    monkeypatch.delenv("PODA_DATABASE", raising=False)
    store = Store()
    with serve(tmp_path) as url:
        yield Server(url, tmp_path, store)
    store.close()


@contextmanager
def serve(home: Path) -> Iterator[str]:
    """``streamlit run app/main.py`` on a free port, over what is in ``home``; yields its address."""
    port = _free_port()
    command = [sys.executable, "-m", "streamlit", "run", "app/main.py", "--server.headless", "true"]
    environment = {name: value for name, value in os.environ.items() if name != "PODA_DATABASE"}
    with (home / "server.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--server.port", str(port)],
            cwd=ROOT,
            env=environment | {"PODA_HOME": str(home)},
            stdout=log,
            stderr=log,
        )
        try:
            _wait_until_it_answers(f"http://localhost:{port}", process)
            yield f"http://localhost:{port}"
        finally:
            process.terminate()
            process.wait(timeout=20)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests."""
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture
def visitor(browser: Browser) -> Iterator[Callable[..., Visitor]]:
    """Makes visitors, each with a profile of their own; at the end none may have asked for anything from abroad."""
    visitors: list[Visitor] = []

    def make(*, width: int = 1300, height: int = 900, scheme: str = "light") -> Visitor:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
        context.set_default_timeout(20_000)
        made = Visitor(context.new_page(), context, [])

        def note(request: Request) -> None:
            parts = urlsplit(request.url)
            if parts.scheme in ("http", "https", "ws", "wss") and parts.hostname not in LOCAL:
                made.abroad.append(request.url)

        context.on("request", note)
        visitors.append(made)
        return made

    yield make
    abroad = [url for one in visitors for url in one.abroad]
    for one in visitors:
        one.context.close()
    assert abroad == []


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        port: int = listening.getsockname()[1]
        return port


def _wait_until_it_answers(url: str, process: "subprocess.Popen[bytes]") -> None:
    for _ in range(START_SECONDS * 5):
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode} before it answered")
        try:
            with urlopen(f"{url}/_stcore/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError("the server did not answer in time")
