"""Writes a folder whole or not at all, and refuses to begin what the disk cannot hold."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from pruning.errors import RunError

SUFFIX = ".partial"
MARGIN = 16_000_000
"""Bytes to leave free: configuration, tokenizer and the database need room too."""

LEVER = "Free some space, remove variants no longer needed (on the Models page), or move PODA_HOME to a larger disk"


def check_free(folder: Path, needed: int, what: str, lever: str = LEVER) -> None:
    """Raise RunError unless the disk of ``folder`` has room for ``needed`` bytes of ``what``."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed + MARGIN:
        raise RunError(
            f"the disk is too full for {what}: {_megabytes(needed + MARGIN)} are needed and {_megabytes(free)} are "
            f"free at {existing}. {lever}"
        )


@contextmanager
def new_folder(target: Path, needed: int, what: str) -> Iterator[Path]:
    """A folder to fill, which becomes ``target`` when the block ends well and goes away when it does not.

    ``needed`` bytes of ``what`` must be free. What was at ``target`` is replaced. Raises RunError for a full disk,
    before or while writing. Folders left behind by processes that were killed are removed.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        check_free(target.parent, needed, what)
        temporary = target.parent / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        temporary.mkdir()
    except OSError as error:
        raise disk_error(error, target, what) from error
    try:
        yield temporary
        _put(temporary, target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) or _is_full(error):
            raise disk_error(system_error(error), target, what) from error
        raise


def _put(temporary: Path, target: Path) -> None:
    if target.exists():
        old = target.parent / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        target.rename(old)
        temporary.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(target)


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f".*{SUFFIX}"):
        owner = folder.name.removesuffix(SUFFIX).rpartition(".")[2].partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def system_error(error: BaseException) -> OSError:
    """What ``error`` says of the system; safetensors passes the system's message on as text alone."""
    if isinstance(error, OSError):
        return error
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if _is_full(error) else OSError(str(error))


def _is_full(error: BaseException) -> bool:
    return type(error).__name__ == "SafetensorError" and "os error 28" in str(error).lower()


def disk_error(error: OSError, target: Path, what: str, lever: str = LEVER) -> RunError:
    """What to tell a person when ``what`` could not be written to ``target``."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunError(f"the disk is full: {what} could not be written to {target}. {lever}")
    reason = error.strerror or str(error)
    return RunError(f"{what} could not be written to {target} ({reason}). Check the folder. {lever}")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
