"""Windows: which tokens they hold, that the seed decides, and what too short a text says."""

import re
from typing import Any

import pytest
import torch

from pruning.calibration import calibration_windows, evaluation_windows
from pruning.errors import InputError
from pruning.texts import Text


class Numbers:
    """A tokenizer whose tokens are the numbers in the text; a special one goes first unless it is told not to."""

    def __call__(self, text: str, *, add_special_tokens: bool = True, **kwargs: Any) -> dict[str, list[int]]:
        return {"input_ids": [-1] * add_special_tokens + [int(number) for number in re.findall(r"\d+", text)]}


TEXT = Text.of(" ".join(str(number) for number in range(100)), "numbers")


def test_calibration_windows_are_runs_of_the_text() -> None:
    windows = calibration_windows(Numbers(), TEXT, windows=5, length=10, seed=3)
    assert windows.ids.shape == (5, 10)
    assert windows.ids.dtype == torch.int64
    for row in windows.ids.tolist():
        assert row == list(range(row[0], row[0] + 10))
    assert windows.provenance == {
        "source": "numbers",
        "text_sha256": TEXT.sha256,
        "windows": 5,
        "length": 10,
        "seed": 3,
    }


def test_the_seed_decides_and_nothing_else() -> None:
    one = calibration_windows(Numbers(), TEXT, 8, 10, seed=0).ids
    torch.manual_seed(99)
    assert torch.equal(one, calibration_windows(Numbers(), TEXT, 8, 10, seed=0).ids)
    assert not torch.equal(one, calibration_windows(Numbers(), TEXT, 8, 10, seed=1).ids)


def test_every_offset_can_be_drawn_and_none_past_the_end() -> None:
    starts = calibration_windows(Numbers(), TEXT, 400, 98, seed=0).ids[:, 0]
    assert sorted(set(starts.tolist())) == [0, 1, 2]
    assert calibration_windows(Numbers(), TEXT, 2, 100, seed=0).ids.tolist() == [list(range(100))] * 2


def test_evaluation_windows_are_consecutive_from_the_start() -> None:
    windows = evaluation_windows(Numbers(), TEXT, windows=3, length=30)
    assert windows.ids.flatten().tolist() == list(range(90))
    assert windows.provenance["offsets"] == "consecutive"


@pytest.mark.parametrize(
    ("windows", "length", "message"),
    [
        (4, 30, "100 tokens, which is 3 windows of 30 and not 4: lower the windows to 3"),
        (1, 101, "lower the window length"),
    ],
)
def test_too_short_an_evaluation_text(windows: int, length: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        evaluation_windows(Numbers(), TEXT, windows, length)


def test_too_short_a_calibration_text() -> None:
    with pytest.raises(InputError, match="100 tokens, fewer than one calibration window of 101"):
        calibration_windows(Numbers(), TEXT, 1, 101, seed=0)
