"""Results as the store hands them to pages, without a store: one row from what a test cares about."""

from typing import Any

import pandas as pd

DENSE16 = 269e6
DENSE16_PRUNED = 212e6


def row(label: str = "Dense", **changes: Any) -> dict[str, Any]:
    """One result; ``changes`` replace columns."""
    values: dict[str, Any] = {
        "key": 1,
        "run_id": "0" * 12,
        "label": label,
        "model": "SmolLM2-135M-Instruct",
        "method": "none",
        "sparsity_asked": 0.0,
        "pattern": "",
        "allocation": "uniform",
        "statistics": "sequential",
        "made_together": None,
        "common_seconds": None,
        "quantize": "none",
        "quantize_group": None,
        "dtype": "bfloat16",
        "device": "cpu",
        "evaluation": "articles, 16 × 512 tokens",
        "calibration": "",
        "protocol": "p" * 12,
        "machine": "here",
        "finished_at": pd.Timestamp("2026-01-01", tz="UTC"),
        "collapsed": False,
        "has_artifact": True,
        "runtime": "torch eager",
        "stale": "",
        "dense16_bytes": DENSE16,
        "dense16_pruned_layer_bytes": DENSE16_PRUNED,
        "source_bytes": 91.7e6,
        "source_name": "SmolLM2-135M-Instruct-Q4_1.gguf",
        "parameters": 134_515_008,
        "perplexity": 28.0,
        "perplexity_low": 27.0,
        "perplexity_high": 29.5,
        "bits_per_byte": 1.1,
        "sparsity": changes.get("sparsity_asked", 0.0),
        "size_on_disk": 269e6,
        "size_of_pruned_layers": 212e6,
        "bits_per_weight": 16.0,
        "time_per_output_token": 0.025,
        "time_per_output_token_p50": 0.025,
        "time_per_output_token_p95": 0.0325,
    }
    return values | changes


def pruned(method: str, share: float, perplexity: float | None, **changes: Any) -> dict[str, Any]:
    """One pruned result, its interval a tenth wide on either side."""
    value = float("nan") if perplexity is None else perplexity
    quality = {"perplexity": value, "perplexity_low": 0.9 * value, "perplexity_high": 1.1 * value}
    made = {"method": method, "sparsity_asked": share, "collapsed": perplexity is None, "size_on_disk": 170e6}
    return row(**({"label": f"{method} {share:.0%}"} | made | quality | changes))


def frame(*rows: dict[str, Any]) -> pd.DataFrame:
    """Rows with keys and run ids of their own."""
    numbered = [
        one | {"key": place, "run_id": one["run_id"] if one["run_id"] != "0" * 12 else f"{place:012x}"}
        for place, one in enumerate(rows, start=1)
    ]
    return pd.DataFrame(numbered, columns=list(row()))
