"""Small variants with a byte-level tokenizer, and llama.cpp to run what was exported of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch
import xllamacpp
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from pruning.artifact import save_artifact
from pruning.calibration import Windows
from pruning.compress import compress
from pruning.recipe import PruneStep, QuantizeStep, Recipe
from tests.pruning.tiny import tiny_ids

ROWS = 288
"""Embeddings: more than the tokenizer has tokens, as in many models."""

LETTER = 70
"""A token that is one letter."""

KINDS: dict[str, Recipe] = {
    "dense": Recipe(),
    "wanda": Recipe(prune=PruneStep(method="wanda", sparsity=0.5)),
    "int8": Recipe(quantize=QuantizeStep(scheme="int8")),
    "int4": Recipe(quantize=QuantizeStep(scheme="int4", group=32)),
    "width": Recipe(prune=PruneStep(method="width", sparsity=0.5)),
    "depth": Recipe(prune=PruneStep(method="depth", sparsity=0.3)),
}
"""What is made of the small model, one of each way a variant is stored or shaped."""

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

_SHAPE: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
    # So that what attention does shows in the logits.
    "initializer_range": 0.2,
}
_CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}


def small_model(family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """A random model of ``family`` with norms and biases that do something, and heads that are not hidden / heads wide
    where llama.cpp has such."""
    torch.manual_seed(0)
    own: dict[str, Any] = {"mistral": {"sliding_window": None}, "qwen2": {"head_dim": 16}}.get(family, {})
    config = _CONFIGS[family](**{**_SHAPE, **own, **changes})
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += torch.randn_like(parameter) * (0.5 if name.endswith("bias") else 0.1)
    return model.eval()


def byte_tokenizer(
    *cuts: pre_tokenizers.PreTokenizer, words: bool = True, start: bool = False, **options: Any
) -> PreTrainedTokenizerFast:
    """All bytes, some merges, and tokens of its own kinds: 3 special ones and one that a user defined.

    ``cuts`` come before bytes, cut as GPT-2 does where ``words``; ``start`` puts "<s>" before every text; ``options``
    are those of the BPE.
    """
    special = ["<pad>", "<s>", "</s>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "hell o", "Ġ Ġ", "1 2", "Ġ t", "Ã ¤", "2 3"]
    pairs = [(first, second) for first, second in map(str.split, merges)]
    # No merge makes the last.
    tokens = [*special, *letters, *map("".join, pairs), "qz"]
    known = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(known, pairs, **options))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, last]) if cuts else last
    tokenizer.decoder = decoders.ByteLevel()
    if start:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token=None
    )
    made.add_tokens(["<tool>"])
    return made


def cut_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    """The step that takes what ``pattern`` matches for itself."""
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def save_small(
    folder: Path, kind: str = "dense", model: nn.Module | None = None, tokenizer: Any = None, name: str = "tiny"
) -> None:
    """Make the variant ``kind`` of ``model`` in ``folder``."""
    recipe = KINDS[kind]
    whole = model if model is not None else small_model()
    made = whole if recipe == Recipe() else compress(whole, recipe, Windows(tiny_ids())).model
    header = {"recipe": str(recipe), "identity": {"name": name}}
    save_artifact(made, tokenizer or byte_tokenizer(), folder, header)


class LlamaCpp:
    """A GGUF file as llama.cpp runs it, on one thread and with a cache in 32 bits."""

    def __init__(self, path: Path, rows: int, context: int) -> None:
        self._rows = rows
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx = context
        parameters.n_gpu_layers = 0
        parameters.cpuparams.n_threads = 1
        parameters.cpuparams_batch.n_threads = 1
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.n_parallel = 1
        parameters.warmup = False
        parameters.fit_params = False
        parameters.verbosity = 0
        self._server = xllamacpp.Server(parameters)

    def generate(self, prompt: Sequence[int], tokens: int) -> tuple[list[int], Tensor]:
        """The likeliest ``tokens`` after ``prompt``, and at each of them the logarithm of every token's probability."""
        ids = list(prompt)
        rows = []
        for _ in range(tokens):
            rows.append(self._next(ids))
            ids.append(int(rows[-1].argmax()))
        return ids[len(prompt) :], torch.stack(rows)

    def _next(self, ids: Sequence[int]) -> Tensor:
        # It tells of no token that leaves a character unfinished, so it is made to choose a letter. What it tells of
        # the others is not changed by that.
        bias = {"logit_bias": [[LETTER, 1000]]}
        asked = {"prompt": list(ids), "max_tokens": 1, "temperature": 0, "n_probs": self._rows, **bias}
        (step,) = self._server.handle_completions(asked)["choices"][0]["logprobs"]["content"]
        found = torch.full((self._rows,), float("nan"))
        for entry in step["top_logprobs"]:
            found[entry["id"]] = entry["logprob"]
        return found

    def tokens(self, text: str) -> list[int]:
        """The tokens of ``text`` with those that are added to it, and special ones by their names."""
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = Request(f"{self._server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
        with urlopen(request) as answer:
            found: list[int] = json.load(answer)["tokens"]
        return found


def llama_cpp(folder: Path, rows: int = ROWS, context: int = 128) -> LlamaCpp:
    """The one GGUF file in ``folder``, of ``rows`` tokens, loaded."""
    (path,) = folder.glob("*.gguf")
    return LlamaCpp(path, rows, context)


@torch.no_grad()
def log_probabilities(model: Any, prompt: Sequence[int], written: Sequence[int]) -> Tensor:
    """By transformers, the logarithm of every token's probability in the place of each of ``written``."""
    logits = model(torch.tensor([[*prompt, *written]])).logits[0, len(prompt) - 1 : -1]
    found: Tensor = logits.float().log_softmax(-1)
    return found
