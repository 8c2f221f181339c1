"""The table that pages compare runs in: one row a run, its figures beside it, and whether it is still current."""

import json
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import pandas as pd
from sqlalchemy import Connection, func, select

from app.runs import tables

BOUNDS = ("low", "high", "p50", "p95")


def results_frame(connection: Connection, home: str) -> pd.DataFrame:
    """One row for each run id: its latest finished attempt, newest first.

    ``stale`` is empty, or says in words why the figures are not what this machine (``home``) would give today.
    """
    runs, results = tables.runs, tables.results
    latest = (
        select(func.max(runs.c.key).label("key"))
        .join(results, results.c.run_key == runs.c.key)
        .where(runs.c.state == "done")
        .group_by(runs.c.run_id)
        .subquery()
    )
    columns = [
        runs.c.key,
        runs.c.run_id,
        runs.c.label,
        runs.c.finished_at,
        runs.c.collapsed,
        runs.c.artifact.is_not(None).label("has_artifact"),
        runs.c.home,
        runs.c.device.label("asked_device"),
        *(column for column in results.c if column.name != "run_key"),
    ]
    query = select(*columns).join(latest, latest.c.key == runs.c.key).join(results, results.c.run_key == runs.c.key)
    cursor = connection.execute(query.order_by(runs.c.key.desc()))
    frame = pd.DataFrame([tuple(row) for row in cursor], columns=list(cursor.keys()))
    frame["finished_at"] = pd.to_datetime(frame["finished_at"].astype(float), unit="s", utc=True)
    for name in ("collapsed", "has_artifact"):
        frame[name] = frame[name].astype(bool)
    frame["stale"] = _staleness(frame, home)
    frame = frame.drop(columns=["home", "asked_device", "versions"])
    return frame.join(_figure_columns(connection, frame["key"]))


def _figure_columns(connection: Connection, keys: "pd.Series[int]") -> pd.DataFrame:
    """NAME and, where they exist, NAME_low, _high, _p50, _p95, in the order of ``keys``."""
    figures = tables.figures
    numbers = (figures.c.value, *(figures.c[bound] for bound in BOUNDS))
    found = connection.execute(select(figures.c.run_key, figures.c.name, *numbers)).all()
    if not found or keys.empty:
        return pd.DataFrame(index=keys.index)
    run_keys, names, *columns = zip(*found, strict=True)
    order = np.argsort(keys.to_numpy())
    ordered = keys.to_numpy()[order]
    place = np.searchsorted(ordered, run_keys).clip(max=len(ordered) - 1)
    shown = ordered[place] == run_keys
    values = [np.array(column, dtype=float) for column in columns]  # NULL becomes NaN
    codes, unique = pd.factorize(np.array(names, dtype=object), sort=True)
    made: dict[str, np.ndarray] = {}
    for code, name in enumerate(unique):
        chosen = shown & (codes == code)
        for suffix, column in zip(("", *(f"_{bound}" for bound in BOUNDS)), values, strict=True):
            if not suffix or not np.isnan(column[chosen]).all():
                made[name + suffix] = np.full(len(ordered), np.nan)
                made[name + suffix][order[place[chosen]]] = column[chosen]
    return pd.DataFrame(made, index=keys.index)


def _staleness(frame: pd.DataFrame, home: str) -> list[str]:
    by_versions = {text: _changed_versions(text) for text in frame["versions"].unique()}
    here = frame[frame["home"] == home]
    # Rows come newest first: the first of each asked device is what that device is today.
    today = dict(here.drop_duplicates("asked_device")[["asked_device", "device"]].itertuples(index=False, name=None))
    reasons = []
    for versions, where, asked, device in zip(
        frame["versions"], frame["home"], frame["asked_device"], frame["device"], strict=True
    ):
        now = today.get(asked, device) if where == home else device
        changed = [by_versions[versions]] if by_versions[versions] else []
        if now != device:
            changed.append(f"measured on {device}, the device here is now {now}")
        reasons.append("; ".join(changed))
    return reasons


def _changed_versions(recorded: str) -> str:
    """``"made with torch 2.12.0, now 2.13.0"``, or empty."""
    changed = []
    for package, then in json.loads(recorded).items():
        try:
            now = version(package)
        except PackageNotFoundError:
            continue
        if now.partition("+")[0] != str(then).partition("+")[0]:
            changed.append(f"{package} {then}, now {now}")
    return "made with " + ", ".join(changed) if changed else ""
