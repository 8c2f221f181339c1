"""The job on a tiny model: what is saved, what is measured of it, and what is refused."""

import hashlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from app import cli
from app.runs import terminal
from app.runs.checkpoints import Unfinished, discard, unfinished
from app.runs.execute import execute
from app.runs.outcome import flat_row
from app.runs.spec import CalibrationSpec, EvaluationSpec, RunSpec
from app.runs.store import Store
from app.runs.sweep import identified
from eval.latency import LatencyProtocol, time_generation
from pruning.calibration import Windows
from pruning.device import choose_dtype
from pruning.errors import CancelledError, InputError
from pruning.methods import METHODS
from pruning.models import LoadedModel, load_model
from pruning.progress import Progress, silent
from pruning.recipe import Recipe
from pruning.report import Compression
from tests.app.factories import recipe

UNITS = {
    "perplexity": "perplexity",
    "bits_per_byte": "bits/byte",
    "sparsity": "fraction",
    "size_on_disk": "bytes",
    "size_of_pruned_layers": "bytes",
    "bits_per_weight": "bits",
    "resident_size": "bytes",
    "prefill_time": "s",
    "time_to_first_token": "s",
    "time_per_output_token": "s",
    "tokens_per_second": "tokens/s",
    "peak_memory": "bytes",
    "compression_time": "s",
}


WORDS = " ".join(f"word{number % 97}" for number in range(600))[:4000]
TOKENS = len(WORDS) - 3 * WORDS.count("word")


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests find the hub's switch as it was."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing is not what is tested here: one generation of a few tokens."""
    short = LatencyProtocol(prompt_tokens=8, output_tokens=4, warmup=0, iterations=1, minimum_seconds=0.0)
    monkeypatch.setattr("eval.measure.time_generation", partial(_timed, short))


def _timed(short: LatencyProtocol, model: Any, ids: Any, protocol: None, **named: Any) -> Any:
    return time_generation(model, ids, short, **named)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two blocks that reads bytes, and "word" as one token, in the transformers layout."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate([*alphabet, "wo", "rd", "word"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("w", "o"), ("r", "d"), ("wo", "rd")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4,000 bytes of words."""
    file = tmp_path_factory.mktemp("texts") / "words.txt"
    file.write_text(WORDS)
    return file


def make(model: Path, text: Path, **asked: Any) -> RunSpec:
    fields = {
        "model": str(model),
        "recipe": recipe("wanda", 0.5),
        "calibration": CalibrationSpec(source=str(text), windows=3, length=32, seed=5),
        "evaluation": EvaluationSpec(source=str(text), windows=4, length=64),
        "device": "cpu",
        "dtype": "float32",
    }
    return identified(RunSpec.model_validate({**fields, **asked}))


def with_statistics(spec: RunSpec, statistics: str) -> RunSpec:
    assert spec.recipe.prune is not None
    step = spec.recipe.prune.model_copy(update={"statistics": statistics})
    return spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"prune": step})})


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "variant.safetensors").read_bytes()).hexdigest()


def test_a_run_makes_an_artifact_and_every_figure_of_it(model_folder: Path, text: Path, tmp_path: Path) -> None:
    spec = make(model_folder, text, recipe=recipe("wanda", 0.5, quantize="int8"))
    phases: list[str] = []

    def watch(phase: str, done: int, total: int, unit: str) -> None:
        assert 0 <= done <= total
        if phase not in phases:
            phases.append(phase)

    folder = tmp_path / "variant"
    outcome = execute(spec, folder, watch)
    assert phases == ["loading", "compressing", "saving", "scoring", "timing"]
    for name, unit in UNITS.items():
        assert outcome.figures[name].unit == unit
    # Each pruned layer has an even number of weights: half of them is exact, and int8 keeps zeros zero.
    assert outcome.figures["sparsity"].value == pytest.approx(0.5, abs=1e-3)
    assert outcome.figures["compression_time"].value > 0  # type: ignore[operator]  # it is a number
    on_disk = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert outcome.figures["size_on_disk"].value == outcome.artifact_bytes == on_disk
    assert len(outcome.layers) == 2 * 7
    provenance = json.loads(json.dumps(outcome.record(), allow_nan=False))["provenance"]
    assert provenance["model"]["name"] == "tiny"
    assert provenance["model"]["kind"] == "language model"
    assert provenance["model"]["file_hash"] == spec.model_hash
    assert provenance["evaluation"]["text_sha256"] == hashlib.sha256(text.read_bytes()).hexdigest()
    assert (provenance["evaluation"]["windows"], provenance["evaluation"]["length"]) == (4, 64)
    assert (provenance["calibration"]["windows"], provenance["calibration"]["seed"]) == (3, 5)
    assert (provenance["dtype"], provenance["device"], provenance["seed"]) == ("float32", "cpu", 5)
    assert provenance["versions"]["torch"] == torch.__version__
    assert {"host", "date", "device_name", "runtime", "dtype_reason"} <= set(provenance)
    assert outcome.sizes["source_bytes"] == (model_folder / "model.safetensors").stat().st_size
    assert outcome.sizes["dense16_bytes"] == 2 * provenance["model"]["parameters"]


def test_the_dense_run_has_no_compression(model_folder: Path, text: Path, tmp_path: Path) -> None:
    spec = make(model_folder, text).dense()
    phases: set[str] = set()
    outcome = execute(spec, tmp_path / "dense", lambda phase, *rest: phases.add(phase))
    assert "compressing" not in phases
    assert outcome.figures["compression_time"].value == 0
    assert outcome.layers == []
    assert outcome.provenance["calibration"] is None


def test_the_same_spec_gives_the_same_weights_and_another_seed_others(
    model_folder: Path, text: Path, tmp_path: Path
) -> None:
    other = make(model_folder, text, calibration=CalibrationSpec(source=str(text), windows=3, length=32, seed=6))
    for name, spec in (("a", make(model_folder, text)), ("b", make(model_folder, text)), ("c", other)):
        execute(spec, tmp_path / name, silent)
        discard(spec.run_id)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert digest(tmp_path / "a") != digest(tmp_path / "c")


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"evaluation": {"windows": 62, "length": 64}}, f"lower the windows to {TOKENS // 64}"),
        (
            {"evaluation": {"windows": 1, "length": 300}},
            "reads at most 256 tokens at once: lower the evaluation length",
        ),
        (
            {"calibration": {"windows": 1, "length": 300}},
            "reads at most 256 tokens at once: lower the calibration length",
        ),
    ],
)
def test_windows_that_do_not_fit_are_refused(
    model_folder: Path, text: Path, tmp_path: Path, asked: dict[str, dict[str, object]], sentence: str
) -> None:
    spec = make(model_folder, text, **{name: {**part, "source": str(text)} for name, part in asked.items()})
    with pytest.raises(InputError, match=sentence):
        execute(spec, tmp_path / "variant", silent)
    assert not (tmp_path / "variant").exists()


def test_an_empty_text_is_refused(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    source = str(tmp_path / "empty.txt")
    spec = RunSpec(model=str(model_folder), evaluation=EvaluationSpec(source=source, length=64))
    with pytest.raises(InputError, match=r"empty\.txt has no text"):
        execute(spec, tmp_path / "variant", silent)


@pytest.mark.skipif(torch.cuda.is_available(), reason="float8 runs here")
def test_a_quantization_that_the_device_cannot_run_is_refused_before_the_model_is_loaded(
    model_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pruning.models.load_model", None)
    spec = make(model_folder, text, device="auto", recipe=recipe(None, quantize="float8"))
    with pytest.raises(InputError, match=r"float8 runs on cuda only, not on (cpu|mps): choose int8"):
        execute(spec, tmp_path / "out", silent)


def test_a_model_that_changed_since_it_was_asked_for_is_refused(model_folder: Path, text: Path, tmp_path: Path) -> None:
    spec = make(model_folder, text).model_copy(update={"model_hash": "0" * 64})
    with pytest.raises(InputError, match="tiny has changed since"):
        execute(spec, tmp_path / "variant", silent)


def test_a_text_that_changed_since_it_was_asked_for_is_refused(model_folder: Path, text: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_bytes(text.read_bytes())
    spec = make(model_folder, mine)
    mine.write_bytes(text.read_bytes()[::-1])
    with pytest.raises(InputError, match=r"mine\.txt has changed since"):
        execute(spec, tmp_path / "variant", silent)


@pytest.mark.parametrize("where", ["loading", "compressing", "saving", "scoring", "timing"])
def test_a_run_can_be_cancelled_in_every_phase(model_folder: Path, text: Path, tmp_path: Path, where: str) -> None:
    def stop(phase: str, done: int, total: int, unit: str) -> None:
        if phase == where:
            raise CancelledError("stop")

    with pytest.raises(CancelledError):
        execute(make(model_folder, text), tmp_path / "variant", stop)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def stopping_at(phase_wanted: str, done_wanted: int) -> Progress:
    def stop(phase: str, done: int, total: int, unit: str) -> None:
        if (phase, done) == (phase_wanted, done_wanted):
            raise CancelledError("stop")

    return stop


@pytest.mark.parametrize("statistics", ["sequential", "shared"])
def test_a_stopped_run_goes_on_with_the_same_bits(
    model_folder: Path, text: Path, tmp_path: Path, statistics: str
) -> None:
    spec = with_statistics(make(model_folder, text, recipe=recipe("sparsegpt", 0.5)), statistics)
    whole = execute(spec, tmp_path / "whole", silent)
    discard(spec.run_id)
    with pytest.raises(CancelledError):
        execute(spec, tmp_path / "stopped", stopping_at("compressing", 1))
    assert unfinished(spec.run_id) == Unfinished(1, 2)
    resumed = execute(spec, tmp_path / "resumed", silent)
    assert digest(tmp_path / "resumed") == digest(tmp_path / "whole")
    assert whole.provenance["compression"]["blocks_found_finished"] == 0
    assert resumed.provenance["compression"]["blocks_found_finished"] == 1
    assert resumed.phases["compressing"].seconds > 0
    assert resumed.phases["compressing"].total == 2


@pytest.mark.parametrize("change", ["dtype", "threads", "windows", "format"])
def test_blocks_of_other_circumstances_are_not_taken_up(
    model_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """What decides the bits and is not in the id of a run: the dtype that "auto" stands for, threads, what was read."""
    spec = make(model_folder, text).model_copy(update={"dtype": "auto"})
    execute(spec, tmp_path / "first", silent)
    assert unfinished(spec.run_id) == Unfinished(2, 2)
    if change == "dtype":
        chosen = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}
        kept = choose_dtype("auto", torch.device("cpu"))[0]
        monkeypatch.setattr("pruning.models.choose_dtype", lambda name, device: (chosen[kept], "for a test"))
    elif change == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    elif change == "format":
        monkeypatch.setattr("app.runs.compressing.CHECKPOINT_FORMAT", 99)
    else:
        monkeypatch.setattr(
            "pruning.calibration.calibration_windows",
            lambda tokenizer, text, windows, length, seed: Windows(torch.arange(96).view(3, 32)),
        )
    again = execute(spec, tmp_path / "again", silent)
    assert again.provenance["compression"]["blocks_found_finished"] == 0


def sweep(model_folder: Path, text: Path) -> list[RunSpec]:
    recipes = (recipe("wanda", 0.5), recipe("sparsegpt", 0.3), recipe("sparsegpt", 0.6, quantize="int8"))
    return [with_statistics(make(model_folder, text, recipe=one), "shared") for one in recipes]


def test_a_sweep_is_made_from_one_reading_of_the_text_with_the_bits_of_each_alone(
    model_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = sweep(model_folder, text)
    for place, spec in enumerate(specs):
        execute(spec, tmp_path / f"alone-{place}", silent)
        discard(spec.run_id)
    outcomes = []
    for place, spec in enumerate(specs):
        places: list[int] = []

        def watch(phase: str, done: int, total: int, unit: str, places: list[int] = places) -> None:
            if phase == "compressing":
                places.append(done)

        outcomes.append(execute(spec, tmp_path / f"together-{place}", watch, specs[place + 1 :]))
        # Going from making blocks to putting them together is no step back.
        assert places == sorted(places)
        if place == 0:
            # The others need no statistics any more.
            monkeypatch.setattr("pruning.shared.capture", lambda *given: pytest.fail("the text was read again"))
    for place, outcome in enumerate(outcomes):
        assert digest(tmp_path / f"together-{place}") == digest(tmp_path / f"alone-{place}")
        compression = outcome.provenance["compression"]
        assert (compression["statistics"], compression["together"]) == ("shared", 3)
        assert compression["blocks_found_finished"] == (0 if place == 0 else 2)
        common, seconds = compression["common_seconds"], outcome.figures["compression_time"].value
        assert 0 < common < seconds  # type: ignore[operator]  # it is a number
        # A sweep like this takes the sum of these, in which what was done once is counted once.
        assert outcome.phases["compressing"].seconds == pytest.approx(seconds - common + common / 3)
    row = flat_row(specs[0], outcomes[0])
    assert (row["allocation"], row["statistics"], row["made_together"]) == ("uniform", "shared", 3)
    assert row["common_seconds"] == outcomes[0].provenance["compression"]["common_seconds"]


def test_a_sibling_that_cannot_be_made_does_not_stop_the_others(
    model_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, broken, other = sweep(model_folder, text)
    execute(own, tmp_path / "alone", silent)
    discard(own.run_id)

    def fails(weight: object, statistics: object, sparsity: float, pattern: object) -> None:
        raise ZeroDivisionError("a method with a fault in it")

    monkeypatch.setattr("pruning.methods.sparsegpt.prune", fails)
    outcome = execute(own, tmp_path / "made", silent, [broken, other])
    assert outcome.provenance["compression"]["together"] == 1
    assert digest(tmp_path / "made") == digest(tmp_path / "alone")
    with pytest.raises(ZeroDivisionError):
        execute(broken, tmp_path / "broken", silent, [other])


def test_a_sibling_that_does_not_fit_the_model_says_so_only_in_its_own_turn(
    model_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, unfit, _ = sweep(model_folder, text)

    def check(model: object, recipe: Recipe, windows: object) -> None:
        if recipe == unfit.recipe:
            raise InputError("it does not fit")

    monkeypatch.setattr("pruning.walk.check", check)
    outcome = execute(own, tmp_path / "made", silent, [unfit])
    assert outcome.provenance["compression"]["together"] == 1
    assert unfinished(unfit.run_id) is None


def test_siblings_are_made_along_only_as_far_as_the_disk_has_room(
    model_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, first, second = sweep(model_folder, text)
    each = 4 * 2 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 64)
    monkeypatch.setattr("app.runs.compressing._free_bytes", lambda: int(3.5 * each))
    execute(own, tmp_path / "made", silent, [first, second])
    assert unfinished(first.run_id) == Unfinished(2, 2)
    assert unfinished(second.run_id) is None


def test_how_it_was_compressed_is_recorded_layer_by_layer(model_folder: Path, text: Path, tmp_path: Path) -> None:
    outcome = execute(make(model_folder, text), tmp_path / "variant", silent)
    compression = dict(outcome.provenance["compression"])
    assert [(entry["name"], entry["reason"]) for entry in compression.pop("unpruned")] == [
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "tied: it is model.embed_tokens.weight"),
    ]
    assert compression == {
        "allocation": "uniform",
        "statistics": "sequential",
        "together": None,
        "common_seconds": None,
        "blocks_found_finished": 0,
        "removed": [],
        "note": None,
    }
    assert outcome.figures["compression_peak_memory"].unit == "bytes"
    assert outcome.figures["compression_peak_memory"].value > 1e6  # type: ignore[operator]  # it is a number
    for layer in outcome.record()["layers"]:
        assert layer["requested_sparsity"] == layer["sparsity"] == 0.5
        assert 0 < layer["output_error"] < 1
        assert (layer["tokens"], layer["sampled"]) == (96, 96)
    assert execute(make(model_folder, text).dense(), tmp_path / "dense", silent).provenance["compression"] is None
    magnitude = execute(make(model_folder, text, recipe=recipe("magnitude", 0.5)), tmp_path / "magnitude", silent)
    assert magnitude.provenance["compression"]["statistics"] is None


@pytest.mark.parametrize("method", METHODS)
def test_every_method_goes_the_whole_way_and_reports_its_layers(
    model_folder: Path, text: Path, tmp_path: Path, method: str
) -> None:
    spec = make(model_folder, text, recipe=recipe(method, 0.5))
    outcome = execute(spec, tmp_path / "variant", silent)
    prunable = 2 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 64)
    assert len(outcome.layers) == 2 * 7
    zeros = METHODS[method].kind == "weights"
    # Whole parts come in sizes of their own, and what was really removed is what is said.
    assert outcome.figures["sparsity"].value == pytest.approx(0.5, abs=1e-3 if zeros else 0.2)
    assert outcome.sizes["dense16_pruned_layer_bytes"] == 2 * prunable
    assert (outcome.sizes["pruned_layer_weights"] == prunable) == zeros
    if not zeros:
        # What is left is dense, and it is all there is of the layers.
        kept = outcome.sizes["pruned_layer_weights"]
        assert outcome.sizes["parameters"] < outcome.sizes["dense16_bytes"] // 2
        assert outcome.figures["sparsity"].value == pytest.approx(1 - kept / prunable, abs=0.01)
        assert outcome.figures["size_of_pruned_layers"].value <= 4 * kept
        assert outcome.provenance["compression"]["removed"]


def test_a_smaller_model_is_measured_against_the_dense_one(
    model_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block of two is gone: half of the weights of the blocks, whatever removed it."""
    resident: list[bool] = []

    def without_a_block(model: Any, recipe: Recipe, windows: Windows, **named: Any) -> Compression:
        config = LlamaConfig.from_dict({**model.config.to_dict(), "num_hidden_layers": 1})
        smaller = LlamaForCausalLM(config).eval().requires_grad_(False)
        return Compression(smaller, (), 1.5, note="block 1 was removed")

    def load(*given: Any, **named: Any) -> LoadedModel:
        resident.append(named["resident"])
        return load_model(*given, **named)

    monkeypatch.setitem(METHODS, "shallow", replace(METHODS["wanda"], name="shallow", kind="depth", patterns=()))
    monkeypatch.setattr("pruning.compress.compress", without_a_block)
    monkeypatch.setattr("pruning.models.load_model", load)
    spec = make(model_folder, text, recipe=recipe("shallow", 0.5))
    outcome = execute(spec, tmp_path / "variant", silent)
    prunable = 2 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 64)
    assert resident == [False]
    assert outcome.figures["sparsity"].value == 0.5
    assert outcome.sizes["dense16_pruned_layer_bytes"] == 2 * prunable
    assert outcome.sizes["pruned_layer_weights"] == prunable // 2
    assert outcome.provenance["compression"]["note"] == "block 1 was removed"
    assert outcome.figures["compression_time"].value == 1.5


def test_the_network_is_off_unless_something_has_to_come_from_there(
    model_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.runs.execute import _offline_by_choice, _use_network

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    _offline_by_choice.cache_clear()
    execute(make(model_folder, text).dense(), tmp_path / "variant", silent)
    assert constants.HF_HUB_OFFLINE is True
    _use_network(True)
    assert constants.HF_HUB_OFFLINE is False
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    _offline_by_choice.cache_clear()
    _use_network(True)
    assert constants.HF_HUB_OFFLINE is True
    _offline_by_choice.cache_clear()


def test_from_the_terminal_to_a_plain_folder(
    model_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    """The whole way: run, results, export, and transformers loads what came out with half of its weights zero."""

    def call(*arguments: object) -> int:
        monkeypatch.setattr("sys.argv", ["app", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    assert terminal.run_here.__kwdefaults__["execute"] is None
    out, plain = tmp_path / "out.json", tmp_path / "plain"
    texts = ("--calibration", text, "--eval-text", text, "--eval-windows", 4, "--eval-length", 64)
    asked = ("--method", "sparsegpt", "--pattern", "2:4", "--windows", 3, "--window-length", 32, "--device", "cpu")
    assert call("run", "--model", model_folder, *asked, *texts, "--json", out) == 0
    record = json.loads(out.read_text())
    assert (record["status"], record["recipe"]) == ("done", "SparseGPT 2:4")
    assert call("export", record["run"][:8], plain) == 0
    weight = AutoModelForCausalLM.from_pretrained(plain).model.layers[1].mlp.down_proj.weight
    groups = (weight == 0).reshape(-1, 4).sum(dim=1)
    assert bool((groups >= 2).all())
    assert call("export", record["run"], plain) == 2
    short = ("--eval-text", text, "--eval-windows", 62, "--eval-length", 64)
    assert call("run", "--model", model_folder, "--method", "none", *short, "--json", out) == 2
    assert f"{TOKENS} tokens" in json.loads(out.read_text())["error"]
