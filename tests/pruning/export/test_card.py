"""The card of an export says what was measured and with what, invents nothing, and takes no markup from names."""

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from markdown_it import MarkdownIt

from pruning.artifact import save_artifact
from pruning.compress import compress
from pruning.export import FORMATS, export_variant
from pruning.export.card import LONGEST, plain
from pruning.recipe import QuantizeStep, Recipe
from tests.pruning.export.small import byte_tokenizer, save_small, small_model

HASH = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
IDENTITY: dict[str, Any] = {
    "name": "SmolLM2-135M-Instruct",
    "kind": "bundled",
    "revision": None,
    "file_hash": HASH,
    "architecture": "LlamaForCausalLM",
    "source_file": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "note": "weights were rounded to 4 bits (Q4_1) before Poda got them",
}
RECORD: dict[str, Any] = {
    "run": "deaf1d39c66e",
    "status": "done",
    "figures": {
        "perplexity": {"value": 72.2026, "unit": "perplexity", "low": 61.06, "high": 84.84},
        "bits_per_byte": {"value": 1.32578, "unit": "bits/byte", "low": 1.06445, "high": 1.5871},
        "time_to_first_token": {"value": 2.3726, "unit": "s", "p95": 2.3793},
        "time_per_output_token": {"value": 0.0847934, "unit": "s", "p50": 0.0859, "p95": 0.099577},
    },
    "provenance": {
        "date": "2026-12-07T12:31:55+00:00",
        "versions": {"torch": "2.13.0+cpu", "transformers": "5.24.0"},
        "device": "cpu",
        "device_name": "Intel(R) Xeon(R) Processor",
        "threads": 2,
        "dtype": "bfloat16",
        "runtime": "torch bfloat16",
        "host": "the-name-of-my-machine",
        "evaluation": {"source": "articles", "text_sha256": "a729", "windows": 16, "length": 512},
        "calibration": {"source": "/home/me/my notes.txt", "text_sha256": "9528", "windows": 8, "length": 256},
        "timing": {"batch": 1, "prompt_tokens": 256, "output_tokens": 32, "iterations": 3, "timed": "alone"},
    },
    "collapsed": False,
}
UNMEASURED = ("Perplexity", "Bits per byte", "Time to first token", "Time per output token")


def card(
    tmp_path: Path,
    record: dict[str, Any] | None = None,
    identity: dict[str, Any] | None = None,
    kind: str = "wanda",
    form: str = "gguf",
    recipe: str = "Wanda 50%",
) -> str:
    """The card of an export."""
    small = compressed(kind)
    about: dict[str, Any] = {"recipe": recipe, "identity": IDENTITY if identity is None else identity}
    save_artifact(small, byte_tokenizer(), tmp_path / "variant", about)
    export_variant(tmp_path / "variant", tmp_path / "out", form, record)
    return (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def compressed(kind: str) -> torch.nn.Module:
    model = small_model()
    if kind == "wanda":
        with torch.no_grad():
            for block in model.model.layers:  # type: ignore[union-attr, operator]  # a Llama has them
                for layer in (block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj):
                    layer.weight[:, ::2] = 0
    elif kind != "dense":
        compress(model, Recipe(quantize=QuantizeStep(scheme=kind, group=32 if kind == "int4" else None)), None)
    return model


def rows(text: str) -> dict[str, str]:
    """What the tables of a card say, as a reader sees it."""
    found = {}
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    cells = [part for token, part in pairwise(tokens) if token.type == "td_open"]
    for label, value in zip(cells[::2], cells[1::2], strict=True):
        assert label.content not in found
        found[label.content] = "".join(child.content for child in value.children or [])
    return found


def test_what_was_measured_is_told_with_its_provenance(tmp_path: Path) -> None:
    text = card(tmp_path, RECORD)
    variant = sum(file.stat().st_size for file in (tmp_path / "variant").iterdir())
    (file,) = (tmp_path / "out").glob("*.gguf")
    found = rows(text)
    sizes = {name: found.pop(name) for name in list(found) if name.startswith("Size")}
    assert list(sizes.values()) == [
        f"{variant / 1000:.0f} kB ({variant:,} bytes)",
        f"{file.stat().st_size / 1000:.0f} kB ({file.stat().st_size:,} bytes)",
    ]
    assert found == {
        "Made from": "SmolLM2-135M-Instruct",
        "SHA-256 of its files": HASH,
        "Files": "SmolLM2-135M-Instruct.Q4_1.gguf",
        "Architecture": "LlamaForCausalLM",
        "Parameters": f"{sum(parameter.numel() for parameter in small_model().parameters()):,}",
        "Recipe": "Wanda 50%",
        # Of 64 × 96 three times half, of 64 × 128 and 64 × 64 twice none.
        "Zeros": "21.4% of the weights in the layers that can be pruned",
        "Codes": "none: weights are numbers",
        "Computed in": "float32",
        "Calibrated on": "my notes.txt, 8 windows of 256 tokens, SHA-256 9528",
        "Format": "one GGUF file in 16 bits (F16), for llama.cpp",
        "Perplexity": "72.2 (95% interval 61.1 to 84.8 over 16 windows)",
        "Bits per byte": "1.33 (95% interval 1.06 to 1.59 over 16 windows)",
        "Time to first token": "2,370 ms (median; 95th percentile 2,380 ms)",
        "Time per output token": "84.8 ms (median; 95th percentile 99.6 ms)",
        "Device": "Intel(R) Xeon(R) Processor",
        "Threads": "2",
        "Dtype": "bfloat16",
        "Runtime": "torch bfloat16",
        "Text": "articles, 16 windows of 512 tokens, SHA-256 a729",
        "Timed": "batch of 1, 256 tokens of prompt, 32 of output, 3 iterations, alone",
        "Date": "2026-12-07T12:31:55+00:00",
        "Versions": "torch 2.13.0+cpu, transformers 5.24.0",
        "Run": "deaf1d39c66e",
    }
    assert "# SmolLM2-135M-Instruct, Wanda 50%" in text
    assert "measured on the variant as Poda stores and runs it, and not on this export" in text
    assert "rounded to 4 bits" in text
    assert "licence" in text
    assert "the-name-of-my-machine" not in text
    assert "/home" not in text


@pytest.mark.parametrize("record", [None, {}, {"figures": {}, "provenance": {}}, {"figures": None}])
def test_what_was_not_measured_is_said_to_be_not_measured(record: dict[str, Any] | None, tmp_path: Path) -> None:
    text = card(tmp_path, record)
    found = rows(text)
    assert [found[name] for name in UNMEASURED] == ["not measured"] * 4
    assert "Device" not in found
    assert "They were measured with" not in text
    assert "There was no record of measurements" in text
    assert "kB" in found["Size on disk, as Poda stores it"]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), True, "12"])
def test_a_figure_that_is_no_number_was_not_measured(value: Any, tmp_path: Path) -> None:
    record = copy.deepcopy(RECORD)
    record["figures"]["perplexity"] = {"value": value, "low": 1.0, "high": 2.0}
    del record["figures"]["time_to_first_token"]
    record["figures"]["bits_per_byte"] = {"value": 1.0, "low": None, "high": 2.0}
    record["provenance"].pop("timing")
    found = rows(card(tmp_path, record))
    assert (found["Perplexity"], found["Time to first token"]) == ("not measured", "not measured")
    assert (found["Bits per byte"], found["Timed"]) == ("1.00", "not recorded")


def test_a_collapsed_model_is_said_to_have_collapsed(tmp_path: Path) -> None:
    record = copy.deepcopy(RECORD)
    record |= {"collapsed": True}
    record["figures"]["perplexity"] = {"value": None, "unit": "perplexity"}
    text = card(tmp_path, record)
    assert rows(text)["Perplexity"] == "none: the model no longer predicts text"
    assert "has collapsed" in text


def test_a_variant_that_says_nothing_of_itself_has_a_card(tmp_path: Path) -> None:
    found = rows(card(tmp_path, identity={}, recipe=""))
    missing = ("Made from", "Revision on the hub", "SHA-256 of its files", "Files", "Architecture", "Recipe")
    assert {found[name] for name in missing} == {"not recorded"}


@pytest.mark.parametrize(
    ("kind", "form", "said", "unsaid"),
    [
        ("wanda", "transformers", ["Zeros are stored"], ["Codes of", "rounded"]),
        ("wanda", "gguf", ["Zeros are stored", "16-bit floats"], ["Codes of"]),
        ("wanda", "gguf-q8_0", ["Zeros are stored", "was not measured"], ["Codes of"]),
        ("dense", "gguf", ["16-bit floats"], ["Zeros are stored", "Codes of"]),
        ("int8", "transformers", ["Codes of int8 are turned back"], ["Zeros are stored"]),
        ("int4", "gguf", ["Codes of int4 are turned back"], ["inputs of layers"]),
        ("int8-dynamic", "gguf", ["Codes of int8 are turned back", "rounds the inputs of layers"], []),
        ("int8", "compressed-tensors", [], ["Codes of", "256 levels"]),
        ("int8-dynamic", "compressed-tensors", ["256 levels"], ["Codes of"]),
    ],
)
def test_what_the_format_does_to_the_variant_is_said(
    kind: str, form: str, said: list[str], unsaid: list[str], tmp_path: Path
) -> None:
    text = card(tmp_path, RECORD, identity={**IDENTITY, "note": None}, kind=kind, form=form)
    assert [part for part in said if part not in text] == []
    assert [part for part in unsaid if part in text] == []


def test_scaled_positions_and_biases_are_said_to_be_for_llama_cpp(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    for name, options in {"rope": {"rope_parameters": rope}, "bias": {"attention_bias": True}, "none": {}}.items():
        save_small(tmp_path / name, model=small_model(**options))
        export_variant(tmp_path / name, tmp_path / f"{name}-out", "gguf")
        text = (tmp_path / f"{name}-out" / "README.md").read_text()
        assert ("leaves out scaled positions" in text) == (name != "none")


def test_a_smaller_model_says_what_it_was(tmp_path: Path) -> None:
    model = small_model()
    save_artifact(model, byte_tokenizer(), tmp_path / "variant", {}, dense=(7_654_321, 1_234_567))
    export_variant(tmp_path / "variant", tmp_path / "out")
    assert rows((tmp_path / "out" / "README.md").read_text())["Parameters before"] == "7,654,321"


def front(text: str) -> Any:
    """The YAML front matter of a card, None without."""
    return yaml.safe_load(text.split("---\n")[1]) if text.startswith("---\n") else None


@pytest.mark.parametrize("form", FORMATS)
def test_front_matter_says_what_is_known(form: str, tmp_path: Path) -> None:
    text = card(tmp_path, form=form, kind="int8")
    assert front(text) == (None if form.startswith("gguf") else {"library_name": "transformers"})
    hub = {**IDENTITY, "kind": "hub", "name": "HuggingFaceTB/SmolLM2-135M", "revision": "12fd25f"}
    text = card(tmp_path / "hub", identity=hub, form=form, kind="int8")
    assert front(text)["base_model"] == "HuggingFaceTB/SmolLM2-135M"
    assert rows(text)["Revision on the hub"] == "12fd25f"


HOSTILE = (
    "a | b | c",
    "# heading\n\n## another",
    "---\nlicense: mit\n---",
    "[click](https://example.com)",
    "![x](https://example.com/x.png)",
    "<script>alert(1)</script>",
    "<https://example.com> and https://example.com and www.example.com",
    "&lt;b&gt; &amp; &#60;",
    "`code` ```\nfence",
    "*bold* _it_ ~~gone~~ $x^2$ ==y==",
    "back\\slash\\| \\",
    "$(rm -rf) {{ jinja }} {% if %}",
    "right\u202eto left\u200b",
    "surrogate \udcff and nul \x00 and \x1b[31m",
    "owner/name\nbase_model: evil",
    "x" * 5000,
)


@pytest.mark.parametrize("kind", ["folder", "hub"])
@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_letters_and_no_markup(name: str, kind: str, tmp_path: Path) -> None:
    if "\udcff" in name:  # no JSON in UTF-8 has it: it can come with the record alone
        identity, shown = IDENTITY, IDENTITY["name"]
    else:
        identity, shown = {**IDENTITY, "name": name, "kind": kind, "source_file": name, "note": name}, None
    record = copy.deepcopy(RECORD)
    record["run"] = name
    record["provenance"] |= {"device_name": name, "versions": {name: name}, "date": name}
    record["provenance"]["evaluation"]["source"] = name
    text = card(tmp_path, record, identity=identity)
    assert front(text) is None
    assert max(map(len, text.splitlines())) < 10 * LONGEST
    assert text.replace("\n", "").isprintable()
    # As many tables, rows, headings and items as with names that are names.
    usual = card(tmp_path / "usual", RECORD)
    parser = MarkdownIt("commonmark").enable("table")
    structure = [[token.type for token in parser.parse(each)] for each in (text, usual)]
    if kind == "folder":
        assert structure[0] == structure[1]
    inside = {child.type for token in parser.parse(text) for child in token.children or []}
    assert inside <= {"text", "text_special"}
    assert not {"html_block", "fence", "code_block"} & set(structure[0])
    found = rows(text)
    printable = " ".join("".join(letter if letter.isprintable() else " " for letter in name).split())
    if len(printable) <= LONGEST:
        assert found["Device"] == printable
        assert found["Made from"] == (shown or printable)


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/home/me/models/My Model", "My Model"),
        ("C:\\Users\\me\\model", "model"),
        ("\\\\server\\share\\model\\", "model"),
        ("~/model", "model"),
        ("../model", "model"),
        ("owner/model", "owner/model"),
    ],
)
def test_of_a_path_only_the_last_part_is_told(path: str, last: str, tmp_path: Path) -> None:
    record = copy.deepcopy(RECORD)
    record["provenance"]["evaluation"]["source"] = path
    text = card(tmp_path, record, identity={**IDENTITY, "name": path, "source_file": path})
    found = rows(text)
    assert (found["Made from"], found["Files"]) == (last, last)
    assert found["Text"] == f"{last}, 16 windows of 512 tokens, SHA-256 a729"
    assert f"# {plain(last)}, Wanda 50%" in text
    assert "me/" not in text
    assert "Users" not in text
