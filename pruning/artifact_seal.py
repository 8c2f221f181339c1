"""Whether a variant is what was written, to the last byte: digests that it carries of its own files."""

import hashlib
import re
from pathlib import Path

from pruning.artifact_header import Layout
from pruning.errors import InputError
from pruning.sources import VARIANT

SEAL_KEY = "sha256"
BLANK = "0" * 64
"""What stands in the place of the digest while it is computed."""

SEALED_SINCE = 3

_PLACE = re.compile(rb'"sha256":"([0-9a-f]{64})"')
_METADATA = b'"__metadata__":{'
_CHUNK = 1 << 20


def seal(path: Path) -> None:
    """Write the digest of the safetensors file ``path`` in the place of :data:`BLANK`, under :data:`SEAL_KEY`.

    The entry becomes the first of the metadata: the library writes them in an order that differs from run to run, and
    one variant is always the same bytes.
    """
    with path.open("rb+") as file:
        start = file.read(8)
        header = file.read(int.from_bytes(start, "little"))
        entry = _PLACE.search(header)
        first = header.index(_METADATA) + len(_METADATA)
        if entry is not None and entry.start() > first:
            before = header[first : entry.start()].removesuffix(b",")
            file.seek(len(start) + first)
            file.write(entry.group() + b"," + before)
    place, _, digest = _digests(path)
    with path.open("rb+") as file:
        file.seek(place)
        file.write(digest.encode())


def file_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in ``folder`` itself by its name."""
    return {file.name: _digest(file) for file in sorted(folder.iterdir()) if file.is_file()}


def check_seal(folder: Path, layout: Layout) -> None:
    """Read every byte of the variant in ``folder``, of version 3 and later, and compare digests.

    Raises InputError for a file that is missing or not what it was.
    """
    if layout.version < SEALED_SINCE:
        return
    path = folder / VARIANT
    try:
        for name, digest in layout.files.items():
            if not (folder / name).is_file():
                raise InputError(f"{folder / name} is missing: make the variant again")
            if _digest(folder / name) != digest:
                raise _altered(folder / name)
        _, found, digest = _digests(path)
    except OSError as error:
        raise InputError(f"{folder} cannot be read ({error.strerror}): make the variant again") from error
    if found != digest:
        raise _altered(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digests(path: Path) -> tuple[int, str, str]:
    """Where the digest of the file stands in it, the one that stands there, and the one that should."""
    with path.open("rb") as file:
        start = file.read(8)
        header = file.read(int.from_bytes(start, "little"))
        places = list(_PLACE.finditer(header))
        if len(places) != 1:
            raise InputError(f"{path} is damaged (it has {len(places)} digests, not one): make the variant again")
        first, last = places[0].span(1)
        digest = hashlib.sha256(start + header[:first] + BLANK.encode() + header[last:])
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return len(start) + first, header[first:last].decode(), digest.hexdigest()


def _altered(path: Path) -> InputError:
    return InputError(f"{path} was altered after it was written: make the variant again")
