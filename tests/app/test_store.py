"""The database of runs: what it remembers, how it opens, and the table that pages draw from."""

import json
import math
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.paths import home as poda_home
from app.runs import queue, transitions
from app.runs.processes import this_process
from app.runs.store import Run, RunState, Store
from app.runs.transitions import Position
from eval.figures import Figure
from pruning.errors import InputError
from tests.app.factories import DENSE16, fill, make_outcome, make_run, make_spec, sharing

FIRST_RESULTS = """
CREATE TABLE results (
    run_key INTEGER NOT NULL,
    model VARCHAR(255) NOT NULL,
    method VARCHAR(64) NOT NULL,
    sparsity_asked FLOAT NOT NULL,
    pattern VARCHAR(16) NOT NULL,
    quantize VARCHAR(64) NOT NULL,
    dtype VARCHAR(32) NOT NULL,
    device VARCHAR(255) NOT NULL,
    evaluation VARCHAR(255) NOT NULL,
    calibration VARCHAR(255) NOT NULL,
    protocol VARCHAR(32) NOT NULL,
    machine VARCHAR(255) NOT NULL,
    runtime VARCHAR(255) NOT NULL,
    dense16_bytes BIGINT,
    dense16_pruned_layer_bytes BIGINT,
    source_bytes BIGINT,
    source_name VARCHAR(255),
    parameters BIGINT,
    versions VARCHAR(1024) NOT NULL,
    PRIMARY KEY (run_key),
    FOREIGN KEY(run_key) REFERENCES runs ("key")
);
"""
FIRST_SPEC = (
    '{"model":"bundled","revision":null,"model_hash":null,"recipe":{"prune":{"method":"wanda","sparsity":0.5,'
    '"pattern":null},"quantize":null},"calibration":{"source":"articles","text_hash":null,"windows":8,"length":256,'
    '"seed":0},"evaluation":{"source":"articles","text_hash":null,"windows":16,"length":512},"device":"auto",'
    '"dtype":"auto"}'
)


def test_a_new_store_is_empty(store: Store, home: Path) -> None:
    assert store.runs() == []
    assert store.results().empty
    assert {"run_id", "method", "stale"} <= set(store.results().columns)
    assert (home / "poda.sqlite3").is_file()


def test_a_run_reads_back_as_it_was_asked_for(store: Store) -> None:
    spec = make_spec("sparsegpt", pattern="2:4", quantize="int8", seed=3)
    run = make_run(store, spec, state=RunState.QUEUED)
    assert (run.spec, run.run_id, run.label) == (spec, spec.run_id, "SparseGPT 2:4 + int8")
    assert (run.state, run.attempt, run.started_at, run.error) == (RunState.QUEUED, 1, None, None)
    assert abs(run.created_at.timestamp() - time.time()) < 60
    assert store.find(spec.run_id) == run
    assert store.find("0" * 12) is None
    with pytest.raises(InputError, match="no run 99"):
        store.run(99)


def test_another_process_sees_what_this_one_wrote(store: Store) -> None:
    run = make_run(store)
    code = "from app.runs.store import Store; print(Store().runs()[0].run_id)"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == run.run_id


def test_runs_come_newest_first_and_by_state(store: Store) -> None:
    made = fill(store, 3)
    assert [run.key for run in store.runs()] == sorted((run.key for run in made), reverse=True)
    assert len(store.runs(limit=2)) == 2
    assert [run.state for run in store.runs([RunState.FAILED, RunState.LOST])] == [RunState.LOST, RunState.FAILED]


def test_the_record_holds_figures_with_samples_and_provenance(store: Store) -> None:
    run = make_run(store, make_spec("wanda", 0.5))
    record = store.record(run.key)
    assert list(record)[:6] == ["run", "status", "recipe", "spec", "figures", "provenance"]
    assert (record["run"], record["status"], record["recipe"]) == (run.run_id, "done", "Wanda 50%")
    assert record["spec"] == run.spec.model_dump(mode="json")
    token = record["figures"]["time_per_output_token"]
    assert token["unit"] == "s"
    assert len(token["samples"]) == 5
    assert token["p50"] == sorted(token["samples"])[2]
    assert record["provenance"]["model"]["kind"] == "language model"
    assert record["collapsed"] is False
    assert record["sizes"]["dense16_bytes"] == DENSE16
    assert record["layers"][0]["sparsity"] == 0.5


def test_the_record_of_a_failed_run_says_why(store: Store) -> None:
    record = store.record(make_run(store, state=RunState.FAILED, error="the disk is full").key)
    assert (record["status"], record["error"], record["figures"]) == ("failed", "the disk is full", {})


def test_a_record_is_json_even_when_a_model_gave_no_numbers(store: Store) -> None:
    spec = make_spec("magnitude", 0.9)
    outcome = make_outcome(spec, collapsed=True)
    figures = {**outcome.figures, "perplexity": Figure(math.inf, "perplexity", low=math.nan, samples=(math.inf, 2.0))}
    object.__setattr__(outcome, "figures", figures)
    record = store.record(make_run(store, spec, outcome=outcome).key)
    text = json.dumps(record, allow_nan=False)
    assert json.loads(text)["figures"]["perplexity"] == {
        "value": None,
        "unit": "perplexity",
        "samples": [None, 2.0],
    }
    row = store.results().iloc[0]
    assert math.isnan(row["perplexity"])
    assert bool(row["collapsed"])


def test_results_have_a_row_for_each_run_with_its_figures(store: Store) -> None:
    dense = make_run(store, make_spec(None))
    int8 = make_run(store, make_spec("sparsegpt", pattern="2:4", quantize="int8", seed=4), artifact=True)
    make_run(store, make_spec("wanda", 0.5), state=RunState.FAILED)
    frame = store.results().set_index("run_id")
    assert list(frame.index) == [int8.run_id, dense.run_id]
    first, last = frame.iloc[0], frame.iloc[1]
    assert first[["method", "sparsity_asked", "pattern", "quantize"]].tolist() == ["sparsegpt", 0.5, "2:4", "int8"]
    assert last[["method", "sparsity_asked", "pattern", "quantize"]].tolist() == ["none", 0.0, "", "none"]
    assert first["evaluation"] == "articles, 16 × 512 tokens"
    assert first["calibration"] == "articles, 8 × 256 tokens"
    assert last["calibration"] == ""
    assert bool(first["has_artifact"])
    assert not bool(last["has_artifact"])
    assert first["protocol"] == last["protocol"]
    assert frame["finished_at"].dt.tz is not None
    for run, row in ((int8, first), (dense, last)):
        figures = store.record(run.key)["figures"]
        for name, figure in figures.items():
            assert row[name] == pytest.approx(figure["value"], rel=1e-12)
        assert row["perplexity_low"] == pytest.approx(figures["perplexity"]["low"], rel=1e-12)
        assert row["prefill_time_p95"] == pytest.approx(figures["prefill_time"]["p95"], rel=1e-12)
    assert "sparsity_low" not in frame.columns


def test_results_show_the_latest_finished_attempt(store: Store) -> None:
    spec = make_spec("wanda", 0.5)
    make_run(store, spec)
    second = make_run(store, spec)
    make_run(store, spec, state=RunState.FAILED)
    assert second.attempt == 2
    assert store.results()["key"].tolist() == [second.key]
    found = store.find(spec.run_id)
    assert found is not None
    assert (found.attempt, found.state) == (3, RunState.FAILED)


def test_a_result_of_other_library_versions_is_stale(store: Store) -> None:
    from importlib.metadata import version

    current = {"torch": version("torch"), "numpy": version("numpy")}
    make_run(store, make_spec("wanda", 0.3), outcome=make_outcome(make_spec("wanda", 0.3), versions=current))
    old = {**current, "torch": "1.0.0"}
    make_run(store, make_spec("wanda", 0.5), outcome=make_outcome(make_spec("wanda", 0.5), versions=old))
    stale = store.results().set_index("sparsity_asked")["stale"]
    assert stale[0.3] == ""
    assert stale[0.5] == f"made with torch 1.0.0, now {version('torch')}"


def test_a_result_of_another_device_is_stale_once_the_new_one_has_a_result(store: Store) -> None:
    first, second = make_spec("wanda", 0.3), make_spec("wanda", 0.5)
    make_run(store, first, outcome=make_outcome(first, device_name="Old GPU"))
    assert store.results()["stale"].tolist() == [""]
    make_run(store, second, outcome=make_outcome(second, device_name="New GPU"))
    assert store.results()["stale"].tolist() == ["", "measured on Old GPU, the device here is now New GPU"]


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"device_name": "other"},
        {"versions": {"torch": "0"}},
        {"evaluation": {"text_sha256": "1", "windows": 16, "length": 512}},
        {"model": {"name": "SmolLM2-135M-Instruct", "revision": None, "file_hash": "f"}},
    ],
)
def test_runs_share_a_protocol_only_when_their_figures_may_be_compared(change: dict[str, object]) -> None:
    from app.runs.outcome import protocol

    provenance = dict(make_outcome(make_spec("wanda", 0.5)).provenance)
    assert protocol(provenance) == protocol(make_outcome(make_spec(None)).provenance)
    assert protocol({**provenance, **change}) != protocol(provenance)


def test_versions_grow_with_what_changed(store: Store) -> None:
    shown, results = store.version(), store.results_version()
    run = make_run(store, state=RunState.RUNNING)
    assert store.version() > shown
    assert store.results_version() == results
    shown = store.version()
    transitions.beat(store, run.key, Position("scoring", 1, 2, "tokens", 4, 5, None))
    assert store.version() > shown
    shown = store.version()
    transitions.beat(store, run.key, None)
    assert store.version() == shown
    make_run(store, make_spec(None))
    assert store.results_version() > results


def test_an_id_may_be_given_by_its_beginning(store: Store) -> None:
    made = fill(store, 20, others=False)
    for run in made[:3]:
        assert store.matching(run.run_id).key == run.key
    with pytest.raises(InputError, match=f"{len({run.run_id for run in made})} runs have"):
        store.matching("")
    with pytest.raises(InputError, match="No run has an id that begins with 'zz'"):
        store.matching("zz")
    again = make_run(store, made[0].spec, state=RunState.FAILED)
    assert store.matching(again.run_id).state is RunState.DONE


def test_two_stores_at_once_wait_for_each_other(store: Store) -> None:
    """Progress of several processes at once: nobody is refused, nothing is lost."""
    code = (
        "from app.runs.store import Store; from app.runs import transitions; import sys\n"
        "store = Store()\n"
        "for count in range(60): transitions.beat(store, int(sys.argv[1]), None)"
    )
    run = make_run(store, state=RunState.RUNNING)
    others = [subprocess.Popen([sys.executable, "-c", code, str(run.key)]) for _ in range(2)]
    for place in range(60):
        transitions.beat(store, run.key, Position("scoring", place, 60, "tokens", 4, 5, None))
    assert [other.wait(timeout=30) for other in others] == [0, 0]
    assert store.run(run.key).done == 59


def test_a_database_of_the_first_layout_opens_with_all_it_holds(store: Store, home: Path) -> None:
    """Its table of results, and a specification in it, word for word as they were."""
    dense, pruned = make_run(store, make_spec(None)), make_run(store, make_spec("wanda", 0.5))
    store.close()
    with sqlite3.connect(home / "poda.sqlite3") as connection:
        connection.execute("ALTER TABLE results RENAME TO newer")
        connection.executescript(FIRST_RESULTS)
        names = ", ".join(row[1] for row in connection.execute("PRAGMA table_info(results)"))
        connection.execute(f"INSERT INTO results SELECT {names} FROM newer")
        connection.execute("DROP TABLE newer")
        connection.execute("UPDATE runs SET spec = ? WHERE key = ?", (FIRST_SPEC, pruned.key))
        connection.execute("UPDATE counters SET value = 1 WHERE name = 'layout'")
    connection.close()
    opened = Store()
    frame = opened.results()
    assert frame["run_id"].tolist() == [pruned.run_id, dense.run_id]
    assert frame["allocation"].tolist() == ["uniform", "uniform"]
    assert frame["statistics"].tolist() == ["sequential", "sequential"]
    assert frame[["made_together", "common_seconds"]].isna().all(axis=None)
    assert opened.run(pruned.key).spec == make_spec("wanda", 0.5)
    assert opened.run(pruned.key).spec.run_id == pruned.run_id
    shared = make_run(opened, sharing("wanda", 0.5), outcome=make_outcome(sharing("wanda", 0.5), together=(3, 20.0)))
    newest = opened.results().iloc[0]
    assert (newest["run_id"], newest["statistics"], newest["made_together"]) == (shared.run_id, "shared", 3)
    assert newest["common_seconds"] == 20.0
    opened.close()
    again = Store()
    assert again.results().shape[0] == 3
    again.close()


def test_a_database_of_a_newer_layout_is_refused(store: Store, home: Path) -> None:
    with sqlite3.connect(home / "poda.sqlite3") as connection:
        connection.execute("UPDATE counters SET value = 4 WHERE name = 'layout'")
    connection.close()
    with pytest.raises(InputError, match="newer Poda"):
        Store()


def test_a_file_that_is_no_database_is_named(home: Path) -> None:
    home.mkdir()
    (home / "poda.sqlite3").write_text("not a database" * 100)
    with pytest.raises(InputError, match=r"poda\.sqlite3 cannot be opened"):
        Store()


@pytest.mark.parametrize("url", ["nonsense", "unknown://host/name", "sqlite:////nowhere/at/all.db"])
def test_an_address_that_cannot_be_used_is_an_input_error(url: str) -> None:
    with pytest.raises(InputError, match="database"):
        Store(url)


def test_a_home_that_cannot_be_written_to_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PODA_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(InputError, match="Set PODA_HOME to a folder that can be written to"):
        poda_home()


def test_a_moved_home_finds_its_artifacts(store: Store, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(store, artifact=True)
    store.close()
    moved = home.rename(home.parent / "moved")
    monkeypatch.setenv("PODA_HOME", str(moved))
    found = Store().run(run.key).artifact
    assert found == moved / "artifacts" / run.run_id
    assert found.is_dir()


def test_the_table_of_a_thousand_runs_is_read_quickly(store: Store) -> None:
    """A guard against work for each run; the bench has the measured time."""
    fill(store, 1, others=False)
    _multiply(store, 1000)
    started = time.perf_counter()
    frame = store.results()
    assert time.perf_counter() - started < 1.5
    assert frame.shape[0] == 1000
    assert frame["perplexity"].notna().all()


def _multiply(store: Store, count: int) -> None:
    """Copy the only run until there are ``count``, in the database itself."""
    with store.writer.begin() as connection:
        raw = connection.connection.driver_connection
        assert isinstance(raw, sqlite3.Connection)
        for table, key in (("runs", "key"), ("results", "run_key"), ("figures", "run_key")):
            names = [row[1] for row in raw.execute(f"PRAGMA table_info({table})")]
            values = ", ".join(
                "n" if name == key else "printf('%012d', n)" if name == "run_id" else f"t.{name}" for name in names
            )
            raw.execute(
                f"WITH RECURSIVE counted(n) AS (SELECT 2 UNION ALL SELECT n + 1 FROM counted WHERE n < {count}) "
                f"INSERT INTO {table} SELECT {values} FROM counted, {table} t WHERE t.{key} = 1"
            )


def test_a_process_is_told_from_a_later_one_with_its_number(store: Store) -> None:
    run: Run = make_run(store, state=RunState.RUNNING)
    held = transitions.held(store)
    assert [(one.key, one.holder) for one in held] == [(run.key, this_process())]
    assert queue.mark_lost(store) == []
