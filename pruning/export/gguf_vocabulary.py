"""A tokenizer of transformers as the vocabulary of a GGUF file, by which llama.cpp cuts text as transformers does."""

import json
from collections.abc import Sequence
from typing import Any

import gguf

from pruning.errors import InputError

LEVER = "choose --format transformers"

_WORDS = "words as GPT-2 has them"
_DIGITS = "digits one by one"
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_PRE: dict[tuple[tuple[str, ...], bool], str] = {
    ((_WORDS,), False): "gpt-2",
    ((_DIGITS, _WORDS), False): "smollm",
    ((_LETTERS + r"\p{N}{1,3}" + _REST,), True): "llama-bpe",
    ((_LETTERS + r"\p{N}{1,3}" + _REST,), False): "smaug-bpe",
    ((_LETTERS + r"\p{N}" + _REST,), False): "qwen2",
}
"""What llama.cpp calls the ways to cut text before merging (``llama-vocab.cpp``), by the steps of the tokenizer and
whether a word that is a token is taken without merging."""

_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "mask")
_NFC = (
    "The tokenizer composes characters (Unicode NFC) before it cuts text, which GGUF has no place for: text that is "
    "not composed may be cut otherwise by llama.cpp."
)


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: Any, size: int, ends: Sequence[int] = ()) -> tuple[str, ...]:
    """Add ``tokenizer`` to ``writer`` as a vocabulary of ``size`` tokens, as many as the model has embeddings.

    ``ends`` are tokens that end a text beside the tokenizer's own. Gives sentences on what llama.cpp does otherwise.
    Raises InputError for a tokenizer that GGUF, or llama.cpp by name, has nothing for.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        raise _refused("is not one of the tokenizers library")
    parts = json.loads(fast.to_str())
    model = parts["model"]
    pre = _pre(parts)
    tokens, types = _tokens(model["vocab"], parts["added_tokens"], size)
    start, end = _added(tokenizer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    for name, number in _special(tokenizer, ends).items():
        if not 0 <= number < size:
            raise _refused(f"has a token {number:,} for which the model of {size:,} has no embedding")
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(start)
    writer.add_add_eos_token(end)
    writer.add_add_space_prefix(False)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in sorted(template.items())]
    if template:
        writer.add_chat_template(template)
    return (_NFC,) if parts["normalizer"] is not None else ()


def _pre(parts: dict[str, Any]) -> str:
    """llama.cpp's name of how the tokenizer ``parts`` are of cuts text before merging."""
    model, normalizer = parts["model"], parts["normalizer"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise _refused("is no byte-level BPE (but, say, SentencePiece)")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise _refused("marks the parts of words")
    if normalizer is not None and normalizer["type"] != "NFC":
        raise _refused(f"changes text before it cuts it ({normalizer['type']})")
    pre = parts["pre_tokenizer"] or {"type": "Sequence", "pretokenizers": []}
    steps = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    *before, last = steps or [{"type": "none"}]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        raise _refused("is no byte-level BPE that takes text as it is")
    cuts = [_cut(step) for step in before] + ([_WORDS] if last["use_regex"] else [])
    known = _PRE.get((tuple(cuts), bool(model.get("ignore_merges"))))
    if known is None:
        raise _refused("cuts text in a way that llama.cpp has no name for, or that Poda does not know")
    return known


def _cut(step: dict[str, Any]) -> str:
    if step["type"] == "Digits" and step["individual_digits"]:
        return _DIGITS
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        return str(step["pattern"].get("Regex", step["pattern"]))
    return str(step["type"])


def _tokens(known: dict[str, int], added: Sequence[dict[str, Any]], size: int) -> tuple[list[str], list[int]]:
    """The text and the type of each of ``size`` tokens; those the tokenizer does not have are of no use."""
    highest = max([*known.values(), *(token["id"] for token in added)], default=-1)
    if highest >= size:
        raise _refused(f"has {highest + 1:,} tokens and the model {size:,} embeddings")
    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [gguf.TokenType.UNUSED] * size
    for text, number in known.items():
        tokens[number], types[number] = text, gguf.TokenType.NORMAL
    for token in added:
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            raise _refused("has tokens that take the spaces beside them, or are whole words alone")
        kind = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
        tokens[token["id"]], types[token["id"]] = token["content"], kind
    return tokens, [int(kind) for kind in types]


def _added(tokenizer: Any) -> tuple[bool, bool]:
    """Whether the tokenizer puts its token for the beginning before a text, and that for the end after it."""
    bare = tokenizer("a", add_special_tokens=False).input_ids
    whole = tokenizer("a").input_ids
    for start in ([], [tokenizer.bos_token_id]):
        for end in ([], [tokenizer.eos_token_id]):
            if whole == start + bare + end:
                return bool(start), bool(end)
    raise _refused("adds more to a text than tokens for its beginning and end")


def _special(tokenizer: Any, ends: Sequence[int]) -> dict[str, int]:
    """The tokens with a meaning, by llama.cpp's names."""
    found = {name: getattr(tokenizer, f"{name}_token_id", None) for name in _SPECIAL}
    left = [number for number in ends if number != found["eos"]]
    if found["eos"] is None and left:
        found["eos"] = left.pop(0)
    if left:
        found["eot"] = left[0]
    return {name: int(number) for name, number in found.items() if number is not None}


def _refused(why: str) -> InputError:
    return InputError(f"the tokenizer of this variant {why}: {LEVER}")
