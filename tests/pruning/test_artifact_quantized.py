"""Every form a variant is stored in: read by hand from the bytes as the format says, counted, and read back."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from pruning.anatomy import prunable_layers
from pruning.artifact import rebuild, save_artifact, stored_sizes
from pruning.artifact_format import read_layout
from pruning.compress import compress
from pruning.errors import InputError
from pruning.packing import same_bits
from pruning.quantize import SCHEMES
from pruning.quantize.layer import QuantizedLinear
from pruning.recipe import Pattern, PruneStep, QuantizeStep, Recipe
from tests.pruning.folders import tiny_tokenizer
from tests.pruning.test_artifact import assert_same, change, change_tensors, header_of, rewrite
from tests.pruning.tiny import tiny_ids, tiny_model

TOKENIZER = tiny_tokenizer()
LAYER = "model.layers.1.mlp.down_proj"

Plain = npt.NDArray[np.float64]


def wide_model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Layers of 128 and 256 inputs, so that every group divides them."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def pruned(share: str | None) -> PruneStep | None:
    if share is None:
        return None
    if ":" in share:
        pattern = Pattern.parse(share)
        return PruneStep(method="magnitude", sparsity=pattern.sparsity, pattern=pattern)
    return PruneStep(method="magnitude", sparsity=float(share))


def save(
    folder: Path, share: str | None, scheme: str | None, group: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    model = wide_model(dtype)
    step = QuantizeStep(scheme=scheme, group=group) if scheme is not None else None
    compress(model, Recipe(prune=pruned(share), quantize=step), None)
    save_artifact(model, TOKENIZER, folder, {"recipe": "as asked"})
    return model


FORMS = [
    (None, None, None, "dense"),
    ("0.5", None, None, "bitmask"),
    ("2:4", None, None, "n:m"),
    (None, "int8", None, "int8"),
    (None, "int8-dynamic", None, "int8"),
    ("0.5", "int8", None, "bitmask+int8"),
    ("2:4", "int8", None, "n:m+int8"),
    *((None, "int4", group, "int4") for group in (32, 64, 128)),
    *(("0.6", "int4", group, "bitmask+int4") for group in (32, 64, 128)),
    # Rounding makes more zeros, and a mask takes as many bits as the indices of 2:4.
    ("2:4", "int4", 64, "bitmask+int4"),
    (None, "float8", None, "float8"),
    ("0.5", "float8", None, "bitmask+float8"),
]


# Reads the bytes as pruning.artifact_format says, with nothing of Poda's.


def raw(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[str, list[int], bytes]]]:
    """The header of a variant, and type, shape and bytes of its tensors."""
    data = (folder / "variant.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    header = json.loads(entries.pop("__metadata__")["poda"])
    body = data[8 + length :]
    return header, {
        name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])]) for name, entry in entries.items()
    }


def float8(byte: int) -> float:
    """E4M3: a sign, four bits of exponent with a bias of 7, three of mantissa; no infinities."""
    sign, exponent, mantissa = -1 if byte & 128 else 1, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2 ** (exponent - 7))


def numbers(dtype: str, data: bytes) -> Plain:
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    if dtype == "F8_E4M3":
        return np.array([float8(byte) for byte in data])
    if dtype == "I4":
        halves = [half for byte in data for half in (byte & 15, byte >> 4)]
        return np.array([half - 16 if half > 7 else half for half in halves], dtype=np.float64)
    return np.frombuffer(data, {"F32": "<f4", "F16": "<f2", "I8": "<i1"}[dtype]).astype(np.float64)


def elements(header: dict[str, Any], tensors: dict[str, tuple[str, list[int], bytes]], name: str) -> Plain:
    """The numbers of a tensor in row-major order."""
    record = header["masked"].get(name)
    if record is None:
        dtype, _, data = tensors[name]
        return numbers("I4" if dtype == "U8" else dtype, data)
    values = numbers(record["dtype"], tensors[f"{name}.values"][2])[: record["kept"]]
    whole = np.zeros(math.prod(record["shape"]))
    if record["slots"] is None:
        mask = tensors[f"{name}.mask"][2]
        places = [place for place in range(whole.size) if mask[place // 8] >> place % 8 & 1]
    else:
        indices = tensors[f"{name}.indices"][2]
        inside = [indices[place // 4] >> 2 * (place % 4) & 3 for place in range(record["kept"])]
        places = [4 * (place // record["slots"]) + inside[place] for place in range(record["kept"])]
    whole[places] = values
    return whole


def weights(folder: Path, layer: str) -> Plain:
    """The weights (out, in) of a layer."""
    header, tensors = raw(folder)
    record = header["layers"][layer]
    rows, columns = record["shape"]
    if f"{layer}.scale" not in tensors:
        return elements(header, tensors, f"{layer}.weight").reshape(rows, columns)
    dtype, shape, data = tensors[f"{layer}.scale"]
    assert shape == ([rows] if record["group"] is None else [rows, columns // record["group"]])
    scale = numbers(dtype, data).reshape(rows, -1)
    codes = elements(header, tensors, f"{layer}.codes").reshape(rows, scale.shape[1], -1)
    return (codes * scale[:, :, None]).reshape(rows, columns)


def dense_weights(model: nn.Module, layer: str) -> Tensor:
    module = model.get_submodule(layer)
    return module.dequantized() if isinstance(module, QuantizedLinear) else module.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("share", "scheme", "group", "storage"), FORMS)
def test_the_bytes_are_what_the_format_says(
    share: str | None, scheme: str | None, group: int | None, storage: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    saved = save(tmp_path / "variant", share, scheme, group, dtype)
    header, _ = raw(tmp_path / "variant")
    record = header["layers"][LAYER]
    assert (record["storage"], record["group"], record["shape"]) == (storage, group, [128, 256])
    assert record["activations"] == (scheme in ("int8-dynamic", "float8"))
    by_hand = torch.from_numpy(weights(tmp_path / "variant", LAYER))
    # Code times scale is rounded once, to the dtype of the scale.
    assert torch.equal(by_hand.to(dtype), dense_weights(saved, LAYER))
    found, _ = rebuild(tmp_path / "variant")
    assert_same(found, saved)
    with torch.no_grad():
        assert torch.equal(found(tiny_ids()).logits, saved(tiny_ids()).logits)


@pytest.mark.parametrize(("share", "scheme", "group", "storage"), FORMS)
def test_the_bytes_are_as_many_as_the_format_says(
    share: str | None, scheme: str | None, group: int | None, storage: str, tmp_path: Path
) -> None:
    """128 × 256 weights in bfloat16, and scales in bfloat16."""
    save(tmp_path / "variant", share, scheme, group)
    count, bits = 128 * 256, 16 if scheme is None else 4 if scheme == "int4" else 8
    header, tensors = raw(tmp_path / "variant")
    name = f"{LAYER}.{'weight' if scheme is None else 'codes'}"
    zeros = int((elements(header, tensors, name) == 0).sum())
    kept = count - zeros
    expected = {
        "": math.ceil(count * bits / 8),
        "bitmask": count // 8 + math.ceil(kept * bits / 8),
        "n:m": count // 2 * 2 // 8 + math.ceil(count // 2 * bits / 8),
    }["" if "+" not in storage and storage not in ("bitmask", "n:m") else storage.split("+")[0]]
    stored = sum(len(data) for part, (_, _, data) in tensors.items() if part.startswith(f"{name}"))
    assert stored == expected
    scales = 0 if scheme is None else 2 * 128 * (1 if group is None else 256 // group)
    assert sum(len(data) for part, (_, _, data) in tensors.items() if part.startswith(f"{LAYER}.")) == stored + scales
    whole = sum(
        len(data) for part, (_, _, data) in tensors.items() if "proj" in part and not part.endswith("norm.weight")
    )
    assert stored_sizes(tmp_path / "variant").pruned_layer_bytes == whole


@pytest.mark.parametrize("scheme", [name for name, scheme in SCHEMES.items() if scheme.rounding == "nearest"])
@pytest.mark.parametrize("share", ["0.5", "0.9", "2:4"])
def test_zeros_of_the_pruning_are_zeros_of_the_variant(share: str, scheme: str, tmp_path: Path) -> None:
    masks = wide_model()
    compress(masks, Recipe(prune=pruned(share)), None)
    saved = save(tmp_path / "variant", share, scheme)
    found, layout = rebuild(tmp_path / "variant")
    for layer in prunable_layers(masks):
        module = found.get_submodule(layer.name)
        assert isinstance(module, QuantizedLinear)
        codes = module.whole_codes()
        assert not codes[layer.weight() == 0].float().any()
        assert layout.layers[layer.name].zeros == int((codes.float() == 0).sum())
        assert same_bits(codes, saved.get_submodule(layer.name).whole_codes())


def test_a_pattern_takes_the_bitmask_where_that_is_smaller(tmp_path: Path) -> None:
    """2:4 of int8 takes 2/8 + 8 × 1/2 bits a weight; with 70% of zeros a bitmask takes 1 + 8 × 0.3."""
    model = wide_model()
    compress(model, Recipe(prune=pruned("2:4"), quantize=QuantizeStep(scheme="int8")), None)
    module = model.get_submodule(LAYER)
    assert isinstance(module, QuantizedLinear)
    zeros = torch.rand(module.codes.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    module.codes[zeros] = 0
    save_artifact(model, TOKENIZER, tmp_path / "variant", {})
    layout, _ = read_layout(tmp_path / "variant")
    assert layout.layers[LAYER].storage == "bitmask+int8"
    assert_same(rebuild(tmp_path / "variant")[0], model)


def test_n_of_m_of_int4_is_read_by_hand_and_back(tmp_path: Path) -> None:
    """2:4 without more zeros, which is stored with indices, and 1:4, which takes half the bits of a mask."""
    for kept in (2, 1):
        model = wide_model()
        compress(model, Recipe(quantize=QuantizeStep(scheme="int4", group=64)), None)
        module = model.get_submodule(LAYER)
        assert isinstance(module, QuantizedLinear)
        draw = torch.Generator().manual_seed(kept)
        order = torch.rand(128, 64, 4, generator=draw).argsort(dim=-1) < kept
        codes = torch.where(order, torch.randint(1, 8, order.shape, generator=draw), 0).view(128, 256)
        codes *= torch.randint(0, 2, codes.shape, generator=draw) * 2 - 1
        module.codes = ((codes[:, 0::2] & 15) | ((codes[:, 1::2] & 15) << 4)).to(torch.uint8)
        save_artifact(model, TOKENIZER, tmp_path / str(kept), {})
        header, tensors = raw(tmp_path / str(kept))
        assert header["layers"][LAYER]["storage"] == "n:m+int4"
        assert len(tensors[f"{LAYER}.codes.indices"][2]) == 128 * 256 // 4 * kept * 2 // 8
        assert len(tensors[f"{LAYER}.codes.values"][2]) == 128 * 256 // 4 * kept // 2
        by_hand = elements(header, tensors, f"{LAYER}.codes").reshape(128, 256)
        assert np.array_equal(by_hand, codes.numpy())
        assert_same(rebuild(tmp_path / str(kept))[0], model)


def test_n_of_m_of_a_transposed_layer_is_in_the_order_of_its_inputs(tmp_path: Path) -> None:
    """GPT-2 keeps its weights (in, out); their groups are of inputs."""
    model = tiny_model("gpt2", dtype=torch.bfloat16)
    compress(model, Recipe(prune=pruned("2:4")), None)
    save_artifact(model, TOKENIZER, tmp_path / "variant", {})
    header, tensors = raw(tmp_path / "variant")
    name = "transformer.h.0.mlp.c_fc"
    record = header["masked"][f"{name}.weight"]
    assert (record["slots"], record["transposed"], record["shape"]) == (2, True, [32, 128])
    by_hand = elements(header, tensors, f"{name}.weight").reshape(128, 32)
    assert torch.equal(torch.from_numpy(by_hand.T.copy()).bfloat16(), model.get_submodule(name).weight)
    assert_same(rebuild(tmp_path / "variant")[0], model)


# Older versions


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("share", "scheme"), [(None, None), ("0.5", None), (None, "int8"), ("0.5", "int8")])
def test_older_versions_are_read(version: int, share: str | None, scheme: str | None, tmp_path: Path) -> None:
    saved = save(tmp_path / "variant", share, scheme)
    header = header_of(tmp_path / "variant")
    layers: Any = header["layers"]
    masked: Any = header["masked"]
    old = {
        **{key: value for key, value in header.items() if key not in ("files", "dense")},
        "version": version,
        "layers": {
            name: {key: value for key, value in record.items() if key not in ("group", "activations")}
            for name, record in layers.items()
        },
        "masked": {
            name: {key: value for key, value in record.items() if key not in ("slots", "transposed")}
            for name, record in masked.items()
        },
    }
    rewrite(tmp_path / "variant", old)
    found, layout = rebuild(tmp_path / "variant")
    assert layout.version == version
    assert_same(found, saved)


@pytest.mark.parametrize(("share", "scheme"), [("2:4", None), (None, "int4"), (None, "int8-dynamic")])
def test_older_versions_do_not_have_what_came_later(share: str | None, scheme: str | None, tmp_path: Path) -> None:
    save(tmp_path / "variant", share, scheme)
    change(tmp_path / "variant", version=2, files={})
    with pytest.raises(InputError, match="version 2 has no"):
        read_layout(tmp_path / "variant")


# What was altered


def test_every_altered_file_is_named(tmp_path: Path) -> None:
    save(tmp_path / "variant", "0.5", "int4")
    for file in sorted((tmp_path / "variant").iterdir()):
        whole = file.read_bytes()
        changed = bytearray(whole)
        changed[-1] ^= 1
        file.write_bytes(changed)
        with pytest.raises(InputError, match=f"{file.name} was altered after it was written"):
            rebuild(tmp_path / "variant")
        file.unlink()
        with pytest.raises(InputError, match=rf"{file.name} is missing|it has no variant\.safetensors"):
            rebuild(tmp_path / "variant")
        file.write_bytes(whole)
    rebuild(tmp_path / "variant")


CODES = f"{LAYER}.codes"


@pytest.mark.parametrize(
    ("share", "scheme", "changes", "why"),
    [
        (None, "int4", {CODES: torch.zeros(128, 127, dtype=torch.uint8)}, "of shape"),
        (None, "int4", {CODES: torch.zeros(128, 128, dtype=torch.int8)}, "I8|of shape"),
        (None, "int4", {f"{LAYER}.scale": torch.ones(128).bfloat16()}, "no scale for each .* groups of 64"),
        (None, "int4", {f"{LAYER}.scale": torch.ones(128, 4, dtype=torch.int8)}, "no scale for each"),
        ("2:4", None, {f"{LAYER}.weight.indices": None}, "the indices of .* is missing"),
        ("2:4", None, {f"{LAYER}.weight.indices": torch.zeros(4095, dtype=torch.uint8)}, "does not cover"),
        ("2:4", None, {f"{LAYER}.weight.indices": torch.zeros(4096, dtype=torch.uint8)}, "do not increase"),
        ("2:4", None, {f"{LAYER}.weight.values": torch.zeros(16383).bfloat16()}, "keeps 16,384 values"),
    ],
)
def test_quantized_tensors_that_do_not_fit_are_named(
    share: str | None, scheme: str | None, changes: dict[str, Tensor | None], why: str, tmp_path: Path
) -> None:
    save(tmp_path / "variant", share, scheme)
    change_tensors(tmp_path / "variant", **changes)
    with pytest.raises(InputError, match=why):
        rebuild(tmp_path / "variant")


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"group": None}, "group"),
        ({"group": 48}, "group of 48 does not divide"),
        ({"group": 32}, "no scale for each"),
        ({"activations": True}, "inputs are not rounded beside int4"),
        ({"storage": "int8", "group": None}, "I4|int8|dtype|shape"),
        ({"storage": "n:m+int4"}, "its tensors are not"),
    ],
)
def test_records_of_quantized_layers_that_do_not_fit_are_named(
    entry: dict[str, object], why: str, tmp_path: Path
) -> None:
    save(tmp_path / "variant", None, "int4")
    header = header_of(tmp_path / "variant")
    layers: Any = header["layers"]
    change(tmp_path / "variant", layers={**layers, LAYER: {**layers[LAYER], **entry}})
    with pytest.raises(InputError, match=why):
        rebuild(tmp_path / "variant")
