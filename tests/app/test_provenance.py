"""How one run was measured, as lines."""

from app.provenance import provenance_table


def test_nested_values_become_lines_and_missing_ones_are_left_out() -> None:
    record = {
        "run": "abc",
        "attempt": 2,
        "recipe": "Wanda 50%",
        "started_at": "2026-01-01T00:00:00+00:00",
        "finished_at": None,
        "spec": {"model": "bundled", "recipe": {"prune": "left out"}, "calibration": {"windows": 8, "text_hash": None}},
        "provenance": {
            "device_name": "CPU",
            "versions": {"torch": "2.13.0"},
            "notes": ["a", "b"],
            "empty": [],
            "unpruned": [{"name": "head", "weights": 8}],
        },
    }
    lines = list(provenance_table(record).itertuples(index=False, name=None))
    assert lines == [
        ("run", "abc, attempt 2"),
        ("recipe", "Wanda 50%"),
        ("started", "2026-01-01T00:00:00+00:00"),
        ("asked, model", "bundled"),
        ("asked, calibration, windows", "8"),
        ("device name", "CPU"),
        ("versions, torch", "2.13.0"),
        ("notes", "a, b"),
        ("unpruned", "head (8)"),
    ]
