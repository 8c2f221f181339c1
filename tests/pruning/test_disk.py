"""A folder appears whole or not at all, and a full disk is said to be full."""

import errno
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from safetensors import SafetensorError

from pruning import disk
from pruning.disk import MARGIN, check_free, new_folder
from pruning.errors import CancelledError, RunError

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "down"


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_appears_when_the_block_ends(parent: Path) -> None:
    with new_folder(parent / "target", 10, "a thing") as temporary:
        (temporary / "file").write_text("new")
        assert not (parent / "target").exists()
    assert _names(parent) == ["target"]
    assert (parent / "target" / "file").read_text() == "new"


def test_what_was_there_is_replaced_whole(parent: Path) -> None:
    (parent / "target").mkdir(parents=True)
    (parent / "target" / "old").touch()
    with new_folder(parent / "target", 10, "a thing") as temporary:
        (temporary / "file").touch()
    assert _names(parent) == ["target"]
    assert _names(parent / "target") == ["file"]


@pytest.mark.parametrize("error", [CancelledError(), ValueError("x"), KeyboardInterrupt()])
def test_what_goes_wrong_inside_leaves_what_was_there(parent: Path, error: BaseException) -> None:
    (parent / "target").mkdir(parents=True)
    (parent / "target" / "old").touch()

    def fill() -> None:
        with new_folder(parent / "target", 10, "a thing") as temporary:
            (temporary / "file").touch()
            raise error

    with pytest.raises(type(error)):
        fill()
    assert _names(parent) == ["target"]
    assert _names(parent / "target") == ["old"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_disk_that_fills_up_is_said_with_the_lever(parent: Path, error: Exception) -> None:
    with pytest.raises(RunError, match=r"disk is full: a thing.*PODA_HOME"), new_folder(parent / "t", 10, "a thing"):
        raise error
    assert _names(parent) == []


def test_other_trouble_of_the_disk_is_said(parent: Path) -> None:
    with (
        pytest.raises(RunError, match=r"a thing could not be written.*Read-only"),
        new_folder(parent / "t", 1, "a thing"),
    ):
        raise OSError(errno.EROFS, "Read-only file system")
    parent.parent.mkdir(exist_ok=True)
    (parent.parent / "file").touch()
    with (
        pytest.raises(RunError, match="a thing could not be written"),
        new_folder(parent.parent / "file" / "t", 1, "a thing"),
    ):
        pass


def test_other_errors_of_safetensors_are_not_taken_for_a_full_disk(parent: Path) -> None:
    with pytest.raises(SafetensorError, match="header"), new_folder(parent / "t", 10, "a thing"):
        raise SafetensorError("header too large")


def test_too_little_space_is_found_before_anything_is_written(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 5_000_000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, needed + MARGIN - 1))
    with (
        pytest.raises(RunError, match=r"21 MB are needed and 21 MB are free.*PODA_HOME"),
        new_folder(parent / "t", needed, "x"),
    ):
        pytest.fail("nothing may be written")
    assert _names(parent) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, needed + MARGIN))
    check_free(parent / "not" / "there", needed, "x")


def test_what_killed_processes_left_is_removed_and_what_live_ones_write_is_not(parent: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    alive = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (parent / f".a.{gone.pid}-0{disk.SUFFIX}").mkdir(parents=True)
    (parent / f".b.{alive.pid}-0{disk.SUFFIX}").mkdir()
    (parent / f".not-ours{disk.SUFFIX}").mkdir()
    with new_folder(parent / "target", 10, "a thing"):
        pass
    assert _names(parent) == sorted([f".b.{alive.pid}-0{disk.SUFFIX}", f".not-ours{disk.SUFFIX}", "target"])
    alive.communicate(b"\n")
