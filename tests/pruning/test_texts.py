"""Texts: the bundled articles, files, and what is said when there is none."""

import hashlib
from pathlib import Path
from typing import Any

import datasets
import pytest

from pruning.errors import InputError
from pruning.texts import load_text, text_identity


def test_articles_are_split_between_calibration_and_evaluation() -> None:
    calibration = load_text("articles", "calibration")
    evaluation = load_text("articles", "evaluation")
    assert len(calibration.content.split("\n\n")) == 200
    assert len(evaluation.content.split("\n\n")) == 100
    assert calibration.content.startswith("Hundreds of people have been forced to vacate their homes")
    assert not set(calibration.content.split("\n\n")) & set(evaluation.content.split("\n\n"))
    assert calibration.sha256 == hashlib.sha256(calibration.content.encode()).hexdigest()
    assert all(article == article.strip() for article in evaluation.content.split("\n\n"))


def test_articles_are_read_without_importing_their_package() -> None:
    import sys

    load_text("articles", "calibration")
    assert "gensim" not in sys.modules


def test_missing_articles_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pruning.texts.find_spec", lambda name: None)
    with pytest.raises(InputError, match="offline-packages"):
        load_text("articles", "calibration")


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_bytes("Olá,\r\nmundo".encode())
    text = load_text(str(file), "evaluation")
    assert (text.content, text.name) == ("Olá,\r\nmundo", "mine.txt")
    assert text.sha256 == text_identity(str(file)) == hashlib.sha256("Olá,\r\nmundo".encode()).hexdigest()


def test_named_sources_have_no_identity_of_their_own() -> None:
    assert text_identity("articles") is None
    assert text_identity("wikitext2") is None


@pytest.mark.parametrize("source", ["/no/such/file.txt", "missing.txt", "./missing", ""])
def test_a_missing_file_is_named(source: str) -> None:
    with pytest.raises(InputError, match="no text file"):
        load_text(source, "calibration")
    with pytest.raises(InputError, match="no text file"):
        text_identity(source)


@pytest.mark.parametrize(("content", "message"), [(b"", "no text"), (b" \n\t", "no text"), (b"caf\xe9", "UTF-8")])
def test_files_without_text_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "bad.txt"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_text(str(file), "calibration")


@pytest.mark.parametrize(
    ("source", "part", "asked", "name"),
    [
        ("wikitext2", "calibration", ("Salesforce/wikitext", "wikitext-2-raw-v1", "train"), None),
        ("wikitext2", "evaluation", ("Salesforce/wikitext", "wikitext-2-raw-v1", "test"), None),
        ("me/mine", "evaluation", ("me/mine", None, "test"), "me/mine:test"),
        ("me/mine:big:validation", "calibration", ("me/mine", "big", "validation"), "me/mine:big:validation"),
    ],
)
def test_a_dataset_is_asked_for_by_name(
    monkeypatch: pytest.MonkeyPatch, source: str, part: Any, asked: tuple[str | None, ...], name: str | None
) -> None:
    calls = []

    def load_dataset(path: str, config: str | None, *, split: str, streaming: bool) -> list[dict[str, object]]:
        calls.append((path, config, split))
        return [{"id": 1, "text": "one"}, {"id": 2, "text": "two"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    text = load_text(source, part)
    assert calls == [asked]
    assert text.content == "one\n\ntwo"
    assert name is None or text.name == name


def test_a_large_dataset_is_read_only_as_far_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pruning.texts.MAXIMUM_DATASET_CHARACTERS", 10)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: iter([{"story": "abcd"}] * 9))
    assert load_text("me/mine", "calibration").content == "abcd\n\nabcd"


def test_a_dataset_out_of_reach_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*args: object, **kwargs: object) -> None:
        raise ConnectionError("Couldn't reach the hub\nlong trace")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError, match=r"Couldn't reach the hub\).*articles"):
        load_text("me/mine", "calibration")


def test_a_dataset_without_text_lists_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: [{"id": 1, "label": 0}])
    with pytest.raises(InputError, match="id, label"):
        load_text("me/mine", "calibration")
