"""The layer report: what was done where, as a table and as a map of the model."""

import math
from typing import Any

import pytest

from app.layer_charts import layer_map
from app.layers import fallbacks, layers_frame, layers_table, removed_words, same_share, unpruned_words


def layer(name: str, error: float | None = 0.1, share: float = 0.5, note: str | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "shape": [4, 4],
        "requested_sparsity": share,
        "sparsity": share,
        "seconds": 0.01234,
        "note": note,
        "tokens": 128 if error is not None else 0,
        "sampled": 64,
        "output_error": error,
        "outlier_ratio": 0.012345 if error is not None else None,
    }


def record(*layers: dict[str, Any]) -> dict[str, Any]:
    return {"layers": list(layers)}


@pytest.mark.parametrize(
    ("name", "block", "part"),
    [
        ("model.layers.12.self_attn.q_proj", 12, "self_attn.q_proj"),
        ("transformer.h.0.attn.c_attn", 0, "attn.c_attn"),
        ("model.layers.3.mlp.experts.gate_up_proj[17]", 3, "mlp.experts.gate_up_proj"),
        ("model.layers.3.mlp.experts.7.w1", 3, "mlp.experts.w1"),
        ("head", None, "head"),
    ],
)
def test_a_layer_has_a_place_in_its_model(name: str, block: int | None, part: str) -> None:
    (row,) = layers_frame(record(layer(name))).to_dict("records")
    assert (row["block"] if row["block"] == row["block"] else None, row["part"]) == (block, part)


def test_a_record_of_older_days_has_what_it_has() -> None:
    frame = layers_frame(record({"name": "model.layers.0.up_proj", "shape": [2, 2], "sparsity": 0.5}))
    assert frame["removed"].tolist() == [0.5]
    assert math.isnan(frame["error"][0])
    assert list(layers_table(frame)) == ["Layer", "Removed (%)"]
    assert layers_frame({}).empty
    assert layers_table(layers_frame({})).empty


def test_the_table_is_in_percent_and_without_what_nobody_measured() -> None:
    table = layers_table(
        layers_frame(record(layer("a.0.x", 0.12345), layer("a.0.y", 0.2, note="pruned by Wanda: why")))
    )
    assert table.iloc[0].to_dict() == {
        "Layer": "a.0.x",
        "Asked to remove (%)": 50.0,
        "Removed (%)": 50.0,
        "Change of its output (%)": 12.3,
        "Outliers (%)": 1.23,
        "Tokens seen": 128,
        "Time (s)": 0.0123,
        "Note": "",
    }
    blind = layers_table(layers_frame(record(layer("a.0.x", None))))
    assert list(blind) == ["Layer", "Asked to remove (%)", "Removed (%)", "Time (s)"]


def test_fallbacks_are_named_with_their_reason_and_not_one_by_one() -> None:
    noted = [layer(f"a.{block}.x", note="pruned by Wanda: why") for block in range(5)]
    said = fallbacks(layers_frame(record(layer("a.9.x"), *noted, layer("a.9.y", note="pruned by magnitude: other"))))
    assert said == [
        "5 layers pruned by Wanda: why (a.0.x, a.1.x, a.2.x and 2 more).",
        "1 layer pruned by magnitude: other (a.9.y).",
    ]
    assert fallbacks(layers_frame(record(layer("a.0.x")))) == []


def of(**compression: object) -> dict[str, Any]:
    return {"provenance": {"compression": compression}}


def test_what_went_and_what_stayed_is_said_in_words() -> None:
    assert removed_words(of(note="25.0% asked, 23.3% removed", removed=["model.layers.3", "model.layers.4"])) == (
        "25.0% asked, 23.3% removed\nmodel.layers.3, model.layers.4"
    )
    assert removed_words(of(note=None, removed=[])) is None
    assert removed_words({"provenance": {"compression": None}}) is None
    left = [
        {"name": "embed", "weights": 28_311_552, "reason": "embedding"},
        {"name": "head", "weights": 0, "reason": "tied: it is embed"},
        {"name": "router.0", "weights": 500_000, "reason": "router"},
        {"name": "router.1", "weights": 500_000, "reason": "router"},
    ]
    assert unpruned_words(of(unpruned=left)) == (
        "Left as it is: embedding (28.3 million weights); tied: it is embed (no weights of its own); "
        "router (2 tensors, 1.00 million weights)."
    )
    assert unpruned_words(of(unpruned=[])) is None
    assert unpruned_words({"provenance": {}}) is None


def test_the_map_shows_errors_by_block_and_part() -> None:
    layers = [
        layer(f"m.layers.{block}.{part}", block / 10 + place / 100)
        for block in range(3)
        for place, part in enumerate("qk")
    ]
    chart = layer_map(layers_frame(record(*layers)))
    assert chart is not None
    (heat,) = chart.figure.data
    assert list(heat.x) == [0, 1, 2]
    assert list(heat.y) == ["q", "k"]
    assert [[round(float(value), 6) for value in line] for line in heat.z] == [[0, 10, 20], [1, 11, 21]]
    assert "from 0% (m.layers.0.q) to 21.0% (m.layers.2.k)" in chart.alt
    assert "Every layer lost the same share, 50%." in chart.caption


def test_shares_have_a_map_only_where_they_differ() -> None:
    spread = [layer(f"m.{block}.q", 0.1, 0.4 + block / 10) for block in range(3)]
    chart = layer_map(layers_frame(record(*spread)))
    assert chart is not None
    _, shares = chart.figure.data
    assert [[round(float(value), 6) for value in line] for line in shares.z] == [[40, 50, 60]]
    assert same_share(layers_frame(record(*spread))) is None
    blind = layer_map(layers_frame(record(*(one | {"output_error": None} for one in spread))))
    assert blind is not None
    assert len(blind.figure.data) == 1
    assert layer_map(layers_frame(record(layer("m.0.q", None)))) is None


def test_experts_are_shown_as_their_mean() -> None:
    experts = [layer(f"m.0.up_proj[{number}]", number / 10) for number in range(3)]
    chart = layer_map(layers_frame(record(*experts, layer("m.0.q", 0.3))))
    assert chart is not None
    assert [float(line[0]) for line in chart.figure.data[0].z] == pytest.approx([10.0, 30.0])
    assert "Experts of a block are shown as their mean." in chart.caption
