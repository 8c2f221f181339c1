"""The list of models that people added."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.runs.library import add_model, added_models, forget_model
from app.runs.store import Store


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("PODA_HOME", str(tmp_path))
    monkeypatch.delenv("PODA_DATABASE", raising=False)
    opened = Store()
    yield opened
    opened.close()


def test_models_are_kept_in_the_order_they_were_added(store: Store) -> None:
    assert added_models(store) == []
    assert add_model(store, "owner/b")
    assert add_model(store, "owner/a")
    assert added_models(store) == ["owner/b", "owner/a"]
    assert added_models(Store()) == ["owner/b", "owner/a"]


def test_the_same_model_is_added_once(store: Store) -> None:
    assert add_model(store, "owner/a")
    assert not add_model(store, "owner/a")
    assert added_models(store) == ["owner/a"]


def test_a_model_is_taken_off_and_pages_notice_both(store: Store) -> None:
    versions = [store.version()]
    for change in (add_model, forget_model):
        change(store, "owner/a")
        versions.append(store.version())
    assert added_models(store) == []
    assert versions == sorted(set(versions))
