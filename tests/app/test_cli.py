"""The terminal: what it writes, what it refuses and with which exit code, and Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from app import cli
from app.runs import terminal
from app.runs.checkpoints import unfinished
from app.runs.outcome import Outcome
from app.runs.processes import device_lock
from app.runs.spec import CalibrationSpec, EvaluationSpec, RunSpec
from app.runs.store import RunState, Store
from app.runs.sweep import identified
from app.runs.terminal import describe
from app.runs.terminal_request import asked_for
from app.runs.transitions import Position
from pruning.methods import METHODS
from pruning.progress import Progress
from tests.app import fake_job
from tests.app.factories import fill, leave_blocks, make_outcome, make_run, make_spec, sharing

ROOT = Path(__file__).parents[2]
DENSE = ("run", "--model", "bundled", "--method", "none")


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run here loads a model."""
    behave(monkeypatch, "quick")


def behave(monkeypatch: pytest.MonkeyPatch, behaviour: str) -> None:
    monkeypatch.setattr(terminal, "real_execute", lambda: fake_job.BEHAVIOURS[behaviour])
    monkeypatch.setitem(terminal.run_here.__kwdefaults__, "resolve", lambda name: "cpu")


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of ``python -m app ARGUMENTS``."""
    monkeypatch.setattr(sys, "argv", ["app", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def process(behaviour: str, arguments: Sequence[str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.app.fake_job", "terminal", behaviour, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("method", "sparsity", "pattern"),
    [("wanda,wanda", "0.5", None), (" wanda", "0.5, 0.5", None), ("wanda", None, "2:4,2:4")],
)
def test_a_value_that_is_listed_twice_is_one_run(method: str, sparsity: str | None, pattern: str | None) -> None:
    protocol = {"model": "bundled", "calibration": CalibrationSpec(), "evaluation": EvaluationSpec()}
    asked = asked_for(
        method=method,
        sparsity=sparsity,
        pattern=pattern,
        quantize="none,none",
        group_size=None,
        allocation=" uniform",
        statistics=None,
        **protocol,
    )
    assert not asked.sweep
    assert [str(spec.recipe) for spec in asked.specs] == [f"Wanda {pattern.split(',')[0] if pattern else '50%'}"]


def test_a_run_prints_its_figures_and_writes_the_record(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, store: Store
) -> None:
    out = tmp_path / "out.json"
    arguments = ("run", "--model", "bundled", "--method", "wanda", "--sparsity", "0.5", "--windows", "4")
    assert call(monkeypatch, *arguments, "--seed", "3", "--json", str(out)) == 0
    record = json.loads(out.read_text())
    assert (record["status"], record["recipe"]) == ("done", "Wanda 50%")
    assert record["spec"]["calibration"] == {
        "source": "articles",
        "text_hash": None,
        "windows": 4,
        "length": 256,
        "seed": 3,
    }
    assert record == store.record(store.runs()[0].key)
    printed = capsys.readouterr()
    assert "Wanda 50%" in printed.out
    assert "size on disk" in printed.out
    assert "MB" in printed.out
    assert "[4/5] scoring: 8,192 of 8,192 tokens" in printed.err or "[5/5] timing" in printed.err


def test_a_pattern_fixes_the_sparsity(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    asked = ("run", "--model", "bundled", "--method", "sparsegpt", "--pattern", "2:4", "--quantize", "int8")
    assert call(monkeypatch, *asked) == 0
    assert store.runs()[0].label == "SparseGPT 2:4 + int8"
    assert call(monkeypatch, *asked, "--sparsity", "0.5") == 0
    assert len(store.runs()) == 1


def test_a_finished_run_is_found_and_made_anew_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store: Store
) -> None:
    assert call(monkeypatch, *DENSE) == 0
    assert call(monkeypatch, *DENSE) == 0
    assert "--again makes it anew" in capsys.readouterr().err
    assert [run.attempt for run in store.runs()] == [1]
    assert call(monkeypatch, *DENSE, "--again") == 0
    assert [run.attempt for run in store.runs()] == [2, 1]


def test_a_run_that_waits_in_the_queue_is_taken_over(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    waiting = make_run(store, identified(make_spec(None)), state=RunState.QUEUED)
    assert call(monkeypatch, *DENSE) == 0
    assert store.run(waiting.key).state is RunState.DONE
    assert len(store.runs()) == 1


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (("--method", "wanda", "--sparsity", "1.5"), "sparsity 1.5 is out of range: choose a share from 0 to 0.95"),
        (("--method", "wanda", "--sparsity", "-0.1"), "sparsity -0.1 is out of range: choose a share from 0 to 0.95"),
        (("--method", "wanda", "--sparsity", "0.4", "--pattern", "2:4"), "pattern 2:4 fixes the sparsity at 0.5"),
        (("--method", "wanda", "--pattern", "3:2"), "3:2 removes nothing"),
        (("--method", "wanda", "--pattern", "half"), "'half' is not a pattern"),
        (("--method", "wanda"), "say how much wanda should remove"),
        (("--method", "none", "--sparsity", "0.5"), "method none removes nothing"),
        (("--method", "none", "--allocation", "owl"), "method none removes nothing: leave out --allocation"),
        (("--method", "wanda", "--sparsity", "half"), "sparsity 'half' is not a number"),
        (("--method", "wanda", "--sparsity", "0.5", "--allocation", "fair"), "unknown allocation 'fair'"),
        (("--method", "wanda", "--pattern", "2:4", "--allocation", "owl"), "it takes no owl allocation"),
        (("--method", "magnitude", "--sparsity", "0.5", "--statistics", "shared"), "choose sequential statistics"),
        (("--method", "wanda,", "--sparsity", "0.5"), "--method 'wanda,' has an empty value"),
        (("--method", "wanda,wnda", "--sparsity", "0.5"), "unknown method 'wnda'"),
        (("--method", "wanda", "--sparsity", "0.3,half"), "sparsity 'half' is not a number"),
        (("--method", "wanda", "--sparsity", "0.3,1.5"), "sparsity 1.5 is out of range"),
        (("--method", "wanda,sparsegpt"), "needs at least one sparsity or pattern"),
        (("--method", "wnda", "--sparsity", "0.5"), "unknown method 'wnda'"),
        (("--method", "none", "--quantize", "int3"), "unknown quantization 'int3'"),
        (
            ("--method", "none", "--quantize", "int4", "--group-size", "128"),
            "group 128 does not divide a width of 576 inputs: choose a group of 64 or 32",
        ),
        (("--method", "none", "--quantize", "int4", "--group-size", "48"), "choose 32 or 64 or 128"),
        (("--method", "none", "--quantize", "int4", "--group-size", "half"), "--group-size 'half' is no whole number"),
        (("--method", "none", "--quantize", "int4", "--group-size", "-64"), "--group-size '-64' is no whole number"),
        (("--method", "none", "--quantize", "int8", "--group-size", "64"), "leave out the group size"),
        (("--method", "none", "--group-size", "64"), "A group size is for int4"),
        (("--method", "none", "--quantize", "joint-int4"), "and nothing is pruned here: choose GPTQ int4"),
        (("--method", "wanda", "--sparsity", "0.5", "--quantize", "joint-int4"), "not Wanda: choose GPTQ int4"),
        (("--method", "none", "--quantize", "float8", "--device", "cpu"), "float8 runs on cuda only, not on cpu"),
        (("--method", "none", "--dtype", "int3"), "dtype 'int3' is not known"),
        (("--method", "none", "--eval-windows", "0"), "windows 0 is too small"),
        (("--method", "none", "--eval-length", "1"), "length 1 is too small"),
        (("--method", "none", "--seed", "-1"), "seed -1 is too small"),
        (("--method", "none", "--model", "./missing"), "no such folder"),
        (("--method", "none", "--model", "model.bin"), "no such file"),
        (("--method", "none", "--eval-text", "./missing.txt"), "there is no text file at ./missing.txt"),
        (("--method", "none", "--json", "/missing/out.json"), "/missing/out.json cannot be written"),
        (("--method", "none", "--json", "/"), "/ is a folder"),
    ],
)
def test_a_bad_request_ends_with_2_and_one_sentence_and_no_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    store: Store,
    arguments: tuple[str, ...],
    cause: str,
) -> None:
    model = () if "--model" in arguments else ("--model", "bundled")
    assert call(monkeypatch, "run", *model, *arguments) == 2
    message = capsys.readouterr().err
    assert cause in message
    assert message.count("\n") == 1
    assert store.runs() == []


def test_an_unknown_device_ends_with_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from app.runs.worker import resolve_device

    monkeypatch.setitem(terminal.run_here.__kwdefaults__, "resolve", resolve_device)
    assert call(monkeypatch, *DENSE, "--device", "abacus") == 2
    assert "'abacus' is no device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "code", "error"),
    [
        ("magnitude", 1, "the weights are not finite"),
        ("wanda", 2, "the text has 10 tokens"),
        ("sparsegpt", 1, "details"),
    ],
)
def test_a_failed_run_writes_its_record_too(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    home: Path,
    method: str,
    code: int,
    error: str,
) -> None:
    behave(monkeypatch, "failing")
    out = tmp_path / "out.json"
    arguments = ("run", "--model", "bundled", "--method", method, "--sparsity", "0.5", "--json", str(out))
    assert call(monkeypatch, *arguments) == code
    record = json.loads(out.read_text())
    assert record["status"] == "failed"
    assert error in record["error"]
    assert record["figures"] == {}
    printed = capsys.readouterr().err
    assert record["error"] in printed
    assert "Traceback" not in printed
    assert "Traceback" in (home / "logs" / "terminal.log").read_text()


def test_results_lists_every_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, store: Store
) -> None:
    assert call(monkeypatch, "results") == 0
    assert "No runs yet" in capsys.readouterr().out
    fill(store, 5)
    out = tmp_path / "all.json"
    assert call(monkeypatch, "results", "--json", str(out)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 10
    assert [line.split()[0] for line in lines[1:]] == [run.run_id for run in store.runs()]
    records = json.loads(out.read_text())
    assert [record["status"] for record in records] == [str(run.state) for run in store.runs()]
    assert records[-1]["figures"]["perplexity"]["unit"] == "perplexity"


SWEEP = ("run", "--model", "bundled", "--method", "magnitude,wanda", "--sparsity", "0.7,0.8")


def test_a_sweep_makes_every_combination_with_dense_first_and_ends_with_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, store: Store
) -> None:
    out = tmp_path / "all.json"
    assert call(monkeypatch, *SWEEP, "--json", str(out)) == 0
    labels = ["Dense", "Magnitude 70%", "Magnitude 80%", "Wanda 70%", "Wanda 80%"]
    records = json.loads(out.read_text())
    assert [record["recipe"] for record in records] == labels
    assert {record["status"] for record in records} == {"done"}
    printed = capsys.readouterr()
    assert [line.split("  ")[2].strip() for line in printed.out.splitlines()[1:]] == labels
    assert [line for line in printed.err.splitlines() if line.startswith("Run ")] == [
        f"Run {place} of 5: {label}" for place, label in enumerate(labels, start=1)
    ]
    assert call(monkeypatch, *SWEEP) == 0
    assert [run.attempt for run in store.runs()] == [1] * 5


def test_a_sweep_names_what_cannot_be_combined(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store: Store
) -> None:
    asked = ("run", "--model", "bundled", "--method", "wanda", "--sparsity", "0.8", "--pattern", "2:4")
    assert call(monkeypatch, *asked, "--allocation", "uniform,owl", "--quantize", "none,int8") == 0
    assert "Left out, as there is no such combination: 2:4 with OWL." in capsys.readouterr().err
    made = {"Wanda 80%", "Wanda 80% (OWL)", "Wanda 2:4"}
    assert {run.label for run in store.runs()} == {"Dense", "int8", *made, *(f"{name} + int8" for name in made)} - {
        "int8"
    }


def test_a_sweep_shares_what_costs_nothing_and_tells_each_run_what_will_follow(
    monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    seen: dict[str, list[str]] = {}

    def execute(spec: RunSpec, folder: Path, progress: Progress, siblings: Sequence[RunSpec] = ()) -> Outcome:
        seen[str(spec.recipe)] = [str(one.recipe) for one in siblings]
        return fake_job.quick(spec, folder, progress)

    monkeypatch.setattr(terminal, "real_execute", lambda: execute)
    monkeypatch.setitem(METHODS, "wanda", replace(METHODS["wanda"], shared_up_to=0.5))
    asked = ("run", "--model", "bundled", "--method", "wanda", "--sparsity")
    assert call(monkeypatch, *asked, "0.3,0.4,0.5,0.6") == 0
    assert seen == {
        "Dense": [],
        "Wanda 30% (shared)": ["Wanda 40% (shared)", "Wanda 50% (shared)"],
        "Wanda 40% (shared)": ["Wanda 50% (shared)"],
        "Wanda 50% (shared)": [],
        "Wanda 60%": [],
    }
    seen.clear()
    # What is finished is not made along with what is new, unless all is asked for anew.
    assert call(monkeypatch, *asked, "0.2,0.3,0.4", "--statistics", "shared") == 0
    assert seen == {"Wanda 20% (shared)": []}
    seen.clear()
    assert call(monkeypatch, *asked, "0.2,0.3", "--statistics", "shared", "--again") == 0
    assert seen["Wanda 20% (shared)"] == ["Wanda 30% (shared)"]
    seen.clear()
    assert call(monkeypatch, *asked, "0.2,0.3", "--statistics", "sequential") == 0
    assert list(seen) == ["Wanda 20%", "Wanda 30%"]


def test_one_run_is_sequential_unless_it_is_asked_for_otherwise(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    asked = ("run", "--model", "bundled", "--method", "wanda", "--sparsity", "0.3")
    assert call(monkeypatch, *asked) == 0
    assert call(monkeypatch, *asked, "--statistics", "shared") == 0
    assert call(monkeypatch, *asked, "--allocation", "owl") == 0
    assert [run.label for run in reversed(store.runs())] == ["Wanda 30%", "Wanda 30% (shared)", "Wanda 30% (OWL)"]


def test_a_failed_run_of_a_sweep_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    behave(monkeypatch, "failing")
    out = tmp_path / "all.json"
    assert call(monkeypatch, *SWEEP, "--quantize", "none", "--json", str(out)) == 1
    assert [record["status"] for record in json.loads(out.read_text())] == ["done", *["failed"] * 4]
    printed = capsys.readouterr()
    assert "the weights are not finite" in printed.err
    assert printed.err.splitlines()[-1] == ("4 of 5 runs failed: Magnitude 70%, Magnitude 80%, Wanda 70%, Wanda 80%.")
    assert len(printed.out.splitlines()) == 6


def test_ctrl_c_stops_the_whole_sweep(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "all.json"
    running = process("slow", (*SWEEP, "--json", str(out)))
    end = time.monotonic() + 20
    while not store.runs([RunState.RUNNING]) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)
    running.send_signal(signal.SIGINT)
    printed, messages = running.communicate(timeout=10)
    assert running.returncode == 130
    assert messages.splitlines()[-1] == "Cancelled."
    assert "Traceback" not in messages + printed
    assert [(run.label, run.state) for run in store.runs()] == [("Dense", RunState.CANCELLED)]
    assert [record["status"] for record in json.loads(out.read_text())] == ["cancelled"]


def test_a_cancelled_run_says_where_it_goes_on_and_is_started_from_nothing_only_on_purpose(
    monkeypatch: pytest.MonkeyPatch, store: Store, home: Path
) -> None:
    asked = ("run", "--model", "bundled", "--method", "wanda", "--sparsity", "0.5")
    running = process("stepping", asked)
    run_id = identified(make_spec("wanda", 0.5)).run_id
    end = time.monotonic() + 20
    while unfinished(run_id) is None and time.monotonic() < end:
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    _, messages = running.communicate(timeout=10)
    left = unfinished(run_id)
    assert left is not None
    assert messages.splitlines()[-1] == f"Cancelled. Start again: it goes on at block {left.done + 1} of 4."
    behave(monkeypatch, "stepping")
    assert call(monkeypatch, *asked) == 0
    assert (home / "makers.txt").read_text().splitlines() == ["Wanda 50%: 2 processes"]
    leave_blocks(run_id, 4, 4)
    assert call(monkeypatch, *asked, "--again") == 0
    assert (home / "makers.txt").read_text().splitlines()[1:] == ["Wanda 50%: 1 processes"]


def test_the_time_of_a_variant_that_was_made_with_others_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store: Store
) -> None:
    spec = identified(sharing("wanda", 0.5))
    make_run(store, spec, outcome=make_outcome(spec, together=(12, 20.0)))
    asked = ("run", "--model", "bundled", "--method", "wanda", "--sparsity", "0.5", "--statistics", "shared")
    assert call(monkeypatch, *asked) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "compression time" in line]
    assert line.endswith("(of which 20 s once for 12 variants)")


@pytest.mark.parametrize(
    ("run_id", "cause"), [("zz", "No run has an id that begins with 'zz'"), ("", "its files were removed")]
)
def test_what_cannot_be_exported_is_said(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    store: Store,
    run_id: str,
    cause: str,
) -> None:
    run = make_run(store)
    assert call(monkeypatch, "export", run_id or run.run_id[:6], str(tmp_path / "out")) == 2
    assert cause in capsys.readouterr().err


def test_a_home_that_cannot_be_written_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PODA_HOME", str(tmp_path / "file" / "x"))
    assert call(monkeypatch, "results") == 2
    assert "Set PODA_HOME" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("behaviour", "number"), [("slow", signal.SIGINT), ("slow", signal.SIGTERM), ("deaf", signal.SIGINT)]
)
def test_ctrl_c_is_cancel(store: Store, tmp_path: Path, number: int, behaviour: str) -> None:
    out = tmp_path / "out.json"
    arguments = ("run", "--model", "bundled", "--method", "wanda", "--sparsity", "0.5", "--json", str(out))
    running = process(behaviour, arguments)
    end = time.monotonic() + 20
    while not store.runs([RunState.RUNNING]) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)
    running.send_signal(number)
    printed, messages = running.communicate(timeout=10)
    assert running.returncode == 130
    assert "Cancel" in messages
    assert "Traceback" not in messages + printed
    assert [run.state for run in store.runs()] == [RunState.CANCELLED]
    assert json.loads(out.read_text())["status"] == "cancelled"


def test_the_terminal_waits_for_the_device_and_says_so(store: Store) -> None:
    with device_lock("cpu"):
        waiting = process("quick", DENSE)
        assert waiting.stderr is not None
        assert "Another run is using cpu: waiting" in waiting.stderr.readline()
        assert store.runs() == []
    waiting.communicate(timeout=20)
    assert waiting.returncode == 0
    assert [run.state for run in store.runs()] == [RunState.DONE]


def test_ctrl_c_while_waiting_leaves_no_run(store: Store) -> None:
    with device_lock("cpu"):
        waiting = process("quick", DENSE)
        assert waiting.stderr is not None
        waiting.stderr.readline()
        waiting.send_signal(signal.SIGINT)
        waiting.communicate(timeout=10)
    assert waiting.returncode == 130
    assert store.runs() == []


def test_a_killed_terminal_loses_its_run_and_the_next_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store: Store
) -> None:
    running = process("slow", DENSE)
    end = time.monotonic() + 20
    while not store.runs([RunState.RUNNING]) and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(running.pid, signal.SIGKILL)
    running.communicate()
    assert call(monkeypatch, "results") == 0
    assert " lost " in capsys.readouterr().out


def test_a_position_is_one_line() -> None:
    line = describe(Position("compressing", 12, 30, "blocks", 2, 5, 42.0))
    assert line == "[2/5] compressing: 12 of 30 blocks, about 42 s left"
    assert describe(Position("scoring", 0, 8192, "tokens", 4, 5, None)) == "[4/5] scoring: 0 of 8,192 tokens"


def test_the_terminal_and_the_queue_load_neither_torch_nor_streamlit() -> None:
    modules = "app.cli, app.runs.store, app.runs.queue, app.runs.sweep, app.runs.worker, app.runs.execute"
    heavy = ("torch", "transformers", "datasets", "streamlit", "accelerate")
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    seen = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "[]"
