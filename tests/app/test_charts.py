"""What the charts draw of a table of results."""

import math
from typing import Any

import pandas as pd
import pytest

from app.charts import TIMINGS, latency_bars, no_points_yet, perplexity_against_sparsity, quality_against_size
from app.palette import GREY, OKABE_ITO
from pruning.methods import METHODS
from tests.app.frames import frame, pruned, row


def trace(chart: Any, name: str) -> Any:
    (found,) = [one for one in chart.figure.data if one.name == name]
    return found


def test_an_empty_table_draws_nothing() -> None:
    assert perplexity_against_sparsity(frame()) is None
    assert quality_against_size(frame()) is None
    assert latency_bars(frame()) is None


def test_before_the_first_point_the_axes_are_those_of_the_first_chart() -> None:
    axes, chart = no_points_yet(), perplexity_against_sparsity(frame(row()))
    assert chart is not None
    assert not axes.figure.data
    assert axes.title == chart.title
    for name in ("xaxis", "yaxis"):
        assert axes.figure.layout[name].title.text == chart.figure.layout[name].title.text


def test_a_method_is_one_line_by_rising_sparsity_with_its_interval() -> None:
    chart = perplexity_against_sparsity(frame(pruned("wanda", 0.5, 60.0), row(), pruned("wanda", 0.3, 40.0)))
    assert chart is not None
    line = trace(chart, "Wanda")
    assert list(line.x) == [30.0, 50.0]
    assert list(line.y) == [40.0, 60.0]
    assert line.mode == "markers+lines"
    assert list(line.error_y.array) == pytest.approx([4.0, 6.0])
    assert list(line.error_y.arrayminus) == pytest.approx([4.0, 6.0])


def test_dense_is_grey_and_has_a_line_across() -> None:
    chart = perplexity_against_sparsity(frame(row(), pruned("wanda", 0.5, 60.0)))
    assert chart is not None
    assert trace(chart, "Dense").marker.color == GREY
    assert [(shape.y0, shape.line.color) for shape in chart.figure.layout.shapes] == [(28.0, GREY)]


def test_no_line_across_without_dense() -> None:
    chart = perplexity_against_sparsity(frame(pruned("wanda", 0.5, 60.0)))
    assert chart is not None
    assert not chart.figure.layout.shapes


@pytest.mark.parametrize(("largest", "scale"), [(90.0, "linear"), (400.0, "log")])
def test_the_axis_is_logarithmic_only_when_the_range_is_wide(largest: float, scale: str) -> None:
    chart = perplexity_against_sparsity(frame(row(), pruned("wanda", 0.5, largest)))
    assert chart is not None
    assert chart.figure.layout.yaxis.type == scale


@pytest.mark.parametrize("draw", [perplexity_against_sparsity, quality_against_size])
@pytest.mark.parametrize("other", [32.0, 3000.0])
@pytest.mark.parametrize("value", [None, 9e9])
def test_a_collapsed_model_is_drawn_and_labelled_at_the_edge(draw: Any, other: float, value: float | None) -> None:
    gone = pruned("magnitude", 0.9, value, collapsed=True)
    chart = draw(frame(row(), pruned("wanda", 0.5, other), gone))
    mark = trace(chart, "Magnitude: collapsed")
    assert list(mark.text) == ["collapsed"]
    axis = chart.figure.layout.yaxis
    low, high = axis.range
    place = math.log10(mark.y[0]) if axis.type == "log" else mark.y[0]
    top = math.log10(other * 1.1) if axis.type == "log" else other * 1.1
    assert top < place < high
    assert (place - low) / (high - low) > 0.9
    assert "Collapsed: magnitude 90%." in chart.alt


def test_only_collapsed_models_still_make_a_chart() -> None:
    chart = perplexity_against_sparsity(frame(pruned("magnitude", 0.9, None)))
    assert chart is not None
    assert [one.name for one in chart.figure.data] == ["Magnitude: collapsed"]
    assert chart.figure.data[0].showlegend is True


def test_a_pattern_is_a_labelled_mark_off_the_line() -> None:
    chart = perplexity_against_sparsity(
        frame(pruned("wanda", 0.4, 50.0), pruned("wanda", 0.5, 60.0), pruned("wanda", 0.5, 90.0, pattern="2:4"))
    )
    assert chart is not None
    line, marks = chart.figure.data
    assert list(line.y) == [50.0, 60.0]
    assert (marks.mode, list(marks.y), marks.text[0].strip()) == ("markers+text", [90.0], "2:4")
    assert marks.showlegend is False


def test_every_method_has_a_line_of_its_own_look() -> None:
    chart = perplexity_against_sparsity(frame(*(pruned(method, 0.5, 60.0) for method in METHODS)))
    assert chart is not None
    assert {one.marker.color for one in chart.figure.data} <= set(OKABE_ITO)
    assert len({(one.marker.color, one.line.dash) for one in chart.figure.data}) == len(METHODS)
    assert len({(one.marker.color, one.marker.symbol) for one in chart.figure.data}) == len(METHODS)


def test_a_legend_of_many_lines_takes_no_room_from_the_chart() -> None:
    """Two names a line, of eighteen letters and a mark each, as in a narrow window; two lines have room anyway."""
    few, many = frame(row()), frame(*(pruned(method, 0.5, 60.0) for method in METHODS), row())
    heights = [perplexity_against_sparsity(shown).figure.layout.height for shown in (few, many)]  # type: ignore[union-attr]
    assert heights[0] == 400
    assert heights[1] >= 400 + 22 * (len(METHODS) // 3 - 2)


def test_an_allocation_is_a_line_of_its_own_named_at_its_end() -> None:
    chart = perplexity_against_sparsity(
        frame(
            pruned("wanda", 0.5, 60.0),
            pruned("wanda", 0.5, 58.0, allocation="owl"),
            pruned("wanda", 0.6, 99.0, allocation="owl"),
        )
    )
    assert chart is not None
    assert list(trace(chart, "Wanda").x) == [50.0]
    owl = trace(chart, "Wanda (OWL)")
    assert list(owl.x) == [50.0, 60.0]
    assert [text.strip() for text in owl.text] == ["", "OWL"]
    assert "spread over the layers by OWL" in owl.customdata[0]


def test_statistics_are_on_one_line_unless_a_sparsity_was_made_from_both() -> None:
    mixed = [pruned("wanda", 0.5, 60.0, statistics="shared"), pruned("wanda", 0.6, 99.0)]
    chart = perplexity_against_sparsity(frame(*mixed))
    assert chart is not None
    assert [one.name for one in chart.figure.data] == ["Wanda"]
    assert "shared with other variants" in chart.figure.data[0].customdata[0]
    chart = perplexity_against_sparsity(frame(*mixed, pruned("wanda", 0.6, 97.0, statistics="shared")))
    assert chart is not None
    assert {one.name: list(one.x) for one in chart.figure.data} == {
        "Wanda (shared)": [50.0, 60.0],
        "Wanda (sequential)": [60.0],
    }


@pytest.mark.parametrize(
    ("changes", "symbol"),
    [({}, "circle"), ({"dtype": "float32"}, "circle-open"), ({"quantize": "int8", "dtype": "float32"}, "square")],
)
def test_the_marker_says_how_weights_are_stored(changes: dict[str, str], symbol: str) -> None:
    chart = perplexity_against_sparsity(frame(pruned("wanda", 0.5, 60.0, **changes)))
    assert chart is not None
    assert list(chart.figure.data[0].marker.symbol) == [symbol]


def test_int8_is_a_line_of_its_own() -> None:
    chart = perplexity_against_sparsity(
        frame(pruned("wanda", 0.5, 60.0), pruned("wanda", 0.5, 61.0, quantize="int8"), row("int8", quantize="int8"))
    )
    assert chart is not None
    assert [one.name for one in chart.figure.data] == ["int8", "Wanda", "Wanda + int8"]


def test_schemes_and_groups_are_lines_of_their_own_in_the_order_of_the_registry() -> None:
    chart = perplexity_against_sparsity(
        frame(
            pruned("wanda", 0.5, 64.0, quantize="int4", quantize_group=32.0),
            pruned("wanda", 0.5, 66.0, quantize="gptq-int4", quantize_group=64.0),
            pruned("wanda", 0.5, 65.0, quantize="int4", quantize_group=64.0),
            pruned("wanda", 0.5, 61.0, quantize="int8", quantize_group=math.nan),
            pruned("wanda", 0.5, 62.0, quantize="forgotten", quantize_group=math.nan),
        )
    )
    assert chart is not None
    names = [one.name for one in chart.figure.data]
    assert names == ["Wanda", "Wanda + int8", "Wanda + int4", "Wanda + int4 g32", "Wanda + GPTQ int4"]
    assert len({one.marker.symbol[0] for one in chart.figure.data}) == 4


def test_weights_that_rounding_made_zero_were_not_removed() -> None:
    chart = perplexity_against_sparsity(
        frame(
            row("int4", quantize="int4", sparsity=0.13),
            pruned("wanda", 0.5, 66.0, quantize="int4", sparsity=0.57),
            pruned("wanda", 0.5, 60.0, sparsity=0.501),
        )
    )
    assert chart is not None
    assert {one.name: list(one.x) for one in chart.figure.data} == {
        "int4": [0.0],
        "Wanda": [pytest.approx(50.1)],
        "Wanda + int4": [50.0],
    }


def test_times_of_what_no_kernel_ran_say_so() -> None:
    rows = [
        pruned("wanda", 0.5, 60.0, label="Wanda 50% + int4", quantize="int4", runtime="dequantized int4 to float32"),
        row("int8", quantize="int8", runtime="poda int8 (avx2) up to 16 tokens, dequantized to float32 above"),
    ]
    timed = [one | {"time_per_output_token_p50": 0.02, "time_per_output_token_p95": 0.03} for one in rows]
    chart = latency_bars(pd.DataFrame(timed).assign(key=[1, 2], run_id=["a" * 12, "b" * 12]))
    assert chart is not None
    assert chart.caption.endswith(
        "the whisker the 95th percentile; 8 bits are hatched and 4 bits are cross-hatched. Dequantized at every step, "
        "as there is no kernel for it here: Wanda 50% + int4. The time is not what an engine for few bits would give."
    )


def test_two_calibrations_are_two_lines_that_say_which() -> None:
    chart = perplexity_against_sparsity(
        frame(
            pruned("wanda", 0.5, 60.0, calibration="articles, 8 × 256 tokens"),
            pruned("wanda", 0.5, 58.0, calibration="articles, 32 × 512 tokens"),
        )
    )
    assert chart is not None
    assert {one.name for one in chart.figure.data} == {
        "Wanda (articles, 8 × 256 tokens)",
        "Wanda (articles, 32 × 512 tokens)",
    }


def test_names_cannot_carry_markup_into_the_chart() -> None:
    name = "<a href='http://x'>y</a>"
    chart = perplexity_against_sparsity(
        frame(
            pruned("wanda", 0.5, 60.0, label=name, calibration=f"{name}, 8 × 256 tokens"),
            pruned("wanda", 0.5, 60.0, calibration="b"),
        )
    )
    assert chart is not None
    drawn = [*(one.name for one in chart.figure.data), *(text for one in chart.figure.data for text in one.customdata)]
    assert not [text for text in drawn if "<a" in text]


def test_size_is_in_megabytes_beside_the_dense_size_in_16_bits() -> None:
    chart = quality_against_size(frame(row(), pruned("wanda", 0.5, 60.0)))
    assert chart is not None
    assert list(trace(chart, "Wanda").x) == [170.0]
    assert [shape.x0 for shape in chart.figure.layout.shapes] == [269.0]
    assert "0.632× dense in 16 bits" in trace(chart, "Wanda").customdata[0]
    assert trace(chart, "Wanda").text[0].strip() == "50%"


def test_the_source_file_has_its_own_bytes_and_the_perplexity_of_dense() -> None:
    chart = quality_against_size(frame(row(), pruned("wanda", 0.5, 60.0)))
    assert chart is not None
    mark = trace(chart, "the file you started from")
    assert (list(mark.x), list(mark.y)) == ([91.7], [28.0])


def test_the_source_file_is_left_out_while_dense_is_not_measured() -> None:
    chart = quality_against_size(frame(pruned("wanda", 0.5, 60.0)))
    assert chart is not None
    assert [one.name for one in chart.figure.data] == ["Wanda"]


def test_latency_bars_show_median_and_95th_percentile_in_recipe_order() -> None:
    fast = {"time_per_output_token_p50": 0.010, "time_per_output_token_p95": 0.015}
    chart = latency_bars(frame(pruned("sparsegpt", 0.5, 60.0, **fast), pruned("magnitude", 0.5, 60.0), row()))
    assert chart is not None
    (bars,) = chart.figure.data
    assert list(bars.x) == [25.0, 25.0, 10.0]
    assert list(bars.error_x.array) == pytest.approx([7.5, 7.5, 5.0])
    assert list(chart.figure.layout.yaxis.ticktext) == ["Dense, 25.0", "magnitude 50%, 25.0", "sparsegpt 50%, 10.0"]
    assert "no ranking" in chart.title


def test_latency_bars_of_int8_are_hatched_and_equal_names_are_told_apart() -> None:
    twins = ({"run_id": "aaaaaaaaaaaa"}, {"run_id": "bbbbbbbbbbbb", "quantize": "int8"})
    chart = latency_bars(frame(*(pruned("wanda", 0.5, 60.0, **twin) for twin in twins)))
    assert chart is not None
    assert list(chart.figure.data[0].marker.pattern.shape) == ["", "/"]
    assert len(set(chart.figure.layout.yaxis.ticktext)) == 2


def test_a_latency_nobody_measured_draws_nothing() -> None:
    assert latency_bars(frame(row()), TIMINGS[1]) is None


@pytest.mark.parametrize("draw", [perplexity_against_sparsity, quality_against_size, latency_bars])
def test_every_chart_says_its_question_its_direction_and_its_alternative(draw: Any) -> None:
    chart = draw(frame(row(), pruned("wanda", 0.5, 60.0)))
    layout = chart.figure.layout
    assert chart.title
    assert chart.caption
    assert chart.alt
    assert any("better" in (axis.title.text or "") for axis in (layout.xaxis, layout.yaxis))
    assert layout.paper_bgcolor == layout.plot_bgcolor == "rgba(0,0,0,0)"
