"""What a person writes for a model is understood, or answered with the cause and the next step."""

import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from pruning import sources
from pruning.errors import InputError
from pruning.sources import (
    SUGGESTIONS,
    ModelReference,
    bundled_file,
    check_config,
    content_hash,
    describe,
    gguf_note,
    input_widths,
    parse_reference,
)
from tests.pruning.folders import tiny_folder, write_gguf
from tests.pruning.tiny import CONFIGS, tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_folder(tmp_path / "tiny")
    return tmp_path / "tiny"


def _edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_each_kind_is_recognized(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    monkeypatch.chdir(tmp_path)
    assert parse_reference(" bundled ") == ModelReference(kind="bundled", location="bundled")
    assert parse_reference("tiny") == ModelReference(kind="folder", location=str(folder.resolve()))
    assert parse_reference("./tiny.gguf") == ModelReference(
        kind="gguf", location=str((tmp_path / "tiny.gguf").resolve())
    )
    assert parse_reference("owner/name") == ModelReference(kind="hub", location="owner/name")
    tagged = parse_reference("Owner-1/na_me.v2@refs/pr/1")
    assert tagged == ModelReference(kind="hub", location="Owner-1/na_me.v2", revision="refs/pr/1")
    assert str(tagged) == "Owner-1/na_me.v2@refs/pr/1"


def test_what_exists_is_taken_for_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_folder(tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    assert parse_reference("owner/name").kind == "folder"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no model was named"),
        ("   ", "no model was named"),
        ("nowhere", "no folder here and no hub id"),
        ("/no/where", "no such folder: /no/where"),
        ("./here", "no such folder"),
        ("~/nobody-has-this", "no such folder"),
        ("a/b/c", "no such folder"),
        ("owner/", "no such folder"),
        ("C:\\models\\tiny", "no such folder"),
        ("tiny.gguf", "no such file"),
        ("owner/tiny.gguf", "no such file"),
        ("owner/pytorch_model.bin", "no such file"),
        ("owner/na me", "no hub id"),
        ("owner/na--me", "no hub id"),
        ("owner/..", "no such folder|no hub id"),
        ("owner/" + "n" * 100, "no hub id"),
        ("owner/name@", "is no revision"),
        ("owner/name@../x", "is no revision"),
        ("owner/name@a b", "is no revision"),
        ("x" * 5000, "neither a path nor a hub id|no hub id"),
        ("nul\0", "neither a path nor a hub id|no hub id"),
    ],
)
def test_what_is_nothing_is_said_to_be_nothing(text: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        parse_reference(text)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("model.bin", pickle.dumps({}), "Pickled weights are never opened.*save_pretrained"),
        ("model.pt", b"", "Pickled weights are never opened"),
        ("model.safetensors", b"", "give the folder that also has"),
        ("model.gguf", b"not", "named .gguf and is none"),
        ("model.txt", b"GGUF", "is no model"),
        ("model.onnx", b"", "is no model"),
    ],
)
def test_files_that_are_no_model_say_what_they_are(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=f"{name}.*{why}"):
        parse_reference(str(tmp_path / name))


def test_folders_without_whole_weights_say_what_is_missing(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    with pytest.raises(InputError, match="damaged or cut short"):
        parse_reference(str(folder))
    weights.unlink()
    with pytest.raises(InputError, match=r"has no weights: model\.safetensors"):
        parse_reference(str(folder))
    (folder / "x.gguf").touch()
    with pytest.raises(InputError, match=r"give the file instead, .*x\.gguf"):
        parse_reference(str(folder))
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(InputError, match="Pickled weights are never opened"):
        parse_reference(str(folder))
    (folder / "adapter_config.json").touch()
    with pytest.raises(InputError, match="adapter"):
        parse_reference(str(folder))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(InputError, match=r"one\.safetensors is missing"):
        parse_reference(str(folder))
    index.write_text(json.dumps({"weight_map": {"a": "../tiny/config.json"}}))
    with pytest.raises(InputError, match="is missing"):
        parse_reference(str(folder))
    index.write_text("{}")
    with pytest.raises(InputError, match="lists no weights"):
        parse_reference(str(folder))


def test_pickled_weights_beside_safetensors_do_not_matter(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert parse_reference(str(folder)).kind == "folder"


def test_a_folder_needs_a_configuration(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")
    with pytest.raises(InputError, match="no JSON object"):
        parse_reference(str(folder))
    (folder / "config.json").write_bytes(b"\xff{")
    with pytest.raises(InputError, match="is no JSON"):
        parse_reference(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"no config\.json"):
        parse_reference(str(folder))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "BertForMaskedLM and no causal"),
        ({"architectures": ["ViTForImageClassification"]}, "no causal"),
        ({"architectures": None, "model_type": "t5", "is_encoder_decoder": True}, "t5 and no causal"),
        ({"auto_map": {"AutoModel": "x.Y"}, "model_type": "own_code"}, r"own code.*own_code.*runs no code"),
        ({"auto_map": {}, "model_type": None}, "own code"),
        ({"auto_map": {}, "model_type": "../llama"}, "own code"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized already"),
    ],
)
def test_models_that_cannot_be_pruned_are_refused_with_the_reason(
    folder: Path, changes: dict[str, object], why: str
) -> None:
    _edit(folder / "config.json", **changes)
    with pytest.raises(InputError, match=why):
        parse_reference(str(folder))


def test_own_code_beside_a_model_that_transformers_has_does_not_matter(folder: Path) -> None:
    _edit(folder / "config.json", auto_map={"AutoModel": "x.Y"})
    assert parse_reference(str(folder)).kind == "folder"


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_passes(family: str) -> None:
    model = tiny_model(family)
    check_config({**model.config.to_dict(), "architectures": [type(model).__name__]}, family)


def test_a_variant_is_not_taken_for_a_model(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / sources.VARIANT)
    with pytest.raises(InputError, match="variant made by Poda: export it first"):
        parse_reference(str(folder))


def test_the_hash_is_of_the_content(folder: Path, tmp_path: Path) -> None:
    reference = parse_reference(str(folder))
    first = content_hash(reference)
    assert first is not None
    assert len(first) == 64
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "README.md").write_text("says nothing of the weights")
    assert content_hash(parse_reference(str(copy))) == first
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        path = copy / name
        before = path.read_bytes()
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        assert content_hash(ModelReference(kind="folder", location=str(copy))) != first, name
        path.write_bytes(before)
    assert content_hash(parse_reference(str(copy))) == first
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    expected = hashlib.sha256((tmp_path / "tiny.gguf").read_bytes()).hexdigest()
    assert content_hash(parse_reference(str(tmp_path / "tiny.gguf"))) == expected
    assert content_hash(parse_reference("owner/name")) is None


def test_a_file_is_hashed_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    reference = parse_reference(str(tmp_path / "tiny.gguf"))
    hashed = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *given: (hashed.append(1), digest(*given))[1])
    first = content_hash(reference)
    assert content_hash(reference) == first
    assert len(hashed) == 1
    content = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(tmp_path / "tiny.gguf", ns=(1, 1))
    assert content_hash(reference) != first
    assert len(hashed) == 2


def test_cards_tell_what_the_files_tell(folder: Path, tmp_path: Path) -> None:
    parameters = sum(parameter.numel() for parameter in tiny_model("llama").parameters())
    card = describe(parse_reference(str(folder)))
    assert (card.title, card.kind, card.parameters) == ("tiny", "folder", parameters)
    assert card.source_bytes == (folder / "model.safetensors").stat().st_size
    write_gguf(tmp_path / "small-Q4_1.gguf", tiny_model("llama"))
    card = describe(parse_reference(str(tmp_path / "small-Q4_1.gguf")))
    assert (card.title, card.parameters) == ("small-Q4_1", parameters)
    assert card.note == "weights were rounded to 4 bits (Q4_1) before Poda got them"
    known, unknown = describe(parse_reference(SUGGESTIONS[0].name)), describe(parse_reference("owner/name"))
    assert (known.parameters, known.source_bytes) == (SUGGESTIONS[0].parameters, None)
    assert (unknown.title, unknown.parameters) == ("owner/name", None)


def test_widths_are_those_of_layers_in_blocks(folder: Path, tmp_path: Path) -> None:
    assert input_widths(parse_reference("bundled")) == (576, 1536)
    assert input_widths(parse_reference("owner/name")) == ()
    config = tiny_model("llama").config
    assert input_widths(parse_reference(str(folder))) == tuple(sorted({config.hidden_size, config.intermediate_size}))
    tiny_model("gpt2").save_pretrained(tmp_path / "gpt2")
    assert input_widths(parse_reference(str(tmp_path / "gpt2"))) == ()


def test_weights_in_parts_are_counted_together(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "tiny", max_shard_size="20KB")
    parts = list((tmp_path / "tiny").glob("*.safetensors"))
    assert len(parts) > 1
    card = describe(parse_reference(str(tmp_path / "tiny")))
    assert card.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert card.source_bytes == sum(part.stat().st_size for part in parts)


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("m.Q4_1.gguf", "weights were rounded to 4 bits (Q4_1) before Poda got them"),
        ("m-q5_k_m.gguf", "weights were rounded to 5 bits (Q5_K_M) before Poda got them"),
        ("m.IQ2_XS.gguf", "weights were rounded to 2 bits (IQ2_XS) before Poda got them"),
        ("m-f16.gguf", "weights came as a GGUF file"),
        ("m.gguf", "weights came as a GGUF file"),
    ],
)
def test_rounding_is_told_by_the_name(name: str, note: str) -> None:
    assert gguf_note(Path(name)) == note


def test_the_bundled_model_describes_itself() -> None:
    card = describe(parse_reference("bundled"))
    assert card.title == "SmolLM2-135M-Instruct"
    assert card.parameters == 134_515_008
    assert card.source_bytes == bundled_file().stat().st_size
    assert card.note is not None
    assert "4 bits (Q4_1)" in card.note


def test_without_its_package_the_bundled_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BUNDLED_PACKAGE", "no_such_package")
    with pytest.raises(InputError, match="offline-packages"):
        bundled_file()


def test_suggestions_are_hub_ids_from_small_to_large() -> None:
    assert [parse_reference(suggestion.name).kind for suggestion in SUGGESTIONS] == ["hub"] * len(SUGGESTIONS)
    sizes = [suggestion.parameters for suggestion in SUGGESTIONS]
    assert sizes == sorted(sizes)
    assert {suggestion.name.split("/")[0] for suggestion in SUGGESTIONS if suggestion.gated} == {"google", "meta-llama"}


def test_nothing_here_imports_torch() -> None:
    code = (
        "import sys; from pruning.sources import *; from pruning.artifact_format import *\n"
        "r = parse_reference('bundled'); describe(r); content_hash(r)\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy', 'datasets')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
