"""What can be narrowed in which architecture, and which rows belong to which unit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

from pruning.anatomy import decoder_blocks
from pruning.errors import InputError
from pruning.structured.parts import NotSeparableError, check_alike, ffn_channels, head_groups
from pruning.structured.plan import narrowable
from pruning.structured.rows import Probe
from tests.pruning.architectures import ARCHITECTURES, architecture
from tests.pruning.tiny import tiny_ids

IDS = tiny_ids()
EXPERTS = {
    "deepseek_v3",
    "gpt_oss",
    "granitemoe",
    "llama4_text",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
}
UNLIKE = {"recurrent_gemma"}
NEITHER = {"bloom", "mpt", "bitnet"}
"""Their FFN is four hidden sizes wide and their heads share the hidden size, or norms span all of either."""

FFN_ONLY = {
    "bart": 48,
    "biogpt": 48,
    "codegen": 128,
    "falcon": 48,
    "gpt2": 128,
    "gpt_bigcode": 48,
    "gpt_neox": 64,
    "gptj": 128,
    "olmo2": 48,
    "opt": 64,
    "persimmon": 48,
    "stablelm": 48,
    "xglm": 48,
}
"""FFN channels of those whose heads are as wide as the hidden size over their number, or not independent."""


def rows_of(name: str, find: Callable[..., Any]) -> dict[str, list[int]]:
    model = architecture(name)
    blocks = decoder_blocks(model)
    return {path: units.tolist() for path, units in Probe(model, blocks, IDS).rows(find(model, blocks)).items()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_narrowed_or_refused_for_its_reason(name: str) -> None:
    model = architecture(name)
    blocks = decoder_blocks(model)
    if name in EXPERTS | UNLIKE | NEITHER:
        reason = "experts" if name in EXPERTS else "are not" if name in UNLIKE else "cannot be made narrower"
        with pytest.raises(InputError, match=f"{reason}.*choose depth"):
            narrowable(model, blocks, IDS)
        return
    found, reasons = narrowable(model, blocks, IDS)
    parts = [(one.part.title, one.part.units) for one in found]
    if name in FFN_ONLY:
        assert parts == [("FFN channels", FFN_ONLY[name])]
        assert len(reasons) == 1
    else:
        heads = ("attention heads", 4) if name == "phi" else ("KV groups", 2)
        assert parts == [heads, ("FFN channels", 48)]
        assert not reasons


def test_rows_of_separate_layers_are_those_of_their_channel_or_group() -> None:
    channels = list(range(48))
    assert rows_of("llama", ffn_channels) == {"mlp.gate_proj": channels, "mlp.up_proj": channels}
    assert rows_of("llama", head_groups) == {
        "self_attn.q_proj": [0] * 16 + [1] * 16,  # two heads of eight for each group
        "self_attn.k_proj": [0] * 8 + [1] * 8,
        "self_attn.v_proj": [0] * 8 + [1] * 8,
    }


def test_rows_of_fused_layers_are_found_where_they_lie() -> None:
    assert rows_of("phi3", ffn_channels) == {"mlp.gate_up_proj": [*range(48), *range(48)]}
    # Queries of four heads, then keys of two, then values of two.
    assert rows_of("phi3", head_groups) == {"self_attn.qkv_proj": [0] * 16 + [1] * 16 + ([0] * 8 + [1] * 8) * 2}


def test_rows_of_layers_stored_the_other_way() -> None:
    assert rows_of("gpt2", ffn_channels) == {"mlp.c_fc": list(range(128))}


def test_channels_that_few_tokens_open_are_still_told_apart() -> None:
    # Behind a ReLU a channel stays closed on eight tokens once in 256 times: of 8192 channels about 32 do.
    config = OPTConfig(
        vocab_size=32, hidden_size=16, word_embed_proj_dim=16, ffn_dim=8192, num_hidden_layers=2, num_attention_heads=2
    )
    model = OPTForCausalLM(config).eval()
    blocks = decoder_blocks(model)
    rows = Probe(model, blocks, torch.arange(8)[None]).rows(ffn_channels(model, blocks))
    assert rows["fc1"].tolist() == list(range(8192))


def test_channels_that_nothing_opens_are_not_narrowed() -> None:
    model: Any = architecture("opt")
    blocks = decoder_blocks(model)
    part = ffn_channels(model, blocks)
    for layer in model.model.decoder.layers:
        layer.activation_fn = nn.Threshold(1e6, 0.0)
    with pytest.raises(NotSeparableError, match="some of what fc1 gives reaches none of 64 FFN channels"):
        Probe(model, blocks, IDS).rows(part)


def test_the_model_is_left_as_it_is() -> None:
    model = architecture("qwen3")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    narrowable(model, decoder_blocks(model), IDS)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(p.grad is not None for p in model.parameters())


def test_channels_that_depend_on_each_other_are_not_narrowed() -> None:
    model: Any = architecture("llama")
    blocks = decoder_blocks(model)
    part = ffn_channels(model, blocks)
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Softmax(dim=-1)
    with pytest.raises(NotSeparableError, match=r"mlp.gate_proj gives is not made of 48 independent FFN channels"):
        Probe(model, blocks, IDS).rows(part)


def test_blocks_of_different_width_are_refused() -> None:
    model: Any = architecture("llama")
    model.model.layers[1].mlp.down_proj = nn.Linear(40, 32)
    with pytest.raises(InputError, match="blocks that are alike"):
        check_alike(model, decoder_blocks(model))
