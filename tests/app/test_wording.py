"""Numbers and names as the pages say them."""

import pytest

from app.wording import counted, duration, escaped, figures, parse_share, percent, shortened, size
from pruning.errors import InputError


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (27.7012, "27.7"),
        (0.56149, "0.561"),
        (1889.6, "1,890"),
        (48496.0, "48,500"),
        (9.996, "10.0"),
        (0.0, "0"),
        (-1.2345, "-1.23"),
        (float("nan"), "—"),
        (float("inf"), "—"),
    ],
)
def test_three_significant_figures(value: float, said: str) -> None:
    assert figures(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (91_727_104, "91.7 MB"),
        (999_999, "1.00 MB"),
        (1_400_000_000, "1.40 GB"),
        (12_300, "12.3 kB"),
        (999, "999 bytes"),
    ],
)
def test_sizes(value: float, said: str) -> None:
    assert size(value) == said


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "1 s"), (59.4, "59 s"), (59.6, "1 min"), (3600, "1 h"), (4800, "1 h 20 min")]
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize(("share", "said"), [(0.5, "50%"), (0.625, "62.5%"), (0.12345, "12.3%"), (0.0, "0%")])
def test_percentages(share: float, said: str) -> None:
    assert percent(share) == said


@pytest.mark.parametrize(
    ("text", "share"), [("50%", 0.5), ("50", 0.5), (" 0.5 ", 0.5), ("0,55", 0.55), ("1%", 0.01), ("150%", 1.5)]
)
def test_a_sparsity_is_read_as_people_write_it(text: str, share: float) -> None:
    assert parse_share(text) == share


@pytest.mark.parametrize("text", ["half", "", "1.5", "1"])
def test_an_unclear_sparsity_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="sparsity"):
        parse_share(text)


def test_counting() -> None:
    assert [counted(1, "run"), counted(2, "run"), counted(1000, "way", "ways")] == ["1 run", "2 runs", "1,000 ways"]


def test_markdown_is_escaped_letter_by_letter() -> None:
    assert escaped("a_b*[x](y) :red[z] $1$ <b>") == r"a\_b\*\[x\]\(y\) \:red\[z\] \$1\$ \<b\>"


def test_long_names_keep_both_ends() -> None:
    assert shortened("/home/somebody/models/tiny-llama", 15) == "/home/s…y-llama"
    assert shortened("short", 15) == "short"
