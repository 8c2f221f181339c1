"""Results as tables for people and for spreadsheets, and which may be compared."""

import csv
import io
from dataclasses import replace

import pandas as pd
import pytest

from app.listings import fold_equal, in_recipe_order, results_csv, results_table, variants_table
from app.protocols import left_out, not_faster, out_of_date, protocols, way_titles
from pruning.methods import METHODS
from tests.app.frames import frame, pruned, row


def test_rows_follow_the_recipes() -> None:
    mixed = frame(
        pruned("sparsegpt", 0.3, 40.0),
        pruned("wanda", 0.5, 60.0, quantize="int8"),
        pruned("wanda", 0.5, 90.0, pattern="2:4"),
        pruned("wanda", 0.5, 60.0),
        row(),
    )
    ordered = in_recipe_order(mixed)
    assert list(zip(ordered["method"], ordered["pattern"], ordered["quantize"], strict=True)) == [
        ("none", "", "none"),
        ("wanda", "", "none"),
        ("wanda", "2:4", "none"),
        ("wanda", "", "int8"),
        ("sparsegpt", "", "none"),
    ]


def test_uniform_comes_first_and_an_allocation_is_named() -> None:
    table = results_table(
        frame(pruned("wanda", 0.3, 40.0, allocation="owl"), pruned("wanda", 0.5, 60.0), pruned("wanda", 0.4, 50.0))
    )
    assert list(table["Spread over layers"]) == ["", "", "OWL"]
    assert list(table["Sparsity asked (%)"]) == [40.0, 50.0, 30.0]


def test_a_time_in_which_more_than_one_variant_was_made_says_so() -> None:
    shared = pruned("wanda", 0.5, 60.0, statistics="shared", made_together=12, common_seconds=20.04)
    alone = pruned("wanda", 0.6, 90.0, statistics="shared", made_together=1, common_seconds=20.0)
    old = pruned("wanda", 0.7, 99.0, statistics="shared", made_together=float("nan"), common_seconds=float("nan"))
    table = results_table(frame(row(), shared, alone, old))
    said = "of the dense model; time to compress: of which 20 s once for 12 variants"
    assert list(table["Statistics"])[1:] == ["", said, "of the dense model", "of the dense model"]
    assert list(table["To compress, once for all made together (s)"])[2] == 20.0
    (written,) = csv.DictReader(io.StringIO(results_csv(frame(shared))))
    assert (written["common_seconds (s)"], written["made_together"], written["statistics"]) == ("20.04", "12", "shared")


def test_figures_have_units_in_the_header_and_three_significant_figures() -> None:
    table = results_table(frame(row(), pruned("wanda", 0.5, 61.6789, size_of_pruned_layers=119_250_000)))
    wanda = table[table["Variant"] == "wanda 50%"].iloc[0]
    assert wanda["Perplexity"] == 61.7
    assert wanda["On disk (MB)"] == 170.0
    assert wanda["On disk (× dense in 16 bits)"] == 0.632
    assert wanda["Pruned layers (× dense in 16 bits)"] == 0.562
    assert wanda["Per output token, median (ms)"] == 25.0
    assert wanda["Removed or zero in pruned layers (%)"] == 50.0


def test_the_source_file_is_the_first_row() -> None:
    first = results_table(frame(pruned("wanda", 0.5, 60.0), row())).iloc[0]
    assert first["Variant"] == "SmolLM2-135M-Instruct-Q4_1.gguf (the file you started from)"
    assert first["On disk (MB)"] == 91.7
    assert first["On disk (× dense in 16 bits)"] == 0.341
    assert first["Bits per weight"] == 5.45
    assert first["Perplexity"] == 28.0


def test_no_source_row_without_dense_and_none_at_all_when_empty() -> None:
    assert list(results_table(frame(pruned("wanda", 0.5, 60.0)))["Variant"]) == ["wanda 50%"]
    assert results_table(frame()).empty


def test_a_collapsed_variant_says_so() -> None:
    table = results_table(frame(pruned("magnitude", 0.9, None)))
    assert list(table["Collapsed"]) == ["collapsed"]


def test_csv_has_full_precision_and_units() -> None:
    (written,) = csv.DictReader(io.StringIO(results_csv(frame(pruned("wanda", 0.5, 61.6789)))))
    assert float(written["perplexity"]) == 61.6789
    assert float(written["size_on_disk (bytes)"]) == 170e6
    assert float(written["time_per_output_token_p95 (s)"]) == 0.0325


def test_stored_variants_with_their_sizes() -> None:
    results = frame(row(run_id="aaaaaaaaaaaa"), pruned("wanda", 0.5, 60.0, run_id="bbbbbbbbbbbb"))
    table = variants_table(results, {"bbbbbbbbbbbb": 171_234_567})
    assert table[["Variant", "On disk (MB)", "× dense in 16 bits"]].to_dict("records") == [
        {"Variant": "wanda 50%", "On disk (MB)": 171.0, "× dense in 16 bits": 0.637}
    ]


def test_the_protocol_measured_with_last_comes_first() -> None:
    later = pd.Timestamp("2026-02-01", tz="UTC")
    found = protocols(frame(row(), row(protocol="q", dtype="float32", finished_at=later)))
    assert [(one.key, one.runs) for one in found] == [("q", 1), ("p" * 12, 1)]


def test_what_is_left_out_names_the_difference() -> None:
    chosen, *others = protocols(
        frame(
            row(finished_at=pd.Timestamp("2026-03-01", tz="UTC")),
            row(protocol="q", dtype="float32"),
            row(protocol="r", model="another"),
        )
    )
    note = left_out(chosen, others)
    assert note is not None
    assert note.startswith("1 more run of this model was measured differently")
    assert "weights in float32" in note
    assert left_out(chosen, []) is None


def test_a_difference_that_no_column_shows_is_still_named() -> None:
    chosen, other = protocols(frame(row(finished_at=pd.Timestamp("2026-03-01", tz="UTC")), row(protocol="q")))
    assert "library versions" in (left_out(chosen, [other]) or "")


def test_protocols_of_the_same_title_are_told_apart() -> None:
    later = pd.Timestamp("2026-03-01", tz="UTC")
    twins = protocols(frame(row(finished_at=later), row(protocol="q"), row(protocol="r", finished_at=later)))
    titles = way_titles(twins)
    assert len(titles) == 3
    assert sorted(way.key for way in titles.values()) == sorted(way.key for way in twins)
    alone = protocols(frame(row()))
    assert list(way_titles(alone)) == [alone[0].title]


def test_variants_that_run_as_the_dense_one_are_said_to_be_no_faster() -> None:
    said = not_faster(frame(row(), pruned("wanda", 0.5, 60.0), pruned("wanda", 0.5, 60.0, runtime="aten int8")))
    assert said is not None
    assert said.startswith("1 pruned variant here runs with the same kernels")
    assert not_faster(frame(row(), pruned("wanda", 0.5, 60.0, runtime="aten int8"))) is None


def test_a_smaller_model_is_not_said_to_be_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "narrow", replace(METHODS["wanda"], name="narrow", kind="width"))
    assert not_faster(frame(row(), pruned("narrow", 0.25, 60.0))) is None
    said = not_faster(frame(row(), pruned("narrow", 0.25, 60.0), pruned("wanda", 0.5, 60.0)))
    assert said is not None
    assert said.startswith("1 pruned variant here")


def test_what_is_out_of_date_says_why() -> None:
    said = out_of_date(frame(row(), pruned("wanda", 0.5, 60.0, stale="made with torch 2.12.0, now 2.13.0")))
    assert said is not None
    assert said.startswith("1 variant of these: made with torch 2.12.0, now 2.13.0.")
    assert out_of_date(frame(row())) is None


def test_equal_columns_are_folded_and_figures_never_are() -> None:
    table, same = fold_equal(results_table(frame(pruned("wanda", 0.5, 60.0), pruned("magnitude", 0.5, 60.0))))
    assert same["Weights"] == "bfloat16"
    assert "Weights" not in table
    assert "Perplexity" in table
    assert "Out of date" not in table
