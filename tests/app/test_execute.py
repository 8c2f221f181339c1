"""The job on a tiny model: what is saved, what is measured of it, and what is refused."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from app import cli
from app.runs import terminal
from app.runs.execute import execute
from app.runs.spec import CalibrationSpec, EvaluationSpec, RunSpec
from app.runs.store import Store
from app.runs.sweep import identified
from pruning.errors import CancelledError, InputError
from pruning.progress import silent
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
