"""Tiny models as people have them: transformers folders and GGUF files, with a tokenizer of one word a token."""

from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from tests.pruning.tiny import VOCABULARY, tiny_model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Words w0, w1, ... of the tiny vocabulary."""
    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w2")


def tiny_folder(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32) -> nn.Module:
    """Save a tiny model of ``family`` in ``folder`` and return it."""
    model = tiny_model(family, dtype=dtype)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def write_gguf(
    path: Path, model: nn.Module, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
) -> dict[str, np.ndarray]:
    """Write a tiny Llama as llama.cpp would, what has 32 inputs in ``kind``; what a reader should find, by torch name.

    llama.cpp wants the rows of each head of the query and key interleaved: row 2i of a head is row i of the first
    half, row 2i + 1 row i of the second.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    letters = [chr(code) for code in range(ord("A"), ord("~") + 1)]
    tokens = ["<pad>", "<s>", "</s>", *letters]
    writer.add_token_list([*tokens, "ab", *(f"x{index}" for index in range(VOCABULARY - len(tokens) - 1))])
    writer.add_token_types([3, 3, 3] + [1] * (VOCABULARY - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    expected: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        if name == "lm_head.weight":
            continue
        values = parameter.detach().float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        order = np.arange(len(values)) if heads is None else _interleaved(len(values), heads)
        stored = values[order]
        quantized = values.ndim == 2 and values.shape[1] % 32 == 0 and kind != gguf.GGMLQuantizationType.F32
        if quantized:
            data = gguf.quantize(stored, kind)
            stored = gguf.dequantize(data, kind)
        found = np.empty_like(stored)
        found[order] = stored
        expected[name] = found
        target = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(target, data if quantized else stored, raw_dtype=kind if quantized else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _interleaved(rows: int, heads: int) -> np.ndarray:
    width = rows // heads
    order = []
    for head in range(heads):
        for index in range(width // 2):
            order += [head * width + index, head * width + width // 2 + index]
    return np.array(order)
