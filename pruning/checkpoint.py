"""Finished blocks of a compression on disk, so that work that was stopped goes on where it was."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pruning.disk import check_free, disk_error, system_error
from pruning.errors import RunError

_KEY = "key"
_REPORT = "report"


class Checkpoint:
    """Blocks of one variant in ``folder``, each whole or absent, whatever moment the process was killed at.

    ``key`` says in words or digits what they were made from. What another key left there is removed, and blocks that
    cut short. Raises RunError where the disk does not take what is saved, or no longer gives it back whole.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        if self._kept_key() != key:
            self.discard()
            folder.mkdir(parents=True, exist_ok=True)
            self._write_text(folder / _KEY, key)
        for unfinished in folder.glob("*.partial"):
            unfinished.unlink(missing_ok=True)
        for block in folder.glob("block-*.safetensors"):
            if _read_report(block) is None:
                block.unlink(missing_ok=True)

    def load(self, index: int) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Tensors and report of block ``index`` as they were saved, on the CPU, or None where it is not finished."""
        path = self._block(index)
        if not path.is_file():
            return None
        report = _read_report(path)
        if report is None:
            path.unlink(missing_ok=True)
            raise RunError(f"{path} was damaged while it was in use: check the disk, and start again")
        with safe_open(path, framework="pt", device="cpu") as file:
            # Not the file's own pages: the folder goes away while the model is used.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys() if name}  # noqa: SIM118 (no dict)
        return tensors, report

    def has(self, index: int) -> bool:
        """Whether block ``index`` is finished."""
        return self._block(index).is_file()

    def finished(self, blocks: int) -> bool:
        """Whether all of so many blocks are."""
        return all(self.has(index) for index in range(blocks))

    def save(self, index: int, tensors: dict[str, Tensor], report: dict[str, Any]) -> None:
        """Keep block ``index``; ``report`` is JSON."""
        target = self._block(index)
        stored = {name: tensor.detach().to("cpu", copy=False).contiguous() for name, tensor in tensors.items()}
        what = f"block {index} of {self.folder.name}"
        check_free(self.folder, sum(tensor.nbytes for tensor in stored.values()), what)
        temporary = target.with_suffix(".partial")
        try:
            # A block may be nothing but a report, and a file of safetensors holds at least one tensor.
            save_file(stored or {"": torch.zeros(0)}, temporary, {_REPORT: json.dumps(report)})
            self._put(temporary, target)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise disk_error(system_error(error), self.folder, what) from error

    def note(self, name: str) -> Any | None:
        """What was noted under ``name``, or None."""
        try:
            return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def set_note(self, name: str, value: Any) -> None:
        """Keep ``value`` (JSON, numbers to the last digit) under ``name``."""
        self._write_text(self.folder / f"{name}.json", json.dumps(value))

    def discard(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _block(self, index: int) -> Path:
        return self.folder / f"block-{index:05d}.safetensors"

    def _kept_key(self) -> str | None:
        try:
            return (self.folder / _KEY).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None

    def _write_text(self, target: Path, text: str) -> None:
        temporary = target.with_suffix(".partial")
        try:
            temporary.write_text(text, encoding="utf-8")
            self._put(temporary, target)
        except OSError as error:
            raise disk_error(error, self.folder, target.name) from error

    @staticmethod
    def _put(temporary: Path, target: Path) -> None:
        # Renamed only when its bytes are on the disk: a machine that loses power must not leave half a block.
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(target)


def _read_report(path: Path) -> dict[str, Any] | None:
    """What was saved beside the tensors of a block; None for a file that is cut short or another's."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            report = json.loads(file.metadata()[_REPORT])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None
    return report if isinstance(report, dict) else None
