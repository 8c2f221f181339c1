"""Numbers and names as the pages say them: three significant figures with units, and text that stays plain text."""

import math
import re
from html import escape

from pruning.errors import InputError

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+\-.!|~$<>&^=:])")


def figures(value: float, digits: int = 3) -> str:
    """Three significant figures, thousands separated: 27.7, 0.561, 1,890, 48,500."""
    if not math.isfinite(value):
        return "—"
    if value == 0:
        return "0"
    rounded = significant(value, digits)
    places = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{places}f}"


def significant(value: float, digits: int = 3) -> float:
    """``value`` rounded to ``digits`` significant figures."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, digits - 1 - math.floor(math.log10(abs(value))))


def size(value: float) -> str:
    """Bytes in decimal units: 539 kB, 92.3 MB, 1.40 GB."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if significant(value) >= factor:
            return f"{figures(value / factor)} {unit}"
    return f"{value:.0f} bytes"


def duration(seconds: float) -> str:
    """A wait in the coarsest words that help: "8 s", "4 min", "1 h 20 min"."""
    if seconds < 59.5:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if rest else f"{hours} h"


def percent(share: float) -> str:
    """A share as people write it: 0.5 is "50%", 0.625 is "62.5%"."""
    return f"{share * 100:g}%" if share * 100 == round(share * 100, 1) else f"{figures(share * 100)}%"


def parse_share(text: str) -> float:
    """Read "50%", "50" or "0.5" as a share.

    Raises InputError for what is no number, and for a bare number from 1 to 2, which could mean either.
    """
    written = text.strip()
    try:
        number = float(written.removesuffix("%").replace(",", "."))
    except ValueError:
        raise InputError(f"{text!r} is not a sparsity: write a percentage such as 50% or a share such as 0.5") from None
    if written.endswith("%") or number >= 2:
        return round(number / 100, 6)
    if number >= 1:
        raise InputError(f"sparsity {written} is unclear: write {written}% for a percentage, or a share below 1")
    return number


def once_for_all(seconds: float | None, variants: int | None) -> str:
    """What of a time went into work for several variants: "of which 20 s once for 12 variants"; empty for one alone."""
    if seconds is None or variants is None or variants < 2:
        return ""
    return f"of which {duration(seconds)} once for {variants:,} variants"


def counted(number: int, one: str, many: str | None = None) -> str:
    """ "1 run", "2 runs", "1,000 runs"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def escaped(text: str) -> str:
    """``text`` so that Markdown shows it letter by letter. Names people type go through here before any label."""
    return _MARKDOWN.sub(r"\\\1", text)


def plain_html(text: str) -> str:
    """``text`` for Plotly, which reads a little HTML in every label."""
    return escape(text, quote=False)


def shortened(text: str, longest: int = 40) -> str:
    """``text`` with its middle left out where it is too long for one line: both ends of a path tell it apart."""
    if len(text) <= longest:
        return text
    kept = longest - 1
    return f"{text[: kept - kept // 2]}…{text[-(kept // 2) :]}"
