"""A variant comes back bit for bit, in as few bytes as its format promises, or is refused by name."""

import errno
import json
import math
import shutil
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from pruning import artifact
from pruning.anatomy import prunable_layers
from pruning.artifact import read_header, rebuild, save_artifact, stored_sizes
from pruning.artifact_header import HEADER_KEY
from pruning.compress import compress
from pruning.errors import InputError, RunError
from pruning.export import export_variant
from pruning.models import load_model
from pruning.packing import same_bits
from pruning.quantize.int8 import Int8Linear
from pruning.recipe import PruneStep, QuantizeStep, Recipe
from pruning.sources import check_folder, parse_reference
from tests.pruning.folders import tiny_tokenizer
from tests.pruning.tiny import CONFIGS, LAYERS, tiny_ids, tiny_model

TOKENIZER = tiny_tokenizer()


def recipe(sparsity: float = 0.0, int8: bool = False) -> Recipe:
    return Recipe(
        prune=PruneStep(method="magnitude", sparsity=sparsity) if sparsity else None,
        quantize=QuantizeStep(scheme="int8") if int8 else None,
    )


def save(
    folder: Path,
    family: str = "llama",
    dtype: torch.dtype = torch.bfloat16,
    sparsity: float = 0.5,
    int8: bool = False,
) -> nn.Module:
    model = tiny_model(family, dtype=dtype)
    compress(model, recipe(sparsity, int8), None)
    save_artifact(model, TOKENIZER, folder, {"recipe": "as asked"})
    return model


def assert_same(found: nn.Module, saved: nn.Module) -> None:
    expected, state = saved.state_dict(), found.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(state[name], tensor), name
    assert {name: buffer.dtype for name, buffer in found.named_buffers()} == {
        name: buffer.dtype for name, buffer in saved.named_buffers()
    }
    assert all(same_bits(*pair) for pair in zip(_buffers(found), _buffers(saved), strict=True))
    assert not any(tensor.is_meta for tensor in (*found.parameters(), *found.buffers()))


def _buffers(model: nn.Module) -> Iterator[Tensor]:
    return (buffer for _, buffer in sorted(model.named_buffers()))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_comes_back_bit_for_bit(family: str, dtype: torch.dtype, int8: bool, tmp_path: Path) -> None:
    saved = save(tmp_path / "variant", family, dtype, int8=int8)
    found, _ = rebuild(tmp_path / "variant")
    assert_same(found, saved)
    with torch.no_grad():
        assert torch.equal(found(tiny_ids()).logits, saved(tiny_ids()).logits)
    assert not found.training
    assert not any(parameter.requires_grad for parameter in found.parameters())
    tied = saved.get_input_embeddings().weight is saved.get_output_embeddings().weight
    assert (found.get_input_embeddings().weight is found.get_output_embeddings().weight) == tied


def test_one_variant_is_always_the_same_bytes(tmp_path: Path) -> None:
    """The library writes the entries of the metadata in an order of chance."""
    model = tiny_model("llama", dtype=torch.bfloat16)
    written = set()
    for place in range(8):
        save_artifact(model, TOKENIZER, tmp_path / str(place), {"recipe": "as asked"})
        written.add((tmp_path / str(place) / "variant.safetensors").read_bytes())
    (found,) = written
    assert found[8:].startswith(b'{"__metadata__":{"sha256":"')


def test_bit_patterns_that_arithmetic_cannot_tell_apart_come_back(tmp_path: Path) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    weight = prunable_layers(model)[0].weight()
    with torch.no_grad():
        weight.zero_()
        weight[0, :4] = torch.tensor([-0.0, float("nan"), float("inf"), -float("inf")])
        weight[1, 0] = 2.0**-133
    save_artifact(model, TOKENIZER, tmp_path / "variant", {})
    found, layout = rebuild(tmp_path / "variant")
    assert same_bits(prunable_layers(found)[0].weight(), weight)
    record = layout.layers[prunable_layers(model)[0].name]
    assert (record.storage, record.zeros) == ("bitmask", 32 * 32 - 5)


def test_a_layer_takes_the_smaller_of_dense_and_bitmask(tmp_path: Path) -> None:
    """A bitmask of n weights of b bytes pays off from one zero in 8 b weights on: n/8 + (n - z) b < n b."""
    model = tiny_model("llama", dtype=torch.bfloat16)
    enough, short, _ = layers = prunable_layers(model)[:3]
    assert [layer.weight().numel() for layer in layers] == [1024, 512, 512]
    with torch.no_grad():
        enough.weight().view(-1)[: 1024 // 16 + 1] = 0
        short.weight().view(-1)[: 512 // 16] = 0
    save_artifact(model, TOKENIZER, tmp_path / "variant", {})
    _, layout = rebuild(tmp_path / "variant")
    assert layout.layers[enough.name].storage == "bitmask"
    assert layout.layers[short.name].storage == "dense"
    assert layout.layers[short.name].zeros == 32


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9])
def test_sizes_follow_from_the_format(dtype: torch.dtype, sparsity: float, int8: bool, tmp_path: Path) -> None:
    model = tiny_model("llama", dtype=dtype)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    compress(model, recipe(sparsity, int8), None)
    save_artifact(model, TOKENIZER, tmp_path / "variant", {})
    item, expected, weights = (1 if int8 else dtype.itemsize), 0, 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Int8Linear) and name != "lm_head":
            values = (module.codes if int8 else module.weight).flatten().tolist()
            kept = sum(value != 0 for value in values)
            expected += min(len(values) * item, math.ceil(len(values) / 8) + kept * item)
            expected += module.out_features * dtype.itemsize if int8 else 0
            weights += len(values)
    sizes = stored_sizes(tmp_path / "variant")
    assert sizes.pruned_layer_bytes == expected
    assert sizes.pruned_layer_weights == weights
    assert sizes.dense16_pruned_layer_bytes == 2 * weights
    assert (sizes.parameters, sizes.dense16_bytes) == (parameters, 2 * parameters)
    files = list((tmp_path / "variant").iterdir())
    assert sizes.total_bytes == sum(file.stat().st_size for file in files)
    assert sizes.weight_file_bytes == (tmp_path / "variant" / "variant.safetensors").stat().st_size
    with safe_open(tmp_path / "variant" / "variant.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    rest = sum(tensor.nbytes for name, tensor in model.state_dict().items() if "embed" in name or "norm" in name)
    assert stored == expected + rest


def test_the_gates_of_half_the_weights_gone(tmp_path: Path) -> None:
    """Half of the weights in 16 bits: 1/16 + 1/2 of dense. In int8, with a scale a row: 1/16 + 1/4 + 1/columns."""
    for int8, gate in ((False, 0.60), (True, 0.35)):
        model = tiny_model("llama", dtype=torch.bfloat16)
        compress(model, recipe(0.5, int8), None)
        save_artifact(model, TOKENIZER, tmp_path / "variant", {})
        sizes = stored_sizes(tmp_path / "variant")
        assert sizes.pruned_layer_bytes <= gate * sizes.dense16_pruned_layer_bytes


def test_the_folder_alone_is_enough_and_holds_no_more(tmp_path: Path) -> None:
    saved = save(tmp_path / "here" / "variant", int8=True)
    shutil.move(tmp_path / "here" / "variant", tmp_path / "moved")
    assert sorted(file.name for file in (tmp_path / "moved").iterdir()) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "variant.safetensors",
    ]
    found, _ = rebuild(tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved")
    assert_same(found, saved)
    with torch.no_grad():
        assert torch.equal(found(tiny_ids()).logits, saved(tiny_ids()).logits)


def test_the_header_says_what_the_caller_and_the_format_say(tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    save_artifact(model, TOKENIZER, tmp_path / "variant", {"recipe": "Wanda 50%", "identity": {"name": "tiny"}})
    header = read_header(tmp_path / "variant")
    assert (header["recipe"], header["identity"]) == ("Wanda 50%", {"name": "tiny"})
    assert (header["format"], header["version"], header["dtype"]) == ("poda-variant", 3, "float32")
    assert len(header["layers"]) == 3 * LAYERS["gpt2"]
    assert header["layers"]["transformer.h.0.attn.c_attn"]["shape"] == [96, 32]
    with pytest.raises(ValueError, match="layers in the header"):
        save_artifact(model, TOKENIZER, tmp_path / "other", {"layers": []})


def test_saving_again_replaces_the_variant(tmp_path: Path) -> None:
    save(tmp_path / "variant", "llama")
    saved = save(tmp_path / "variant", "gpt2")
    assert_same(rebuild(tmp_path / "variant")[0], saved)
    assert [path.name for path in tmp_path.iterdir()] == ["variant"]


# What goes wrong while writing


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(artifact, "save_file", full)
        with pytest.raises(RunError, match=r"disk is full: the variant variant.*remove variants.*PODA_HOME"):
            save(tmp_path / "variant")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(RunError, match=r"too full for the variant variant"):
        save(tmp_path / "variant")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("int8", [False, True])
def test_what_reads_back_otherwise_is_not_kept(int8: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one tensor at a time, written wrong."""
    save(tmp_path / "right", int8=int8)
    names = list(load_file(tmp_path / "right" / "variant.safetensors"))
    assert len(names) > 40

    for name in names[:: 7 if int8 else 5]:

        def save_wrong(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str], wrong: str = name) -> None:
            changed = {key: tensor.clone() for key, tensor in tensors.items()}
            changed[wrong].view(-1).view(torch.uint8)[0] ^= 1
            save_file(changed, path, metadata)

        with monkeypatch.context() as patched:
            patched.setattr(artifact, "save_file", save_wrong)
            with pytest.raises((RunError, InputError), match=r"read back|damaged"):
                save(tmp_path / "wrong", int8=int8)
        assert not (tmp_path / "wrong").exists()


# What is wrong with a folder that is read


def header_of(folder: Path) -> dict[str, object]:
    with safe_open(folder / "variant.safetensors", "pt") as file:
        own: dict[str, object] = json.loads(file.metadata()[HEADER_KEY])
    return own


def change(folder: Path, **header: object) -> None:
    """Rewrite the variant with entries of its header replaced."""
    rewrite(folder, {**header_of(folder), **header})


def rewrite(folder: Path, header: dict[str, object], tensors: dict[str, Tensor] | None = None) -> None:
    """Write the variant with that header, with digests that are right for what it has become."""
    path = folder / "variant.safetensors"
    if header.get("files") == header_of(folder).get("files") != {}:
        others = (file for file in folder.iterdir() if file != path)
        header = {**header, "files": {file.name: sha256(file.read_bytes()).hexdigest() for file in others}}
    save_file(tensors or load_file(path), path, {HEADER_KEY: json.dumps(header), "sha256": 64 * "0"})
    written = path.read_bytes()
    assert written.count(64 * b"0") == 1
    path.write_bytes(written.replace(64 * b"0", sha256(written).hexdigest().encode()))


def change_tensors(folder: Path, **changes: Tensor | None) -> None:
    tensors = load_file(folder / "variant.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    rewrite(folder, header_of(folder), tensors)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"version": 4}, "has version 4, and this Poda reads poda-variant versions 1 to 3"),
        ({"version": 1, "dense": {"parameters": 9, "layer_weights": 9}}, "version 1 has no"),
        ({"dense": {"parameters": 9}}, r"dense\.layer_weights"),
        ({"format": "another"}, "has format 'another'"),
        ({"dtype": "int3"}, "dtype"),
        ({"parameters": 0}, "parameters"),
        ({"parameters": "many"}, "parameters"),
        ({"layers": {}}, "layers"),
        ({"layers": {"x": {"storage": "zip", "shape": [1, 1], "zeros": 0}}}, r"layers\.x\.storage"),
        ({"layers": {"x": {"storage": "dense", "shape": [1, 1], "zeros": 0}}}, r"x\.weight is missing"),
        ({"masked": {"x": {"shape": [8], "dtype": "F32", "kept": 1}}}, "the mask of x is missing"),
        ({"masked": {"x": {"shape": [-8], "dtype": "F32", "kept": 1}}}, r"masked\.x\.shape"),
        ({"files": {"config.json": "0"}}, r"files.*config\.json"),
        ({"files": {"../config.json": 64 * "1"}}, r"files\."),
        ({"masked": {}}, r"is stored as bitmask, and its tensors are not"),
        ({"tied": {"a": "b"}}, "a is tied to b, which is missing"),
        ({"more": 1}, "more"),
    ],
)
def test_headers_that_say_something_else_are_refused(header: dict[str, object], why: str, tmp_path: Path) -> None:
    save(tmp_path / "variant")
    change(tmp_path / "variant", **header)
    for read in (read_header, stored_sizes, rebuild):
        with pytest.raises(InputError, match=why):
            read(tmp_path / "variant")


QUERY = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({f"{QUERY}.weight.mask": None}, "the mask of .*q_proj.weight is missing"),
        ({f"{QUERY}.weight.values": None}, "the values of .*q_proj.weight is missing"),
        ({f"{QUERY}.weight.mask": torch.zeros(127, dtype=torch.uint8)}, "does not cover its 1,024 elements"),
        ({f"{QUERY}.weight.mask": torch.zeros(128, dtype=torch.int8)}, "does not cover"),
        ({f"{QUERY}.weight.values": torch.zeros(511).bfloat16()}, "keeps 512 values in BF16, and others are stored"),
        ({f"{QUERY}.weight.values": torch.zeros(512)}, "keeps 512 values in BF16, and others are stored"),
        ({f"{QUERY}.weight.mask": torch.zeros(128, dtype=torch.uint8)}, "0 bits set for 512 values"),
        ({f"{QUERY}.weight.mask": torch.full((128,), 255, dtype=torch.uint8)}, "1,024 bits set for 512 values"),
        ({"model.norm.weight": None}, r"lacks model\.norm\.weight"),
        ({"model.norm.weight": torch.zeros(31).bfloat16()}, r"norm\.weight of shape \(31,\) where .* \(32,\)"),
        ({"model.more.weight": torch.zeros(3)}, r"has model\.more\.weight, which config\.json does not know"),
    ],
)
def test_tensors_that_do_not_fit_are_named(changes: dict[str, Tensor | None], why: str, tmp_path: Path) -> None:
    save(tmp_path / "variant")
    change_tensors(tmp_path / "variant", **changes)
    with pytest.raises(InputError, match=why):
        rebuild(tmp_path / "variant")


def test_quantized_layers_that_do_not_fit_are_named(tmp_path: Path) -> None:
    save(tmp_path / "variant", int8=True)
    change_tensors(tmp_path / "variant", **{f"{QUERY}.scale": torch.zeros(31).bfloat16()})
    with pytest.raises(InputError, match="no scale for each of its 32 rows"):
        rebuild(tmp_path / "variant")
    change_tensors(tmp_path / "variant", **{f"{QUERY}.scale": None})
    with pytest.raises(InputError, match="no scale for each of its 32 rows"):
        rebuild(tmp_path / "variant")


def test_a_configuration_of_another_model_is_found_out(tmp_path: Path) -> None:
    save(tmp_path / "variant", int8=True)
    path = tmp_path / "variant" / "config.json"
    config = json.loads(path.read_text())
    for changes, why in (
        ({"num_hidden_layers": 4}, r"lacks model\.layers\.3"),
        ({"num_hidden_layers": 2}, r"no layer model\.layers\.2|does not know"),
        ({"hidden_size": 64}, "of shape"),
        ({"model_type": "vit"}, r"config\.json"),
        ({"hidden_size": 10**15}, r"config\.json|memory"),
    ):
        path.write_text(json.dumps({**config, **changes}))
        change(tmp_path / "variant")
        with pytest.raises((InputError, RunError), match=why):
            rebuild(tmp_path / "variant")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_file_cut_short_is_refused(share: float, tmp_path: Path) -> None:
    save(tmp_path / "variant")
    path = tmp_path / "variant" / "variant.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    for read in (read_header, stored_sizes, rebuild):
        with pytest.raises(InputError, match=r"variant\.safetensors is damaged or cut short"):
            read(tmp_path / "variant")


def test_folders_that_are_no_variant_say_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no variant"):
        rebuild(tmp_path / "nowhere")
    (tmp_path / "model").mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "model" / "variant.safetensors")
    with pytest.raises(InputError, match="was not written by Poda"):
        rebuild(tmp_path / "model")


def test_transformers_does_not_take_a_variant_for_its_own(tmp_path: Path) -> None:
    """It would find the packed layers missing and fill them with random numbers."""
    save(tmp_path / "variant")
    with pytest.raises(OSError, match=r"no file named|does not appear"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "variant")
    with pytest.raises(InputError, match="made by Poda"):
        check_folder(tmp_path / "variant")


# Export


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_exports_give_the_same_logits_in_transformers(family: str, int8: bool, tmp_path: Path) -> None:
    saved = save(tmp_path / "variant", family, torch.float32, int8=int8)
    export_variant(tmp_path / "variant", tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype="auto")
    with torch.no_grad():
        assert torch.equal(model(tiny_ids()).logits, saved(tiny_ids()).logits)
    tied = saved.get_input_embeddings().weight is saved.get_output_embeddings().weight
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    loaded = load_model(parse_reference(str(tmp_path / "plain")), device="cpu", dtype="float32", cache=tmp_path)
    for layer, was in zip(prunable_layers(loaded.model), prunable_layers(model), strict=True):
        assert torch.equal(layer.weight(), was.weight())


def test_an_export_keeps_dtype_and_tokenizer(tmp_path: Path) -> None:
    save(tmp_path / "variant", dtype=torch.bfloat16, int8=True)
    export_variant(tmp_path / "variant", tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype="auto")
    assert AutoTokenizer.from_pretrained(tmp_path / "plain")("w3 w9").input_ids == [3, 9]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_an_export_does_not_overwrite(tmp_path: Path) -> None:
    save(tmp_path / "variant")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    for target in (tmp_path / "full", tmp_path / "full" / "mine", tmp_path / "variant"):
        with pytest.raises(InputError, match="is not empty"):
            export_variant(tmp_path / "variant", target)
    (tmp_path / "empty").mkdir()
    export_variant(tmp_path / "variant", tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()
    with pytest.raises(InputError, match="is no variant"):
        export_variant(tmp_path / "nowhere", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_the_bundled_model_meets_the_gates(tmp_path: Path) -> None:
    """Half of each layer's weights gone: in 16 bits at most 0.60 of dense, with int8 at most 0.35; bit for bit."""
    for int8, gate in ((False, 0.60), (True, 0.35)):
        loaded = load_model(parse_reference("bundled"), device="cpu", dtype="bfloat16", cache=tmp_path / "cache")
        with torch.no_grad():
            for layer in prunable_layers(loaded.model):
                weight = layer.weight()
                removed = weight.abs().topk(weight.shape[1] // 2, dim=1, largest=False).indices
                weight.scatter_(1, removed, 0)
        compress(loaded.model, recipe(0, int8), None)
        save_artifact(loaded.model, loaded.tokenizer, tmp_path / "variant", {})
        sizes = stored_sizes(tmp_path / "variant")
        assert sizes.dense16_pruned_layer_bytes == 2 * 106_168_320
        assert sizes.pruned_layer_bytes <= gate * sizes.dense16_pruned_layer_bytes
        found, _ = rebuild(tmp_path / "variant")
        assert_same(found, loaded.model)
