"""Models built from a config, small enough to run in milliseconds, for the tests of this package."""

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

VOCABULARY = 50
# Wide enough that what a model predicts depends on what it reads.
_SPREAD = 0.3


class BytesTokenizer:
    """Token i is the byte i, as in a byte-level vocabulary without merges."""

    def decode(self, tokens: Any, **_: object) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


def llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=_SPREAD,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        initializer_range=_SPREAD,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()


def opt() -> OPTForCausalLM:
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        init_std=_SPREAD,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=2,
    )
    return OPTForCausalLM(config).eval()


def windows(count: int = 5, length: int = 12) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(1))
