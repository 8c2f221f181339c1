"""Tiny random models of many architectures, for what must hold of any model."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests.pruning.tiny import CONFIGS, VOCABULARY

EXPERTS = 6
"""How many each mixture has."""

_IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WIDE = {**_IDS, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
_PLAIN = {**_WIDE, "intermediate_size": 48, "num_hidden_layers": 2}
_GROUPED = {**_PLAIN, "num_key_value_heads": 2, "head_dim": 8}
_NAMED = {**_IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
_ROUTED = {**_GROUPED, "num_experts_per_tok": 2}
_LOCAL = {**_ROUTED, "num_local_experts": EXPERTS}
_MOE = {**_ROUTED, "num_experts": EXPERTS, "moe_intermediate_size": 24}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_LATENT = {
    **_ROUTED,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": EXPERTS,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def _config(kind: str, **options: Any) -> Callable[[], PretrainedConfig]:
    return lambda: getattr(transformers, f"{kind}Config")(**options)


ARCHITECTURES: dict[str, Callable[[], PretrainedConfig]] = {
    **CONFIGS,
    "apertus": _config("Apertus", **_GROUPED),
    "arcee": _config("Arcee", **_GROUPED),
    "bart": _config(
        "Bart",
        vocab_size=VOCABULARY,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
    ),
    "biogpt": _config("BioGpt", **_PLAIN),
    "bitnet": _config("BitNet", **_GROUPED),
    "bloom": _config("Bloom", **_IDS, hidden_size=32, n_layer=2, n_head=4),
    "codegen": _config("CodeGen", **_NAMED),
    "cohere": _config("Cohere", **_GROUPED),
    "cohere2": _config("Cohere2", **_GROUPED, **_WINDOWS),
    "deepseek_v3": _config("DeepseekV3", **_LATENT),
    "falcon": _config("Falcon", **_PLAIN, ffn_hidden_size=48),
    "glm4": _config("Glm4", **_GROUPED),
    "gpt_bigcode": _config("GPTBigCode", **{**_NAMED, "n_inner": 48}),
    "gpt_oss": _config("GptOss", **_LOCAL, **_WINDOWS),
    "gptj": _config("GPTJ", **_NAMED),
    "granite": _config("Granite", **_GROUPED),
    "granitemoe": _config("GraniteMoe", **_LOCAL),
    "llama4_text": _config(
        "Llama4Text", **{**_LOCAL, "num_experts_per_tok": 1}, intermediate_size_mlp=40, interleave_moe_layer_step=2
    ),
    "mistral": _config("Mistral", **_GROUPED, sliding_window=8),
    "mixtral": _config("Mixtral", **_LOCAL),
    "mpt": _config("Mpt", **_IDS, d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
    "nemotron": _config("Nemotron", **_GROUPED),
    "olmo2": _config("Olmo2", **_GROUPED),
    "olmoe": _config("Olmoe", **_MOE),
    "persimmon": _config("Persimmon", **_PLAIN),
    "phi": _config("Phi", **_PLAIN),
    "phi3": _config("Phi3", **_GROUPED),
    "phimoe": _config("Phimoe", **_LOCAL),
    "qwen2_moe": _config("Qwen2Moe", **_MOE, shared_expert_intermediate_size=40),
    "qwen3_moe": _config("Qwen3Moe", **_MOE),
    "qwen3_next": _config(
        "Qwen3Next",
        **_MOE,
        shared_expert_intermediate_size=40,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    "recurrent_gemma": _config(
        "RecurrentGemma", **_GROUPED, attention_window_size=8, block_types=["recurrent", "attention"]
    ),
    "smollm3": _config("SmolLM3", **_GROUPED),
    "stablelm": _config("StableLm", **_GROUPED),
    "starcoder2": _config("Starcoder2", **_GROUPED),
    "xglm": _config(
        "XGLM", **_IDS, d_model=32, num_layers=2, attention_heads=4, ffn_dim=48, max_position_embeddings=64
    ),
}


def architecture(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A random model of the architecture in eval mode, every parameter of which counts."""
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(ARCHITECTURES[name](), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Some are made as zeros or left as they lie in memory.
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()
