"""A tiny language model that was trained here and never rounded."""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from pruning.texts import ARTICLES, Part, load_text

LENGTH = 128
STEPS = 500
BATCH = 16


def bytes_of(part: Part) -> Tensor:
    """The bytes of the bundled articles for calibration or evaluation, one token each."""
    return torch.frombuffer(bytearray(load_text(ARTICLES, part).content.encode()), dtype=torch.uint8).long()


def windows(part: Part, count: int) -> Tensor:
    """``count`` windows (count, LENGTH), evenly spaced."""
    text = bytes_of(part)
    starts = torch.linspace(0, len(text) - LENGTH, count).long()
    return torch.stack([text[start : start + LENGTH] for start in starts.tolist()])


@cache
def trained_state() -> dict[str, Tensor]:
    """Weights in float32 after some minutes of training: the same on every call."""
    torch.manual_seed(0)
    model = empty()
    text = bytes_of("calibration")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=STEPS)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        starts = torch.randint(0, len(text) - LENGTH, (BATCH,), generator=generator)
        ids = torch.stack([text[start : start + LENGTH] for start in starts.tolist()])
        logits = model(ids).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        optimizer.step()
        schedule.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def empty() -> nn.Module:
    """The untrained model."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def trained() -> nn.Module:
    """A copy of the trained model, in eval mode."""
    model = empty()
    model.load_state_dict(trained_state())
    return model.eval().requires_grad_(False)
