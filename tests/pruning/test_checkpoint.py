"""Blocks on disk: whole or absent, to the bit, and nothing of what was made from something else."""

from pathlib import Path

import pytest
import torch

from pruning.checkpoint import Checkpoint
from pruning.errors import RunError
from pruning.packing import same_bits


def tensors() -> dict[str, torch.Tensor]:
    special = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-45])
    return {
        "a/weight": special,
        "b/weight": special.to(torch.bfloat16),
        "b/codes": torch.tensor([[-127, 0, 127]], dtype=torch.int8),
        "c/weight": torch.arange(6.0).view(2, 3).T,
    }


def test_a_block_comes_back_bit_for_bit_with_its_report(tmp_path: Path) -> None:
    report = {"layers": [{"name": "a", "seconds": 0.1 + 0.2, "note": "é", "error": None}], "seconds": 1 / 3}
    Checkpoint(tmp_path / "run", "k").save(3, tensors(), report)
    loaded = Checkpoint(tmp_path / "run", "k").load(3)
    assert loaded is not None
    assert loaded[1] == report
    assert loaded[0].keys() == tensors().keys()
    assert all(same_bits(loaded[0][name], tensor.contiguous()) for name, tensor in tensors().items())


def test_a_block_may_be_a_report_alone(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, "k")
    checkpoint.save(0, {}, {"seconds": 1.0})
    loaded = checkpoint.load(0)
    assert loaded is not None
    assert loaded == ({}, {"seconds": 1.0})


def test_what_is_finished(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, "k")
    assert not checkpoint.finished(2)
    assert checkpoint.load(0) is None
    checkpoint.save(1, tensors(), {})
    assert [checkpoint.has(index) for index in range(3)] == [False, True, False]
    assert not checkpoint.finished(2)
    checkpoint.save(0, tensors(), {})
    assert checkpoint.finished(2)
    assert not checkpoint.finished(3)


def test_another_key_starts_from_nothing(tmp_path: Path) -> None:
    first = Checkpoint(tmp_path, "one")
    first.save(0, tensors(), {})
    first.set_note("shares", {"a": 0.1})
    assert Checkpoint(tmp_path, "one").has(0)
    other = Checkpoint(tmp_path, "two")
    assert not other.has(0)
    assert other.note("shares") is None
    assert not Checkpoint(tmp_path, "one").has(0)


def test_a_folder_without_a_key_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "block-00000.safetensors").write_bytes(b"of unknown origin")
    assert not Checkpoint(tmp_path, "k").has(0)


@pytest.mark.parametrize("keep", [0, 5, 200])
def test_a_block_cut_short_is_absent(tmp_path: Path, keep: int) -> None:
    checkpoint = Checkpoint(tmp_path, "k")
    checkpoint.save(0, tensors(), {})
    path = tmp_path / "block-00000.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(RunError, match="damaged while it was in use"):
        checkpoint.load(0)
    assert not checkpoint.has(0)
    path.write_bytes(b"x" * keep)
    assert not Checkpoint(tmp_path, "k").has(0)


def test_what_a_killed_process_was_writing_goes_away(tmp_path: Path) -> None:
    Checkpoint(tmp_path, "k")
    (tmp_path / "block-00000.partial").write_bytes(b"half")
    assert not Checkpoint(tmp_path, "k").has(0)
    assert not list(tmp_path.glob("*.partial"))


def test_notes_keep_every_digit(tmp_path: Path) -> None:
    shares = {"a": 1 / 3, "b": 0.1 + 0.2}
    Checkpoint(tmp_path, "k").set_note("shares", shares)
    checkpoint = Checkpoint(tmp_path, "k")
    assert checkpoint.note("shares") == shares
    assert checkpoint.note("other") is None
    (tmp_path / "shares.json").write_text("{", encoding="utf-8")
    assert checkpoint.note("shares") is None


def test_discarding_leaves_nothing(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "run", "k")
    checkpoint.save(0, tensors(), {})
    checkpoint.discard()
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_said_and_leaves_no_half_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(tmp_path, "k")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pruning.checkpoint.save_file", full)
    with pytest.raises(RunError, match=r"the disk is full: block 2 of .* Free some space"):
        checkpoint.save(2, tensors(), {})
    assert not checkpoint.has(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key"]
