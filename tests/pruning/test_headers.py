"""Headers are read without torch, and damage in them is named."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pruning.errors import InputError
from pruning.headers import TensorEntry, read_gguf, read_safetensors
from tests.pruning.folders import write_gguf
from tests.pruning.tiny import tiny_model


def _file(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def _entry(dtype: str, shape: list[int], first: int, last: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def test_a_file_of_safetensors_own_is_read(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(5, dtype=torch.int8), "c": torch.zeros(0)}
    save_file(tensors, tmp_path / "x.safetensors", {"poda": "{}"})
    header = read_safetensors(tmp_path / "x.safetensors")
    assert header.tensors == {
        "a": TensorEntry("BF16", (2, 3), 12),
        "b": TensorEntry("I8", (5,), 5),
        "c": TensorEntry("F32", (0,), 0),
    }
    assert header.metadata == {"poda": "{}"}


GOOD = _entry("F32", [2], 0, 8)


@pytest.mark.parametrize(
    ("header", "data", "why"),
    [
        (b"", b"", "header would be 0 bytes"),
        (b"{nonsense", b"", "no JSON"),
        (b"\xff\xfe{}", b"", "no JSON"),
        (b"[" * 100_000, b"", "no JSON"),
        ([], b"", "no JSON object"),
        ({"__metadata__": 3}, b"", "metadata"),
        ({"a": 3}, b"", "tensor a has no place"),
        ({"a": _entry("F32", [2], 8, 0)}, bytes(8), "a ends before it begins"),
        ({"a": {**GOOD, "data_offsets": [0, True]}}, bytes(8), "a has no place"),
        ({"a": {**GOOD, "dtype": "F31"}}, bytes(8), "unknown type 'F31'"),
        ({"a": {**GOOD, "dtype": ["F32"]}}, bytes(8), "unknown type"),
        ({"a": {**GOOD, "shape": [-2]}}, bytes(8), "a has no shape"),
        ({"a": {**GOOD, "shape": [3]}}, bytes(8), r"shape \(3,\) in F32 does not take 8 bytes"),
        ({"a": _entry("F32", [10**12], 0, 4 * 10**12)}, bytes(8), "8 bytes of tensors where its header lists"),
        ({"a": GOOD}, bytes(7), "7 bytes of tensors where its header lists 8"),
        ({"a": GOOD}, bytes(9), "9 bytes of tensors where its header lists 8"),
        ({"a": GOOD, "b": _entry("F32", [1], 4, 8)}, bytes(8), "tensor b does not begin where"),
        ({"a": GOOD, "b": _entry("F32", [1], 12, 16)}, bytes(16), "tensor b does not begin where"),
    ],
)
def test_damage_is_named(tmp_path: Path, header: object, data: bytes, why: str) -> None:
    with pytest.raises(InputError, match=why) as caught:
        read_safetensors(_file(tmp_path / "x.safetensors", header, data))
    assert "x.safetensors is damaged or cut short" in str(caught.value)


@pytest.mark.parametrize("length", [0, 7, 8, 20])
def test_a_file_cut_short_anywhere_is_named(tmp_path: Path, length: int) -> None:
    save_file({"a": torch.zeros(4)}, tmp_path / "x.safetensors")
    whole = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(whole[:length])
    with pytest.raises(InputError, match="cut short"):
        read_safetensors(tmp_path / "x.safetensors")


def test_an_absurd_header_length_allocates_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(InputError, match=f"header would be {2**63:,} bytes of a file of 10"):
        read_safetensors(tmp_path / "x.safetensors")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for read in (read_safetensors, read_gguf):
        with pytest.raises(InputError, match="gone cannot be read"):
            read(tmp_path / "gone")


def test_a_gguf_file_tells_its_tensors_and_values(tmp_path: Path) -> None:
    model = tiny_model("llama")
    write_gguf(tmp_path / "tiny.gguf", model)
    header = read_gguf(tmp_path / "tiny.gguf")
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["llama.block_count"] == 3
    assert header.metadata["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert "tokenizer.ggml.tokens" not in header.metadata
    assert header.tensors["blk.1.ffn_down.weight"] == TensorEntry("0", (32, 48), 4 * 32 * 48)
    assert sum(tensor.elements for tensor in header.tensors.values()) == sum(p.numel() for p in model.parameters())


def test_gguf_damage_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    whole = (tmp_path / "tiny.gguf").read_bytes()
    begin = whole.index(b"output_norm") + 100
    wrong = [
        (b"", "no GGUF file"),
        (b"GGML" + whole[4:], "no GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + whole[8:], "version 1"),
        (whole[:16] + struct.pack("<Q", 2**62) + whole[24:], "damaged or cut short"),
        (whole[:8] + struct.pack("<Q", 2**62) + whole[16:], "damaged or cut short"),
        *((whole[:length], "cut short") for length in (10, 24, 100, 1000, begin)),
    ]
    for content, why in wrong:
        (tmp_path / "tiny.gguf").write_bytes(content)
        with pytest.raises(InputError, match=why):
            read_gguf(tmp_path / "tiny.gguf")
