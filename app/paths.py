"""Where Poda keeps what it makes: PODA_HOME, or the user's data folder."""

import os
from pathlib import Path

from platformdirs import user_data_path


def home() -> Path:
    """The folder of database, artifacts, caches and locks; made when missing."""
    chosen = os.environ.get("PODA_HOME")
    folder = Path(chosen).expanduser() if chosen else user_data_path("poda", appauthor=False)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def database_url() -> str:
    """The SQLAlchemy URL of the database: PODA_DATABASE, or SQLite in :func:`home`."""
    return os.environ.get("PODA_DATABASE") or f"sqlite:///{home() / 'poda.sqlite3'}"


def artifacts() -> Path:
    """The folder in which every variant has a folder of its own."""
    return home() / "artifacts"


def model_cache() -> Path:
    """Models converted once from another format, safe to delete."""
    return home() / "cache" / "models"


def locks() -> Path:
    """Lock files, one for each device."""
    return home() / "locks"


def logs() -> Path:
    """What workers print."""
    return home() / "logs"
