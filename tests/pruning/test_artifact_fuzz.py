"""Whatever was done to a variant's files, reading it ends soon, in little memory, and with a sentence."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pruning.test_artifact_quantized import FORMS, save

SAMPLE = (1, 2, 5, 8, 13, 14)
"""Bitmask, N:M, bitmask + int8, int4 in groups of 64, bitmask + int4, and float8."""


def fuzz(folder: Path, cases: int, seed: int) -> dict[str, int]:
    for place in SAMPLE:
        share, scheme, group, _ = FORMS[place]
        save(folder / f"variant-{place}", share, scheme, group)
    done = subprocess.run(
        [sys.executable, "-m", "tests.pruning.fuzz_artifact", str(folder), str(cases), str(seed)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    counts: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return counts


def check(counts: dict[str, int], cases: int) -> None:
    assert counts["read"] + counts["refused"] == cases
    # A file of which any byte is another is refused; a few changes make no difference to what is read.
    assert "whole_file read" not in counts
    assert counts["refused"] > 0.6 * cases
    assert counts["tensors read"] > 0


def test_altered_variants_are_refused_or_read(tmp_path: Path) -> None:
    check(fuzz(tmp_path, 300, 1), 300)


@pytest.mark.slow
def test_ten_thousand_altered_variants_are_refused_or_read(tmp_path: Path) -> None:
    check(fuzz(tmp_path, 10_000, 2), 10_000)
