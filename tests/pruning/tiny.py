"""Tiny random models of every family's shape, built from configs alone."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 96

_ROTARY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOWED = {"sliding_window": 8, "query_pre_attn_scalar": 8}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_ROTARY, tie_word_embeddings=True),
    "gpt2": lambda: GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=64),
    "opt": lambda: OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=16,
        ffn_dim=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        do_layer_norm_before=False,
    ),
    "gpt_neox": lambda: GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
    ),
    "qwen2": lambda: Qwen2Config(**_ROTARY),
    "qwen3": lambda: Qwen3Config(**_ROTARY),
    "gemma": lambda: GemmaConfig(**_ROTARY),
    "gemma2": lambda: Gemma2Config(**_ROTARY, **_WINDOWED),
    "gemma3": lambda: Gemma3TextConfig(
        **_ROTARY, **_WINDOWED, layer_types=["sliding_attention", "sliding_attention", "full_attention"]
    ),
}

LAYERS = {
    "llama": 7,
    "gpt2": 4,
    "opt": 6,
    "gpt_neox": 4,
    "qwen2": 7,
    "qwen3": 7,
    "gemma": 7,
    "gemma2": 7,
    "gemma3": 7,
}
"""Linear layers in one block of each."""


def tiny_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A random model of ``family`` in eval mode."""
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=dtype)
    return model.eval()


def tiny_ids(windows: int = 6, length: int = 24, seed: int = 1) -> torch.Tensor:
    """Random token ids (windows, length)."""
    return torch.randint(3, VOCABULARY, (windows, length), generator=torch.Generator().manual_seed(seed))
