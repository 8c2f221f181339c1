"""Every test of the app has a home and a database of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.runs.store import Store


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PODA_HOME, empty."""
    folder = tmp_path / "home"
    monkeypatch.setenv("PODA_HOME", str(folder))
    monkeypatch.delenv("PODA_DATABASE", raising=False)
    return folder


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    """The store in :func:`home`."""
    opened = Store()
    yield opened
    opened.close()
