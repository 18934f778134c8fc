"""The pre-tokenizers that GGUF files name in `tokenizer.ggml.pre`.

A byte-level BPE cuts text into words before it merges; two vocabularies that look alike
cut differently, and the wrong cut gives other tokens in silence. So each name maps to the
cut of the models that carry it, and an unknown name is an error. The names are llama.cpp's
(src/llama-vocab.cpp); the patterns are those of the models' own tokenizer.json.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from lockstep.types import ModelError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


@dataclass(frozen=True, slots=True)
class WordCut:
    """How a family of byte-level vocabularies prepares text.

    Attributes:
        pattern: matches one word; None is GPT-2's own pattern.
        single_digits: every digit is cut out before the pattern is applied.
        whole_words: a word that is in the vocabulary is one token, without merging.
        starts_text: a text starts with the start id unless the file says otherwise.
        composes: text is brought to Unicode's composed form (NFC) first.
    """

    pattern: str | None = None
    single_digits: bool = False
    whole_words: bool = False
    starts_text: bool = False
    composes: bool = False

    def pre_tokenizer(self) -> PreTokenizer:
        """Cuts words and writes their bytes in GPT-2's stand-ins."""
        if self.pattern is not None:
            cut = pre_tokenizers.Split(Regex(self.pattern), "isolated")
            return pre_tokenizers.Sequence([cut, _byte_level(use_regex=False)])
        if self.single_digits:
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, _byte_level(use_regex=True)])
        return _byte_level(use_regex=True)

    def normalizer(self) -> Normalizer | None:
        """What is done to text before it is cut, if anything."""
        return normalizers.NFC() if self.composes else None


def _byte_level(*, use_regex: bool) -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


_GPT2 = WordCut()
_DIGITS = WordCut(single_digits=True)
_LLAMA3 = WordCut(rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}")
_LLAMA3_WHOLE = WordCut(_LLAMA3.pattern, whole_words=True, starts_text=True)
_ONE_DIGIT = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}"
_TEKKEN = WordCut(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    whole_words=True,
    starts_text=True,
)
_CUTS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3_WHOLE),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _LLAMA3),
    "qwen2": WordCut(_ONE_DIGIT, composes=True),
    "deepseek-r1-qwen": WordCut(_ONE_DIGIT),
    "tekken": _TEKKEN,
}


def word_cut(name: str) -> WordCut:
    """The cut called `name`.

    Raises:
        ModelError: no such name is known, or the file gives none.
    """
    if not name:
        raise ModelError("tokenizer: the file names no pre-tokenizer (tokenizer.ggml.pre)")
    cut = _CUTS.get(name)
    if cut is None:
        known = ", ".join(sorted(_CUTS))
        raise ModelError(
            f"tokenizer: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported ({known} are)"
        )
    return cut
