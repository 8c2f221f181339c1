"""What the form asks for, as a sweep."""

from pathlib import Path
from typing import Any

import pytest

from app.asking import UNSTRUCTURED, ask_for, request_for
from app.runs.library import added_models
from app.runs.store import Store
from app.runs.sweep import SweepRequest
from pruning.errors import InputError


def ask(**changes: Any) -> SweepRequest:
    chosen = {"methods": ["wanda"], "shares": ["50%"], "patterns": [UNSTRUCTURED], "stored": ["none"]}
    return request_for(**(chosen | changes))


def labels(request: SweepRequest) -> list[str]:
    return [str(spec.recipe) for spec in request.specs()]


def test_every_combination_is_asked_for_dense_first() -> None:
    request = ask(methods=["magnitude", "wanda"], shares=["30%", "0.8"], patterns=[UNSTRUCTURED, "2:4"])
    assert labels(request) == [
        "Dense",
        *(f"{method} {share}" for method in ("Magnitude", "Wanda") for share in ("30%", "80%", "2:4")),
    ]


def test_a_pattern_alone_needs_no_share_and_ignores_one_left_over() -> None:
    assert labels(ask(patterns=["2:4"], shares=["30%"])) == ["Dense", "Wanda 2:4"]
    assert labels(ask(patterns=["2:4"], shares=[])) == ["Dense", "Wanda 2:4"]


def test_quantization_alone_ignores_what_only_methods_need() -> None:
    assert labels(ask(methods=[], stored=["none", "int8"], patterns=[UNSTRUCTURED, "2:4"])) == ["Dense", "int8"]


def test_group_sizes_count_only_for_quantizations_with_groups() -> None:
    assert labels(ask(methods=[], stored=["int8"], groups=[32])) == ["Dense", "int8"]
    assert labels(ask(methods=[], stored=["int8", "int4"], groups=[32, 64])) == ["Dense", "int8", "int4 g32", "int4"]
    assert labels(ask(methods=[], stored=["int4"], groups=[])) == ["Dense", "int4"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"methods": [], "stored": []}, "Nothing is chosen"),
        ({"shares": []}, "share"),
        ({"patterns": []}, "where"),
        ({"shares": ["half"]}, "is not a sparsity"),
        ({"dtype": "float8"}, "dtype"),
        ({"nonsense": 1}, "no setting called nonsense"),
    ],
)
def test_what_cannot_be_made_is_said_in_one_sentence(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        ask(**changes)


def test_asking_queues_the_runs_starts_a_worker_and_keeps_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PODA_HOME", str(tmp_path))
    monkeypatch.delenv("PODA_DATABASE", raising=False)
    started: list[str] = []
    monkeypatch.setattr("app.runs.queue.start_worker", started.append)
    store = Store()
    request = ask(model="owner/name@v1", device="cpu")
    assert [one.reused for one in ask_for(store, request)] == [False, False]
    assert [one.reused for one in ask_for(store, request)] == [True, True]
    assert started == ["cpu", "cpu"]
    assert added_models(store) == ["owner/name@v1"]
    assert {(run.spec.model, run.spec.revision) for run in store.runs()} == {("owner/name", "v1")}
    ask_for(store, ask())
    assert added_models(store) == ["owner/name@v1"]
    store.close()
