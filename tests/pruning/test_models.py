"""Models from a folder, a GGUF file and the hub come as one result type, or say why they cannot."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pruning import models
from pruning.errors import InputError, RunError
from pruning.models import load_model, load_tokenizer
from pruning.sources import ModelReference, content_hash, parse_reference
from tests.pruning.folders import tiny_folder, write_gguf
from tests.pruning.tiny import CONFIGS, tiny_ids, tiny_model

LAYER_WEIGHTS = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 48
"""Query, key and value, output, and the three of the MLP, in one block of the tiny Llama."""


def _load(reference: ModelReference, tmp_path: Path, dtype: str = "float32") -> models.LoadedModel:
    return load_model(reference, device="cpu", dtype=dtype, cache=tmp_path / "cache")


def _no_network(*given: object, **named: object) -> None:
    raise AssertionError("nothing but a hub id may use the network")


def test_a_folder_loads_as_it_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.socket.connect", _no_network)
    saved = tiny_folder(tmp_path / "tiny")
    reference = parse_reference(str(tmp_path / "tiny"))
    loaded = _load(reference, tmp_path)
    assert torch.equal(loaded.model(tiny_ids()).logits, saved(tiny_ids()).logits)
    assert loaded.tokenizer("w5 w7").input_ids == [5, 7]
    assert (loaded.device, loaded.dtype, loaded.dtype_reason) == (
        torch.device("cpu"),
        torch.float32,
        "float32 was asked for",
    )
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    identity = loaded.identity
    assert (identity.name, identity.kind, identity.architecture) == ("tiny", "folder", "LlamaForCausalLM")
    assert (identity.revision, identity.note) == (None, None)
    assert identity.file_hash == content_hash(reference)
    assert identity.prunable_parameters == 3 * LAYER_WEIGHTS
    # The head is tied to the embedding, so the embedding counts once; seven norms of 32.
    assert identity.parameters == 96 * 32 + 3 * LAYER_WEIGHTS + 7 * 32
    assert identity.source_file == "model.safetensors"
    assert identity.source_bytes == (tmp_path / "tiny" / "model.safetensors").stat().st_size


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_loads(family: str, tmp_path: Path) -> None:
    saved = tiny_folder(tmp_path / family, family)
    loaded = _load(parse_reference(str(tmp_path / family)), tmp_path)
    assert torch.equal(loaded.model(tiny_ids()).logits, saved(tiny_ids()).logits)
    assert loaded.identity.parameters == sum(parameter.numel() for parameter in saved.parameters())


def test_the_dtype_asked_for_is_that_of_all_weights(tmp_path: Path) -> None:
    tiny_folder(tmp_path / "tiny")
    loaded = _load(parse_reference(str(tmp_path / "tiny")), tmp_path, "bfloat16")
    assert loaded.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}


def test_a_gguf_file_loads_and_tells_where_it_came_from(tmp_path: Path) -> None:
    model = tiny_model("llama")
    write_gguf(tmp_path / "tiny-Q8_0.gguf", model)
    loaded = _load(parse_reference(str(tmp_path / "tiny-Q8_0.gguf")), tmp_path)
    assert torch.equal(loaded.model(tiny_ids()).logits, model(tiny_ids()).logits)
    identity = loaded.identity
    assert (identity.name, identity.kind, identity.source_file) == ("tiny-Q8_0", "gguf", "tiny-Q8_0.gguf")
    assert identity.source_bytes == (tmp_path / "tiny-Q8_0.gguf").stat().st_size
    assert identity.note == "weights were rounded to 8 bits (Q8_0) before Poda got them"
    loaded.model.save_pretrained(tmp_path / "again")


def test_a_copy_damaged_beyond_its_header_is_made_again(tmp_path: Path) -> None:
    model = tiny_model("llama")
    write_gguf(tmp_path / "tiny.gguf", model)
    reference = parse_reference(str(tmp_path / "tiny.gguf"))
    _load(reference, tmp_path)
    (copy,) = (tmp_path / "cache").iterdir()
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    loaded = _load(reference, tmp_path)
    assert torch.equal(loaded.model(tiny_ids()).logits, model(tiny_ids()).logits)


def test_a_hub_model_has_the_commit_as_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = tmp_path / "snapshots" / ("c" * 40)
    tiny_folder(commit)
    monkeypatch.setattr(models, "download", lambda reference, progress: commit)
    loaded = _load(parse_reference("owner/name@main"), tmp_path)
    assert (loaded.identity.name, loaded.identity.revision) == ("owner/name", "c" * 40)
    assert loaded.identity.file_hash is None


def test_what_the_hub_sent_is_checked_like_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "hub"
    tiny_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {}}))
    monkeypatch.setattr(models, "download", lambda reference, progress: folder)
    with pytest.raises(InputError, match="quantized already"):
        _load(parse_reference("owner/name"), tmp_path)


def _rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_missing_and_misshapen_weights_are_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    for changes in ({name: None}, {name: torch.zeros(48, 31)}):
        tiny_folder(tmp_path / "tiny")
        _rewrite(tmp_path / "tiny", **changes)
        with pytest.raises(InputError, match=r"tiny.*up_proj"):
            _load(parse_reference(str(tmp_path / "tiny")), tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "vit"},
        {"model_type": "no-such-model"},
        {"model_type": None},
        {"model_type": 3},
        {"hidden_size": "wide"},
        {"hidden_size": -3},
        {"hidden_act": "no-such-activation"},
    ],
)
def test_a_configuration_that_is_no_causal_model_is_refused(tmp_path: Path, config: dict[str, object]) -> None:
    tiny_folder(tmp_path / "tiny")
    path = tmp_path / "tiny" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": None, **config}))
    with pytest.raises(InputError, match="tiny"):
        _load(parse_reference(str(tmp_path / "tiny")), tmp_path)


def test_a_model_without_blocks_is_refused(tmp_path: Path) -> None:
    tiny_folder(tmp_path / "tiny")
    path = tmp_path / "tiny" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 0}))
    with pytest.raises(InputError, match="no list of decoder blocks"):
        _load(parse_reference(str(tmp_path / "tiny")), tmp_path)


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "tiny")
    with pytest.raises(InputError, match=r"the tokenizer in .*tiny cannot be read.*tokenizer\.json"):
        load_tokenizer(tmp_path / "tiny")
    (tmp_path / "tiny" / "tokenizer.json").write_text("{")
    (tmp_path / "tiny" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InputError, match="the tokenizer in"):
        load_tokenizer(tmp_path / "tiny")


def test_too_little_memory_is_said_with_the_lever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_folder(tmp_path / "tiny")

    def full(*given: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(RunError, match=r"tiny does not fit in memory: choose a smaller model.*--dtype bfloat16"):
        _load(parse_reference(str(tmp_path / "tiny")), tmp_path)


def test_a_device_that_is_not_here_is_said_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no device"):
        load_model(parse_reference("owner/name"), device="toaster", dtype="auto", cache=tmp_path)


@pytest.mark.parametrize(("resident", "where"), [(True, "meta"), (False, "cpu")])
def test_a_model_stays_on_the_host_where_work_takes_it_to_the_device_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resident: bool, where: str
) -> None:
    """A device without memory of its own stands in for a GPU."""
    tiny_folder(tmp_path / "tiny")
    monkeypatch.setattr(models, "choose_device", lambda name: torch.device("meta"))
    asked = {"device": "cuda", "dtype": "float32", "cache": tmp_path / "cache"}
    loaded = load_model(parse_reference(str(tmp_path / "tiny")), **asked, resident=resident)
    assert loaded.device == torch.device("meta")
    assert {parameter.device.type for parameter in loaded.model.parameters()} == {where}
