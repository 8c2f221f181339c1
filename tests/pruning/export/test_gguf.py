"""What is written as GGUF is what the variant holds, and llama.cpp computes with it what transformers does."""

import errno
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from pruning.artifact import dequantized_model, save_artifact
from pruning.errors import InputError, RunError
from pruning.export import export_variant
from pruning.models import load_model, load_tokenizer
from pruning.sources import parse_reference
from tests.pruning.export.small import (
    KINDS,
    LLAMA3,
    ROWS,
    byte_tokenizer,
    cut_by,
    llama_cpp,
    log_probabilities,
    save_small,
    small_model,
)
from tests.pruning.folders import tiny_tokenizer
from tests.pruning.tiny import tiny_model

PROMPT = [5, 9, 40, 77, 31, 200, 11]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
TOLERANCE = {"gguf": 0.01, "gguf-q8_0": 0.25}
"""The usual distance between logarithms of probabilities, which spread over 1.6: llama.cpp rounds the inputs of layers
as it does their weights."""


def exported(tmp_path: Path, form: str = "gguf", **options: Any) -> Path:
    """The folder to which the small variant of ``options`` was exported."""
    save_small(tmp_path / "variant", **options)
    export_variant(tmp_path / "variant", tmp_path / "out", form)
    return tmp_path / "out"


def check_generation(tmp_path: Path, form: str) -> None:
    """llama.cpp finds the probabilities that transformers does, and writes what is likeliest by both."""
    model, _ = dequantized_model(tmp_path / "variant")
    written, found = llama_cpp(tmp_path / "out").generate(PROMPT, 8)
    expected = log_probabilities(model, PROMPT, written)
    assert (found - expected).square().mean().sqrt() < TOLERANCE[form]
    # Likeliest by both, or as good as that.
    assert (expected[range(8), written] > expected.max(-1).values - 5 * TOLERANCE[form]).all()


def read(folder: Path) -> gguf.GGUFReader:
    """The one file in ``folder``."""
    (path,) = folder.glob("*.gguf")
    return gguf.GGUFReader(path)


def metadata(folder: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in read(folder).fields.items()}


def weights_of(folder: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Kind and values of every tensor by its name."""
    reader = read(folder)
    assert len({tensor.name for tensor in reader.tensors}) == len(reader.tensors)
    return {
        tensor.name: (tensor.tensor_type.name, gguf.dequantize(tensor.data, tensor.tensor_type))
        for tensor in reader.tensors
    }


def in_pairs(weight: np.ndarray, width: int) -> np.ndarray:
    """The rows of every head of ``width`` as llama.cpp wants them, one by one."""
    rows = []
    for head in range(len(weight) // width):
        for index in range(width // 2):
            rows += [weight[head * width + index], weight[head * width + width // 2 + index]]
    return np.array(rows)


def expected_weights(model: Any, family: str) -> dict[str, np.ndarray]:
    """What the file of ``model`` should hold by llama.cpp's names, written out."""
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    expected = {}
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if name.startswith("model.layers."):
            _, _, block, *path, leaf = name.split(".")
            part = parts[".".join(path)]
            if family in ("llama", "mistral") and part in ("attn_q", "attn_k"):
                values = in_pairs(values, model.config.head_dim)
            expected[f"blk.{block}.{part}.{leaf}"] = values
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            expected[
                {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[
                    name.rpartition(".")[0]
                ]
                + ".weight"
            ] = values
    return expected


@pytest.mark.parametrize("form", ["gguf", "gguf-q8_0"])
@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_computes_what_the_variant_does(kind: str, form: str, tmp_path: Path) -> None:
    exported(tmp_path, form, kind=kind)
    check_generation(tmp_path, form)


@pytest.mark.parametrize("kind", ["dense", "depth"])
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_llama_cpp_computes_what_other_families_do(family: str, kind: str, tmp_path: Path) -> None:
    exported(tmp_path, kind=kind, model=small_model(family))
    check_generation(tmp_path, "gguf")


def test_fewer_heads_of_qwen3_are_computed_too(tmp_path: Path) -> None:
    exported(tmp_path, kind="width", model=small_model("qwen3"))
    check_generation(tmp_path, "gguf")


def test_biases_are_computed_too(tmp_path: Path) -> None:
    exported(tmp_path, model=small_model("llama", attention_bias=True, mlp_bias=True))
    check_generation(tmp_path, "gguf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_holds_every_weight_once(family: str, tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    model = small_model(family, dtype, tie_word_embeddings=tied)
    found = weights_of(exported(tmp_path, model=model))
    expected = expected_weights(model, family)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        kind, stored = found[name]
        assert kind == ("F16" if values.ndim == 2 else "F32")
        assert np.array_equal(stored, values.astype(np.float16) if values.ndim == 2 else values)


def test_codes_are_written_as_the_weights_they_stand_for(tmp_path: Path) -> None:
    found = weights_of(exported(tmp_path, kind="int4"))
    model, layout = dequantized_model(tmp_path / "variant")
    assert {record.codes for record in layout.layers.values()} == {"int4"}
    for name, values in expected_weights(model, "llama").items():
        assert np.array_equal(found[name][1], values.astype(np.float16) if values.ndim == 2 else values)


def test_8_bits_are_as_near_as_they_can_be(tmp_path: Path) -> None:
    """Half a step of a block, a step the largest of 32 over 127, and what the step loses in 16 bits."""
    model = small_model(tie_word_embeddings=False)
    found = weights_of(exported(tmp_path, "gguf-q8_0", model=model))
    for name, values in expected_weights(model, "llama").items():
        kind, stored = found[name]
        if values.ndim == 1:
            assert kind == "F32"
            assert np.array_equal(stored, values)
            continue
        assert kind == "Q8_0"
        blocks = values.reshape(-1, 32)
        step = np.abs(blocks).max(1, keepdims=True) / 127
        assert (np.abs(stored.reshape(-1, 32) - blocks) <= step * (0.5 + 127 * 2**-11 + 1e-4)).all()
        assert np.array_equal(stored.reshape(-1, 32)[blocks == 0], blocks[blocks == 0])


def test_widths_that_are_no_multiple_of_a_block_stay_in_16_bits(tmp_path: Path) -> None:
    found = weights_of(exported(tmp_path, "gguf-q8_0", model=small_model(intermediate_size=90)))
    kinds = {name.split(".")[2]: kind for name, (kind, _) in found.items() if name.startswith("blk.0.")}
    assert (kinds["ffn_down"], kinds["ffn_up"], kinds["ffn_norm"]) == ("F16", "Q8_0", "F32")
    check_generation(tmp_path, "gguf-q8_0")


def test_the_shape_of_the_model_is_told(tmp_path: Path) -> None:
    found = metadata(exported(tmp_path, kind="width"))
    model, _ = dequantized_model(tmp_path / "variant")
    config: Any = model.config
    assert (config.intermediate_size < 96, config.num_attention_heads) == (True, 2)
    told = {name.removeprefix("llama."): value for name, value in found.items() if name.startswith("llama.")}
    assert told == {
        "context_length": 128,
        "embedding_length": 64,
        "block_count": 3,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
        "rope.dimension_count": 32,
        "rope.freq_base": 10000.0,
        "vocab_size": ROWS,
    }
    assert found["general.architecture"] == "llama"
    assert found["general.name"] == "tiny, " + str(KINDS["width"])
    assert found["general.file_type"] == gguf.LlamaFileType.MOSTLY_F16


def test_positions_of_llama_3_are_scaled(tmp_path: Path) -> None:
    """Frequencies by the formula in Meta's llama-models, apply_scaling."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    out = exported(tmp_path, model=small_model(rope_parameters=rope))
    factors = []
    for index in range(16):
        wave = 2 * math.pi * 500000 ** (2 * index / 32)
        if wave < 32 / 4:
            factors.append(1.0)
        elif wave > 32 / 1:
            factors.append(8.0)
        else:
            smooth = (32 / wave - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / 8 + smooth))
    assert 1 < sum(factor not in (1, 8) for factor in factors) + 1 < 16
    np.testing.assert_allclose(weights_of(out)["rope_freqs.weight"][1], factors, rtol=1e-5)
    check_generation(tmp_path, "gguf")


def test_positions_scaled_by_a_factor_are_told(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0}
    found = metadata(exported(tmp_path, model=small_model(rope_parameters=rope)))
    assert (found["llama.rope.scaling.type"], found["llama.rope.scaling.factor"]) == ("linear", 4.0)
    assert found["llama.rope.freq_base"] == 20000.0
    check_generation(tmp_path, "gguf")


@pytest.mark.parametrize(
    ("family", "changes", "cause"),
    [
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "positions .* 'yarn'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "positions"),
        ("llama", {"hidden_act": "gelu"}, "llama.cpp has no gelu"),
        ("mistral", {"sliding_window": 64}, "a window of 64 tokens"),
        ("qwen2", {"head_dim": 32}, "4 heads of 32 in a model 64 wide"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    family: str, changes: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"{cause}.*: choose --format transformers$"):
        exported(tmp_path, model=small_model(family, **changes))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox", "gemma3"])
def test_other_architectures_are_refused(family: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"only Llama, Mistral, Qwen2, Qwen3: choose --format transformers$"):
        exported(tmp_path, model=tiny_model(family), tokenizer=tiny_tokenizer())


@pytest.mark.parametrize(
    ("form", "dtype", "largest", "fits"),
    [
        ("gguf", torch.float32, 65504.0, True),
        ("gguf", torch.float32, 65520.0, False),
        ("gguf", torch.bfloat16, 65536.0, False),
        ("gguf", torch.float32, float("nan"), False),
        ("gguf", torch.float32, float("-inf"), False),
        ("gguf-q8_0", torch.float32, 65520.0, True),
        ("gguf-q8_0", torch.float32, 9e6, False),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    form: str, dtype: torch.dtype, largest: float, fits: bool, tmp_path: Path
) -> None:
    model: Any = small_model(dtype=dtype)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = largest
    if fits:
        assert np.isfinite(weights_of(exported(tmp_path, form, model=model))["blk.1.ffn_up.weight"][1]).all()
        return
    with pytest.raises(InputError, match=r"blk.1.ffn_up.weight has numbers that .* cannot hold: choose --format"):
        exported(tmp_path, form, model=model)
    assert [path.name for path in tmp_path.iterdir()] == ["variant"]


TEXTS = (
    "hello 12 <tool>",
    "  hello   qz\n\n 1234 abc qzqz",
    "it's I'LL we've 123456",
    "naïve ä ää 日本語 ١٢٣ ½ Ⅷ x²",
    "a  ",
    "\t\n x  \n",
    "</s>he<tool>ll<s>",
    "!!! ...? (hello)",
    " ",
)


@pytest.mark.parametrize(
    ("name", "start", "tokenizer"),
    [
        ("gpt-2", False, byte_tokenizer()),
        ("gpt-2", True, byte_tokenizer(start=True)),
        ("smollm", False, byte_tokenizer(pre_tokenizers.Digits(individual_digits=True))),
        ("llama-bpe", True, byte_tokenizer(cut_by(LLAMA3), words=False, start=True, ignore_merges=True)),
        ("smaug-bpe", False, byte_tokenizer(cut_by(LLAMA3), words=False)),
        ("qwen2", False, byte_tokenizer(cut_by(LLAMA3.replace("{1,3}", "")), words=False)),
    ],
)
def test_llama_cpp_cuts_text_as_the_tokenizer_does(name: str, start: bool, tokenizer: Any, tmp_path: Path) -> None:
    out = exported(tmp_path, tokenizer=tokenizer)
    read_back = load_tokenizer(tmp_path / "variant")
    loaded = llama_cpp(out)
    assert {text: loaded.tokens(text) for text in TEXTS} == {text: read_back(text).input_ids for text in TEXTS}
    found = metadata(out)
    assert found["tokenizer.ggml.pre"] == name
    assert found["tokenizer.ggml.add_bos_token"] == start


def test_a_tokenizer_of_qwen_is_written_and_what_is_lost_is_said(tmp_path: Path) -> None:
    parts = json.loads(byte_tokenizer().backend_tokenizer.to_str())["model"]
    tokenizer = Qwen2Tokenizer(vocab=parts["vocab"], merges=[tuple(pair) for pair in parts["merges"]])
    out = exported(tmp_path, model=small_model("qwen2"), tokenizer=tokenizer)
    assert metadata(out)["tokenizer.ggml.pre"] == "qwen2"
    assert "Unicode NFC" in (out / "README.md").read_text()
    loaded, read_back = llama_cpp(out), load_tokenizer(tmp_path / "variant")
    assert loaded.tokens("hello ä 12") == read_back("hello ä 12").input_ids
    assert loaded.tokens("a\u0308") != read_back("a\u0308").input_ids


def test_what_tokens_are_is_told(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    model: Any = small_model()
    model.generation_config.eos_token_id = [2, 260]
    found = metadata(exported(tmp_path, model=model, tokenizer=tokenizer))
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    known = len(tokenizer)
    assert known < ROWS
    assert tokens[:known] == tokenizer.convert_ids_to_tokens(range(known))
    assert tokens[known:] == [f"[PAD{number}]" for number in range(known, ROWS)]
    # Control, normal, defined by a user, unused.
    assert types == [3] * 3 + [1] * (known - 4) + [4] + [5] * (ROWS - known)
    assert found["tokenizer.ggml.merges"][:3] == ["h e", "l l", "he ll"]
    ids = {name: found.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding", "unknown", "eot")}
    assert ids == {"bos": 1, "eos": 2, "padding": 0, "unknown": None, "eot": 260}
    assert found["tokenizer.chat_template"] == tokenizer.chat_template


def _sentence_pieces() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE({"a": 0, "▁": 1}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _changed(**parts: Any) -> PreTrainedTokenizerFast:
    made = byte_tokenizer()
    for name, part in parts.items():
        setattr(made.backend_tokenizer, name, part)
    return made


def _with_lonely_word() -> PreTrainedTokenizerFast:
    made = byte_tokenizer()
    made.add_tokens([AddedToken("<x>", single_word=True)])
    return made


@pytest.mark.parametrize(
    ("tokenizer", "cause"),
    [
        (tiny_tokenizer(), "is no byte-level BPE"),
        (_sentence_pieces(), "is no byte-level BPE"),
        (_changed(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)), "takes text as it is"),
        (_changed(pre_tokenizer=pre_tokenizers.Whitespace()), "takes text as it is"),
        (_changed(pre_tokenizer=None), "takes text as it is"),
        (byte_tokenizer(pre_tokenizers.Punctuation()), "no name for"),
        (byte_tokenizer(cut_by(r"\d+"), words=False), "no name for"),
        (byte_tokenizer(ignore_merges=True), "no name for"),
        (_changed(normalizer=normalizers.Lowercase()), r"changes text before it cuts it \(Lowercase\)"),
        (_changed(post_processor=processors.TemplateProcessing("$A x", special_tokens=[("x", 90)])), "adds more"),
        (_with_lonely_word(), "whole words alone"),
    ],
)
def test_tokenizers_that_gguf_has_nothing_for_are_refused(tokenizer: Any, cause: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"the tokenizer of this variant .*{cause}.*: choose --format transformers$"):
        exported(tmp_path, tokenizer=tokenizer)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has 270 tokens and the model 200 embeddings: choose"):
        exported(tmp_path, model=small_model(vocab_size=200))


def test_what_was_exported_is_a_model_to_start_from(tmp_path: Path) -> None:
    """Poda reads the file as it would any other, and finds the weights in 16 bits."""
    model: Any = small_model()
    (path,) = exported(tmp_path, model=model).glob("*.gguf")
    loaded = load_model(parse_reference(str(path)), device="cpu", dtype="float32", cache=tmp_path / "cache")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(parameter.half())
        ids = torch.tensor([PROMPT])
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits)
    assert loaded.tokenizer("hello 12 <tool>").input_ids == byte_tokenizer()("hello 12 <tool>").input_ids


@pytest.mark.parametrize("form", ["gguf", "gguf-q8_0"])
def test_the_same_variant_gives_the_same_bytes(form: str, tmp_path: Path) -> None:
    save_small(tmp_path / "variant", "wanda")
    files = []
    for name in ("one", "two"):
        export_variant(tmp_path / "variant", tmp_path / name, form)
        files += (tmp_path / name).glob("*.gguf")
    assert files[0].name == files[1].name
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("name", ["../../etc/x", "", "a b\n\0: #", "ü" * 300, ".hidden"])
def test_a_file_is_named_after_model_and_recipe_whatever_they_are(name: str, tmp_path: Path) -> None:
    out = exported(tmp_path, name=name)
    (path,) = out.glob("*.gguf")
    assert path.parent == out
    assert path.name.endswith("Dense-F16.gguf")
    assert path.name.removesuffix(".gguf").replace("-", "").isalnum()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), OSError("100 requested and 10 written")]
)
def test_a_disk_that_fills_up_leaves_nothing(error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_small(tmp_path / "variant")
    left = iter([None] * 5)
    write = gguf.GGUFWriter.write_tensor_data

    def full(writer: gguf.GGUFWriter, data: np.ndarray) -> None:
        if next(left, 0) == 0:
            raise error
        write(writer, data)

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(RunError, match="disk is full: the exported model out"):
        export_variant(tmp_path / "variant", tmp_path / "out", "gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["variant"]


def test_too_little_space_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_small(tmp_path / "variant")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=16_000_000))
    with pytest.raises(RunError, match="disk is too full for the exported model out"):
        export_variant(tmp_path / "variant", tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_bundled_model_comes_back_and_llama_cpp_continues_as_transformers_does(tmp_path: Path) -> None:
    loaded = load_model(parse_reference("bundled"), device="cpu", dtype="float32", cache=tmp_path / "cache")
    model: Any = loaded.model
    save_artifact(model, loaded.tokenizer, tmp_path / "variant", {"identity": {"name": loaded.identity.name}})
    export_variant(tmp_path / "variant", tmp_path / "out", "gguf")
    (path,) = (tmp_path / "out").glob("*.gguf")
    back: Any = load_model(parse_reference(str(path)), device="cpu", dtype="float32", cache=tmp_path / "cache")
    text = "The three largest cities of Portugal, in 2023, are\n"
    ids = loaded.tokenizer(text).input_ids
    assert back.tokenizer(text).input_ids == ids
    rows = model.config.vocab_size
    running = llama_cpp(tmp_path / "out", rows)
    assert running.tokens(text) == ids
    with torch.no_grad():
        dense = model(torch.tensor([ids])).logits
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(parameter.half())
        rounded = model(torch.tensor([ids])).logits
        torch.testing.assert_close(back.model(torch.tensor([ids])).logits, rounded)
        assert (rounded - dense).abs().max() < 0.05
        written, found = running.generate(ids, 12)
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
        assert model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() == written
    expected = log_probabilities(model, ids, written)
    assert (found - expected).square().mean().sqrt() < 0.05
