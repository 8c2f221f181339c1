"""Where calibration and evaluation text comes from: bundled articles, a text file, or a dataset by name."""

import hashlib
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pruning.errors import InputError

Part = Literal["calibration", "evaluation"]

ARTICLES = "articles"
CALIBRATION_ARTICLES = 200
DATASETS = {"wikitext2": "Salesforce/wikitext:wikitext-2-raw-v1", "c4": "allenai/c4:en"}
MAXIMUM_DATASET_CHARACTERS = 20_000_000


@dataclass(frozen=True)
class Text:
    """A text, what it is called, and the SHA-256 of its UTF-8 bytes."""

    content: str
    name: str
    sha256: str

    @classmethod
    def of(cls, content: str, name: str) -> "Text":
        """Hash ``content``. Raises InputError when there is nothing but white space."""
        if not content.strip():
            raise InputError(f"{name} has no text in it: give a text of at least a few thousand words")
        return cls(content=content, name=name, sha256=hashlib.sha256(content.encode()).hexdigest())


def load_text(source: str, part: Part) -> Text:
    """The text that ``source`` names.

    "articles" are 300 bundled news articles, of which 0 to 199 are for calibration and 200 to 299 for evaluation. A
    path is read as UTF-8. Anything else is a name for ``datasets``, ``NAME[:CONFIG[:SPLIT]]``; without a split,
    calibration reads "train" and evaluation "test", both at most ``MAXIMUM_DATASET_CHARACTERS``. Rows are joined by a
    blank line. Raises InputError when there is no such text or it is empty.
    """
    if source == ARTICLES:
        return _articles(part)
    path = Path(source).expanduser()
    if path.is_file():
        return Text.of(_decode(path), path.name)
    if _looks_like_a_path(source):
        raise InputError(f"there is no text file at {source}: check the path")
    return _from_datasets(source, part)


def text_identity(source: str) -> str | None:
    """The SHA-256 of a text file's bytes, which is what makes it another text; None for sources that are named.

    Raises InputError when ``source`` is a path at which there is no file.
    """
    if source == ARTICLES:
        return None
    path = Path(source).expanduser()
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    if _looks_like_a_path(source):
        raise InputError(f"there is no text file at {source}: check the path")
    return None


def _looks_like_a_path(source: str) -> bool:
    path = Path(source).expanduser()
    return not source.strip() or path.is_absolute() or source.startswith(".") or path.suffix != "" or path.exists()


def _decode(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _articles(part: Part) -> Text:
    spec = find_spec("gensim")
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    files = [Path(place) / "test" / "test_data" / "lee_background.cor" for place in places]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise InputError(
            "the bundled articles are not installed: run pip install --no-deps -r assets/offline-packages.txt, "
            "or name a text file of your own"
        )
    articles = [line.strip() for line in found.read_text(encoding="utf-8").splitlines()]
    chosen = articles[:CALIBRATION_ARTICLES] if part == "calibration" else articles[CALIBRATION_ARTICLES:]
    return Text.of("\n\n".join(chosen), ARTICLES)


def _from_datasets(source: str, part: Part) -> Text:
    name, _, rest = DATASETS.get(source, source).partition(":")
    config, _, split = rest.partition(":")
    split = split or ("train" if part == "calibration" else "test")
    if re.fullmatch(r"[\w.\-]+(/[\w.\-]+)?", name) is None:
        raise InputError(f"{source!r} is neither a text file here nor the name of a dataset")
    try:
        from datasets import load_dataset

        rows = load_dataset(name, config or None, split=split, streaming=True)
        pieces: list[str] = []
        characters = 0
        for row in rows:
            pieces.append(_text_of(row))
            characters += len(pieces[-1]) + 2
            if characters >= MAXIMUM_DATASET_CHARACTERS:
                break
    except InputError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{source!r} is no file here, and as a dataset its split {split!r} could not be read ({reason}): "
            f"check the name and the network, or use {ARTICLES!r} or a text file"
        ) from error
    return Text.of("\n\n".join(pieces), f"{name}:{config}:{split}" if config else f"{name}:{split}")


def _text_of(row: dict[str, object]) -> str:
    value = row.get("text")
    if isinstance(value, str):
        return value
    texts = [value for value in row.values() if isinstance(value, str)]
    if not texts:
        raise InputError(f"this dataset has no column of text (columns: {', '.join(row)}): choose another")
    return texts[0]
