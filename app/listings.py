"""Results as tables: in the order of the recipes, units in the headers, three significant figures."""

import math
from dataclasses import dataclass

import pandas as pd

from app.marks import SPREAD, dense_of
from app.palette import method_rank
from app.wording import once_for_all, significant
from pruning.allocation import ALLOCATIONS
from pruning.quantize import SCHEMES

SOURCE_LABEL = "the file you started from"
_BYTES, _SECONDS = 1e6, 1e-3


@dataclass(frozen=True)
class Column:
    """One column of the table: where it comes from, its header with the unit, and that unit in SI."""

    source: str
    header: str
    unit: float = 1.0


COLUMNS = (
    Column("sparsity", "Removed or zero in pruned layers (%)", 0.01),
    Column("perplexity", "Perplexity"),
    Column("perplexity_low", "Perplexity, 95% from"),
    Column("perplexity_high", "Perplexity, 95% to"),
    Column("bits_per_byte", "Bits per byte of text"),
    Column("size_on_disk", "On disk (MB)", _BYTES),
    Column("size_ratio", "On disk (× dense in 16 bits)"),
    Column("size_of_pruned_layers", "Pruned layers (MB)", _BYTES),
    Column("pruned_layers_ratio", "Pruned layers (× dense in 16 bits)"),
    Column("bits_per_weight", "Bits per weight"),
    Column("resident_size", "In memory (MB)", _BYTES),
    Column("peak_memory", "Peak memory (MB)", _BYTES),
    Column("prefill_time_p50", "Prefill, median (ms)", _SECONDS),
    Column("prefill_time_p95", "Prefill, 95% under (ms)", _SECONDS),
    Column("time_to_first_token_p50", "To first token, median (ms)", _SECONDS),
    Column("time_to_first_token_p95", "To first token, 95% under (ms)", _SECONDS),
    Column("time_per_output_token_p50", "Per output token, median (ms)", _SECONDS),
    Column("time_per_output_token_p95", "Per output token, 95% under (ms)", _SECONDS),
    Column("tokens_per_second", "Tokens per second"),
    Column("compression_time", "To compress (s)"),
    Column("common_seconds", "To compress, once for all made together (s)"),
    Column("compression_peak_memory", "Peak memory to compress (MB)", _BYTES),
)
FIGURE_HEADERS = tuple(column.header for column in COLUMNS)
UNITS = {
    "sparsity": "fraction",
    "sparsity_asked": "fraction",
    "bits_per_byte": "bits/byte",
    "bits_per_weight": "bits",
    "prefill_time": "s",
    "time_to_first_token": "s",
    "time_per_output_token": "s",
    "compression_time": "s",
    "common_seconds": "s",
    "tokens_per_second": "tokens/s",
    **dict.fromkeys(
        (
            "size_on_disk",
            "size_of_pruned_layers",
            "resident_size",
            "peak_memory",
            "compression_peak_memory",
            "compression_peak_host_memory",
            "peak_host_memory",
            "dense16_bytes",
            "dense16_pruned_layer_bytes",
            "source_bytes",
        ),
        "bytes",
    ),
}


def in_recipe_order(results: pd.DataFrame) -> pd.DataFrame:
    """Dense first, then method by method, quantization by quantization, uniform first, by rising sparsity."""
    ranked = results.assign(
        _rank=results["method"].map(method_rank),
        _scheme=results["quantize"].map({name: place for place, name in enumerate(SCHEMES, start=1)}).fillna(0),
        _spread=results["allocation"].map({name: place for place, name in enumerate(ALLOCATIONS)}),
        _patterned=results["pattern"] != "",
    )
    keys = ["_rank", "_scheme", "quantize_group", "_spread", "sparsity_asked", "_patterned", "pattern", "statistics"]
    return ranked.sort_values(keys, kind="stable").drop(columns=["_rank", "_scheme", "_spread", "_patterned"])


def distinct_labels(results: pd.DataFrame) -> list[str]:
    """The recipes, with the start of the run's id where two are the same."""
    twice = results["label"].duplicated(keep=False)
    return [
        f"{label} #{run_id[:4]}" if again else label
        for label, run_id, again in zip(results["label"], results["run_id"], twice, strict=True)
    ]


def results_table(results: pd.DataFrame) -> pd.DataFrame:
    """Every figure of every run, one row a run, and the source file as the first row; for people to read."""
    ordered = in_recipe_order(results)
    table = pd.concat([_named(ordered), _figures(ordered), _described(ordered)], axis="columns")
    source = _source_row(ordered)
    if source is None:
        return table
    return pd.DataFrame([source, *table.to_dict("records")], columns=table.columns)


def fold_equal(table: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, str]]:
    """The columns in which rows differ, and the described ones in which all are the same, by header.

    Figures stay even where equal: that nothing changed is a finding. Columns without any value are dropped.
    """
    empty = [name for name in table if table[name].replace("", None).isna().all()]
    shown = table.drop(columns=empty)
    kept = {"Variant", "Run", "Measured", *FIGURE_HEADERS}
    same = {
        str(name): str(shown[name].dropna().iloc[0])
        for name in shown
        if name not in kept and len(table) > 1 and shown[name].dropna().nunique() == 1 and "" not in set(shown[name])
    }
    return shown.drop(columns=list(same)), same


def results_csv(results: pd.DataFrame) -> str:
    """The same rows in full precision and SI units, for a spreadsheet or a script."""
    ordered = in_recipe_order(results).drop(columns=["key"])
    return ordered.rename(columns={name: _with_unit(name) for name in map(str, ordered)}).to_csv(index=False)


def variants_table(results: pd.DataFrame, stored: dict[str, int]) -> pd.DataFrame:
    """The variants whose files are kept and their sizes; ``stored`` is bytes on disk by run id."""
    kept = results[results["run_id"].isin(list(stored))]
    return pd.DataFrame(
        {
            "Variant": distinct_labels(kept),
            "Model": kept["model"].to_list(),
            "On disk (MB)": [significant(stored[run_id] / _BYTES) for run_id in kept["run_id"]],
            "× dense in 16 bits": [
                significant(stored[run_id] / dense16) if dense16 else None
                for run_id, dense16 in zip(kept["run_id"], kept["dense16_bytes"], strict=True)
            ],
            "Made": kept["finished_at"].to_list(),
            "Run": kept["run_id"].to_list(),
        }
    )


def _named(ordered: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "Variant": distinct_labels(ordered),
            "Collapsed": ["collapsed" if collapsed else "" for collapsed in ordered["collapsed"]],
            "Sparsity asked (%)": [significant(100 * share) for share in ordered["sparsity_asked"]],
        }
    )


def _described(ordered: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "Spread over layers": [ALLOCATIONS[name].title if name in SPREAD else "" for name in ordered["allocation"]],
            "Statistics": [
                _statistics_words(*row)
                for row in zip(ordered["statistics"], ordered["common_seconds"], ordered["made_together"], strict=True)
            ],
            "Weights": ordered["dtype"].to_list(),
            "Calibration": ordered["calibration"].to_list(),
            "Evaluation": ordered["evaluation"].to_list(),
            "Device": ordered["device"].to_list(),
            "Runtime": ordered["runtime"].to_list(),
            "Measured": ordered["finished_at"].to_list(),
            "Out of date": ordered["stale"].to_list(),
            "Run": ordered["run_id"].to_list(),
        }
    )


def _figures(ordered: pd.DataFrame) -> pd.DataFrame:
    derived = ordered.assign(
        size_ratio=_ratio(ordered, "size_on_disk", "dense16_bytes"),
        pruned_layers_ratio=_ratio(ordered, "size_of_pruned_layers", "dense16_pruned_layer_bytes"),
    )
    return pd.DataFrame(
        {
            column.header: [significant(value / column.unit) for value in derived[column.source].astype(float)]
            for column in COLUMNS
            if column.source in derived and derived[column.source].notna().any()
        }
    )


def _statistics_words(statistics: str, common: float | None, together: float | None) -> str:
    """Empty for those of the model as it is pruned; for the dense model's, what of the time to compress was shared."""
    if statistics != "shared":
        return ""
    known = pd.notna(common) and pd.notna(together)
    shared = once_for_all(common, int(together)) if known and together is not None else ""
    return f"of the dense model; time to compress: {shared}" if shared else "of the dense model"


def _ratio(frame: pd.DataFrame, part: str, whole: str) -> "pd.Series[float] | None":
    return frame[part] / frame[whole].astype(float).replace(0, math.nan) if part in frame else None


def _source_row(ordered: pd.DataFrame) -> dict[str, object] | None:
    """The file as it came: its bytes, and the quality of dense, because its weights are the same."""
    dense = dense_of(ordered)
    if dense.empty or pd.isna(dense["source_bytes"].iloc[0]):
        return None
    row = dense.iloc[0]
    of_dense = {name: row.get(name) for name in ("perplexity", "perplexity_low", "perplexity_high", "bits_per_byte")}
    own = {
        "size_on_disk": row["source_bytes"],
        "size_ratio": row["source_bytes"] / row["dense16_bytes"] if row["dense16_bytes"] else None,
        "bits_per_weight": 8 * row["source_bytes"] / row["parameters"] if row["parameters"] else None,
    }
    values = {name: value for name, value in (of_dense | own).items() if pd.notna(value)}
    return {
        "Variant": f"{row['source_name']} ({SOURCE_LABEL})",
        "Collapsed": "",
        **{c.header: significant(values[c.source] / c.unit) for c in COLUMNS if c.source in values},
    }


def _with_unit(name: str) -> str:
    figure = name.removesuffix("_low").removesuffix("_high").removesuffix("_p50").removesuffix("_p95")
    return f"{name} ({UNITS[figure]})" if figure in UNITS else name
