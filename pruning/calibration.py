"""Token windows to calibrate and to evaluate on, and where they came from."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pruning.errors import InputError
from pruning.texts import Text


@dataclass(frozen=True)
class Windows:
    """Token ids (windows, length) in int64 on the CPU, with what is needed to make them again."""

    ids: Tensor
    provenance: dict[str, object] = field(default_factory=dict)


def calibration_windows(tokenizer: Any, text: Text, windows: int, length: int, seed: int) -> Windows:
    """``windows`` windows of ``length`` tokens at offsets drawn with ``seed``; they may overlap.

    Raises InputError when the text has fewer than ``length`` tokens.
    """
    ids = _tokenize(tokenizer, text)
    if ids.numel() < length:
        raise InputError(
            f"{text.name} has {ids.numel()} tokens, fewer than one calibration window of {length}: "
            "lower the window length or give a longer text"
        )
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.randint(0, ids.numel() - length + 1, (windows,), generator=generator).tolist()
    chosen = torch.stack([ids[offset : offset + length] for offset in offsets])
    return Windows(chosen, _provenance(text, windows, length) | {"seed": seed})


def evaluation_windows(tokenizer: Any, text: Text, windows: int, length: int) -> Windows:
    """The first ``windows`` consecutive windows of ``length`` tokens; the tail is dropped.

    Raises InputError when the text is too short, saying how many tokens there are.
    """
    ids = _tokenize(tokenizer, text)
    possible = ids.numel() // length
    if possible < windows:
        remedy = f"lower the windows to {possible}, or" if possible else "lower the window length, or"
        raise InputError(
            f"{text.name} has {ids.numel()} tokens, which is {possible} windows of {length} and not {windows}: "
            f"{remedy} give a longer text"
        )
    chosen = ids[: windows * length].view(windows, length).clone()
    return Windows(chosen, _provenance(text, windows, length) | {"offsets": "consecutive"})


def _tokenize(tokenizer: Any, text: Text) -> Tensor:
    ids = tokenizer(text.content, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def _provenance(text: Text, windows: int, length: int) -> dict[str, object]:
    return {"source": text.name, "text_sha256": text.sha256, "windows": windows, "length": length}
