"""Reads altered variants, one after the other, in a process with little memory: python -m tests.pruning.fuzz_artifact.

Arguments are a folder with whole variants, how many cases, and a seed. Every case must be refused with one of Poda's
own errors, or read; within :data:`SECONDS` and :data:`MEMORY`. Prints the counts as JSON, and exits with 1 and the case
at the first that is neither.
"""

import json
import random
import resource
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import logging as transformers_logging

from pruning.artifact import read_header, rebuild, stored_sizes
from pruning.errors import InputError, RunError

SECONDS = 20
MEMORY = 2 << 30
"""Bytes that may be taken beside what the libraries take."""

FILE = "variant.safetensors"

Draw = random.Random
Json = Any

NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    8,
    127,
    255,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    -(2**63),
)
OTHERS: tuple[Json, ...] = (
    None,
    True,
    False,
    0.5,
    1e308,
    "",
    "x",
    "../../etc/passwd",
    "\x00",
    "é" * 300,
    "a" * 100_000,
    [],
    {},
    [[]],
    [2**40, 2**40],
    {"": {}},
    float("nan"),
    float("inf"),
)


def places(entry: Json, path: tuple[Json, ...] = ()) -> list[tuple[Json, ...]]:
    """The path of everything in a JSON value."""
    found = [path] if path else []
    inside = entry.items() if isinstance(entry, dict) else enumerate(entry) if isinstance(entry, list) else ()
    for key, value in inside:
        found += places(value, (*path, key))
    return found


def change_json(entry: Json, draw: Draw) -> None:
    """Change some entries of a JSON object: other numbers, other types, one gone, one more, two exchanged."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        known = places(entry)
        if not known:
            return
        path = draw.choice(known)
        parent = entry
        for key in path[:-1]:
            parent = parent[key]
        last, value = path[-1], parent[path[-1]]
        kind = draw.randrange(6)
        if kind == 0 and isinstance(value, int):
            parent[last] = value + draw.choice((-1, 1, 2, value, 8, -8, 2**31))
        elif kind == 1:
            del parent[last]
        elif kind == 2 and isinstance(parent, dict):
            parent[f"{last}{draw.choice(('', '.x', '.codes', '.scale', '.mask'))}"] = parent.pop(last)
        elif kind == 3:
            other = draw.choice(known)
            try:
                found = entry
                for key in other:
                    found = found[key]
                parent[last] = json.loads(json.dumps(found))
            except (KeyError, IndexError, TypeError):
                parent[last] = None
        elif kind == 4:
            parent[last] = draw.choice(OTHERS)
        else:
            parent[last] = draw.choice(NUMBERS)


def change_bytes(data: bytes, draw: Draw) -> bytes:
    """Change, cut, repeat or add bytes."""
    changed = bytearray(data)
    kind = draw.randrange(5)
    if kind == 0:
        return bytes(changed[: draw.randrange(len(changed) + 1)])
    if kind == 1:
        return bytes(changed + draw.randbytes(draw.choice((1, 7, 8, 4096))))
    if kind == 2:
        begin = draw.randrange(len(changed))
        return bytes(changed[:begin] + changed[begin + draw.choice((1, 8, 64)) :])
    for _ in range(draw.choice((1, 1, 2, 8, 64))):
        if changed:
            changed[draw.randrange(len(changed))] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
    return bytes(changed)


def parts(data: bytes) -> tuple[dict[str, Json], bytes]:
    """The JSON of a safetensors file, and its tensors."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(entries: Json, body: bytes, right: bool) -> bytes:
    """A safetensors file of both; with ``right`` its digest is what it should be."""
    if right and isinstance(entries, dict) and isinstance(entries.get("__metadata__"), dict):
        entries["__metadata__"]["sha256"] = "0" * 64
    header = json.dumps(entries, separators=(",", ":")).encode()
    whole = len(header).to_bytes(8, "little") + header + body
    if right and whole.count(b"0" * 64) >= 1:
        whole = whole.replace(b"0" * 64, sha256(whole).hexdigest().encode(), 1)
    return whole


def own_header(folder: Path, draw: Draw) -> None:
    """What Poda says of the variant."""
    entries, body = parts((folder / FILE).read_bytes())
    own = json.loads(entries["__metadata__"]["poda"])
    change_json(own, draw)
    entries["__metadata__"]["poda"] = json.dumps(own)
    (folder / FILE).write_bytes(joined(entries, body, right=True))


def tensor_list(folder: Path, draw: Draw) -> None:
    """What the file says of its tensors."""
    entries, body = parts((folder / FILE).read_bytes())
    change_json(entries, draw)
    (folder / FILE).write_bytes(joined(entries, body, right=True))


def whole_file(folder: Path, draw: Draw) -> None:
    """Any bytes, and the digest left as it was."""
    (folder / FILE).write_bytes(change_bytes((folder / FILE).read_bytes(), draw))


def tensors(folder: Path, draw: Draw) -> None:
    """The numbers, with a digest that is right."""
    entries, body = parts((folder / FILE).read_bytes())
    changed = bytearray(body)
    for _ in range(draw.choice((1, 8, 256))):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    (folder / FILE).write_bytes(joined(entries, bytes(changed), right=True))


def crafted(folder: Path, draw: Draw) -> None:
    """A header that claims far more than the file holds, in ways that fit together."""
    entries, body = parts((folder / FILE).read_bytes())
    own = json.loads(entries["__metadata__"]["poda"])
    huge = draw.choice((2**20, 2**31, 2**40, 2**62))
    name = draw.choice(list(own["masked"])) if own["masked"] and draw.random() < 0.7 else None
    if name is None:
        layer = draw.choice(list(own["layers"]))
        own["layers"][layer]["shape"] = draw.choice(([huge, 1], [1, huge], [huge, huge]))
        for part in (f"{layer}.weight", f"{layer}.codes"):
            if part in entries:
                entries[part]["shape"] = own["layers"][layer]["shape"]
    else:
        own["masked"][name]["shape"] = draw.choice(([huge, 1], [huge], [huge, 4]))
        own["masked"][name]["kept"] = draw.choice((0, 1, huge, huge // 2, own["masked"][name]["kept"]))
        layer = name.rpartition(".")[0]
        if layer in own["layers"] and len(own["masked"][name]["shape"]) == 2:
            own["layers"][layer]["shape"] = own["masked"][name]["shape"]
    entries["__metadata__"]["poda"] = json.dumps(own)
    (folder / FILE).write_bytes(joined(entries, body, right=True))


def other_file(folder: Path, draw: Draw) -> None:
    """The configuration or the tokenizer, with digests that are right."""
    path = folder / draw.choice(("config.json", "config.json", "generation_config.json"))
    entries = json.loads(path.read_text())
    change_json(entries, draw)
    path.write_text(json.dumps(entries))
    entries, body = parts((folder / FILE).read_bytes())
    own = json.loads(entries["__metadata__"]["poda"])
    own["files"][path.name] = sha256(path.read_bytes()).hexdigest()
    entries["__metadata__"]["poda"] = json.dumps(own)
    (folder / FILE).write_bytes(joined(entries, body, right=True))


CHANGES: tuple[Callable[[Path, Draw], None], ...] = (
    own_header,
    own_header,
    own_header,
    tensor_list,
    tensor_list,
    whole_file,
    tensors,
    crafted,
    crafted,
    other_file,
)


def read(folder: Path) -> str:
    """What came of reading a variant in every way there is."""
    outcomes = []
    for way in (read_header, stored_sizes, rebuild):
        try:
            way(folder)
            outcomes.append("read")
        except (InputError, RunError) as error:
            words = str(error)
            assert words.strip(), "an error without words"
            assert "does not fit in memory" not in words, "memory was asked for that the files do not fill"
            outcomes.append("refused")
    return outcomes[-1]


def too_long(number: int, frame: FrameType | None) -> None:
    """A case that takes too long."""
    raise TimeoutError(f"more than {SECONDS} s")


def main(folder: Path, cases: int, seed: int) -> int:
    """Go through the cases; 1 at the first that is neither read nor refused."""
    transformers_logging.set_verbosity_error()
    variants = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    for variant in variants:
        assert read(variant) == "read", "the variants that are altered are whole"
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    signal.signal(signal.SIGALRM, too_long)
    counts: Counter[str] = Counter()
    work = folder / "altered"
    for case in range(cases):
        draw = random.Random(f"{seed} {case}")
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(draw.choice(variants), work)
        change = draw.choice(CHANGES)
        change(work, draw)
        signal.alarm(SECONDS)
        try:
            outcome = read(work)
        except BaseException:
            sys.stdout.write(f"case {case} of seed {seed}, {change.__name__}:\n{traceback.format_exc()}")
            return 1
        signal.alarm(0)
        counts[outcome] += 1
        counts[f"{change.__name__} {outcome}"] += 1
    sys.stdout.write(f"{json.dumps(counts)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
