"""Which results may be drawn together, and in what the others differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import pandas as pd

from app.palette import UNPRUNED
from app.wording import counted
from pruning.methods import METHODS


@dataclass(frozen=True)
class Protocol:
    """Runs whose figures may be compared: same model, evaluation text and windows, dtype, device and libraries."""

    key: str
    model: str
    evaluation: str
    dtype: str
    device: str
    runs: int
    latest: datetime

    @property
    def title(self) -> str:
        """How it was measured, in one line."""
        return f"{self.evaluation}, {self.dtype} on {self.device}"


def protocols(results: pd.DataFrame) -> list[Protocol]:
    """Every protocol among ``results``, the one measured with last first."""
    found = []
    for key, rows in results.groupby("protocol", sort=False):
        row = rows.iloc[0]
        found.append(
            Protocol(
                key=str(key),
                model=row["model"],
                evaluation=row["evaluation"],
                dtype=row["dtype"],
                device=row["device"],
                runs=len(rows),
                latest=rows["finished_at"].max(),
            )
        )
    return sorted(found, key=lambda protocol: protocol.latest, reverse=True)


def latest_protocol(results: pd.DataFrame) -> Protocol | None:
    """The protocol measured with last; None while nothing is measured."""
    return next(iter(protocols(results)), None)


def way_titles(ways: Sequence[Protocol]) -> dict[str, Protocol]:
    """Protocols of one model by a title that no other has, in the same order."""
    named: dict[str, Protocol] = {}
    for way in ways:
        title = way.title
        if [other.title for other in ways].count(title) > 1:
            title = f"{title}, last on {way.latest:%d %b %Y %H:%M}"
        named[title if title not in named else f"{title}, {way.key[:4]}"] = way
    return named


def difference(chosen: Protocol, other: Protocol) -> str:
    """In what ``other`` was measured differently, in words."""
    named = (("evaluation", "evaluation"), ("dtype", "weights in"), ("device", "device"))
    parts = [f"{said} {getattr(other, name)}" for name, said in named if getattr(other, name) != getattr(chosen, name)]
    return ", ".join(parts) or "another text of the same name, or other library versions"


def left_out(chosen: Protocol, others: Sequence[Protocol]) -> str | None:
    """What is not drawn beside ``chosen`` and why; None when nothing is left out."""
    apart = [other for other in others if other.key != chosen.key and other.model == chosen.model]
    if not apart:
        return None
    number = sum(other.runs for other in apart)
    reasons = "; ".join(f"{counted(other.runs, 'run')} with {difference(chosen, other)}" for other in apart[:3])
    more = f"; and {counted(len(apart) - 3, 'more way', 'more ways')} of measuring" if len(apart) > 3 else ""
    return (
        f"{counted(number, 'more run')} of this model {'was' if number == 1 else 'were'} measured differently, "
        f"so not drawn beside these: {reasons}{more}."
    )


def not_faster(results: pd.DataFrame) -> str | None:
    """Which variants run the same kernels as the dense model, so that zeros cannot make them faster here.

    Variants of which whole parts were removed have no such zeros: they are smaller models.
    """
    dense = results[(results["method"] == UNPRUNED) & (results["quantize"] == "none")]
    zeros = results["method"].isin([name for name, method in METHODS.items() if method.kind == "weights"])
    same = results["runtime"].isin(set(dense["runtime"])) & (results["sparsity_asked"] > 0) & zeros
    if not same.any():
        return None
    runtime = results.loc[same, "runtime"].iloc[0]
    return (
        f"{counted(int(same.sum()), 'pruned variant')} here "
        f"{'runs' if same.sum() == 1 else 'run'} with the same kernels as the dense model ({runtime}), "
        "which multiply by zeros as by any other number: smaller on disk, not faster on this machine."
    )


def out_of_date(results: pd.DataFrame) -> str | None:
    """Which figures this machine would not give today, and why; None when all are current."""
    stale = results[results["stale"] != ""]
    if stale.empty:
        return None
    reasons = "; ".join(dict.fromkeys(stale["stale"]))
    return f"{counted(len(stale), 'variant')} of these: {reasons}. Run them again to measure them as things are now."
