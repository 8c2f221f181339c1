"""Where Poda keeps what it makes: PODA_HOME, or the user's data folder."""

import os
from pathlib import Path

from platformdirs import user_data_path

from pruning.errors import InputError


def home() -> Path:
    """The folder of database, artifacts, caches and locks; made when missing.

    Raises InputError when it cannot be made or written to.
    """
    chosen = os.environ.get("PODA_HOME")
    folder = Path(chosen).expanduser().absolute() if chosen else user_data_path("poda", appauthor=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
        cause = "it may not be written to"
    except OSError as error:
        writable = False
        cause = error.strerror or str(error)
    if not writable:
        raise InputError(
            f"Poda cannot keep its files in {folder}: {cause}. Set PODA_HOME to a folder that can be written to."
        )
    return folder


def database_url() -> str:
    """The SQLAlchemy URL of the database: PODA_DATABASE, or SQLite in :func:`home`."""
    return os.environ.get("PODA_DATABASE") or f"sqlite:///{home() / 'poda.sqlite3'}"


def artifacts() -> Path:
    """The folder in which every variant has a folder of its own."""
    return home() / "artifacts"


def checkpoints() -> Path:
    """Blocks of variants that are not finished yet, a folder each."""
    return home() / "checkpoints"


def model_cache() -> Path:
    """Models converted once from another format, safe to delete."""
    return home() / "cache" / "models"


def locks() -> Path:
    """Lock files, one for each device; made when missing."""
    folder = home() / "locks"
    folder.mkdir(exist_ok=True)
    return folder


def logs() -> Path:
    """What workers print; made when missing."""
    folder = home() / "logs"
    folder.mkdir(exist_ok=True)
    return folder
