"""The pre-tokenizers that GGUF files name in `tokenizer.ggml.pre`.

A byte-level BPE cuts text into words before it merges; two vocabularies that look alike
cut differently, and the wrong cut gives other tokens in silence. So each name maps to the
cut of the models that carry it, and an unknown name is an error. The names are llama.cpp's
(src/llama-vocab.cpp); the patterns are those of the models' own tokenizer.json.
"""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from lockstep.types import ModelError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Name in the file -> pattern that cuts words, for those whose words are one pattern.
_PATTERNS = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _QWEN2),
    "tekken": _TEKKEN,
}
# GPT-2's own pattern, on text as it stands or with every digit cut out first.
_GPT2 = ("gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2")
_GPT2_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
# The model was trained with a tokenizer that takes a word whole when the vocabulary has it.
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer called `name`.

    Raises:
        ModelError: no such name is known.
    """
    if name in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _GPT2_SINGLE_DIGITS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    pattern = _PATTERNS.get(name)
    if pattern is None:
        raise ModelError(
            f"tokenizer: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported"
            if name
            else "tokenizer: the file names no pre-tokenizer (tokenizer.ggml.pre)"
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def ignores_merges(name: str) -> bool:
    """Whether a word that is in the vocabulary becomes one token without merging."""
    return name in _WHOLE_WORDS
