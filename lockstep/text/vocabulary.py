"""A `tokenizers.Tokenizer` from the vocabulary that a GGUF file carries.

Two kinds exist here. "gpt2": byte-level BPE with a merge list and a named pre-tokenizer.
"llama": SentencePiece BPE, where the score of a piece orders the merges and characters
outside the vocabulary fall back to byte tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from lockstep.text.pretokenizers import word_cut
from lockstep.types import ModelError

_SPACE = "\u2581"


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A vocabulary as plain values.

    Attributes:
        model: "gpt2" or "llama".
        pre: the pre-tokenizer's name, for "gpt2".
        tokens: names by id.
        kinds: `TokenKind` values by id; empty means all normal.
        scores: by id, for "llama"; higher merges earlier.
        merges: "left right" in order of rank, for "gpt2".
        unknown_id: of the token for what cannot be encoded.
        add_bos, add_eos: ids put around a text when special tokens are asked for.
        add_space_prefix: a text is encoded with a space before it ("llama").
    """

    model: str
    tokens: Sequence[str]
    pre: str = ""
    kinds: Sequence[int] = ()
    scores: Sequence[float] = ()
    merges: Sequence[str] = ()
    unknown_id: int | None = None
    add_bos: int | None = None
    add_eos: int | None = None
    add_space_prefix: bool = True


def build(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer of `vocabulary`.

    Raises:
        ModelError: a kind or pre-tokenizer that is not known, or lists that do not fit.
    """
    size = len(vocabulary.tokens)
    for name, values in (("token_type", vocabulary.kinds), ("scores", vocabulary.scores)):
        if len(values) not in (0, size):
            raise ModelError(
                f"tokenizer: {len(values)} entries of {name} for {size} tokens of the vocabulary"
            )
    for name, token in (
        ("unknown", vocabulary.unknown_id),
        ("bos", vocabulary.add_bos),
        ("eos", vocabulary.add_eos),
    ):
        if token is not None and not 0 <= token < size:
            raise ModelError(f"tokenizer: {name} id {token} is outside the {size} tokens")
    if vocabulary.model == "gpt2":
        tokenizer = _byte_level(vocabulary)
    elif vocabulary.model == "llama":
        tokenizer = _sentencepiece(vocabulary)
    else:
        raise ModelError(f"tokenizer: kind {vocabulary.model!r} is not supported")
    _add_special(tokenizer, vocabulary)
    _surround(tokenizer, vocabulary)
    return tokenizer


def _ids(vocabulary: Vocabulary) -> dict[str, int]:
    ids = {name: token for token, name in enumerate(vocabulary.tokens)}
    if len(ids) != len(vocabulary.tokens):
        seen: set[str] = set()
        for name in vocabulary.tokens:
            if name in seen:
                raise ModelError(f"tokenizer: token {name!r} stands twice in the vocabulary")
            seen.add(name)
    return ids


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    cut = word_cut(vocabulary.pre)
    ids = _ids(vocabulary)
    pairs = []
    for rank, line in enumerate(vocabulary.merges):
        # A space inside a piece is written as its stand-in, so the first one divides.
        left, found, right = line.partition(" ")
        if not found or left not in ids or right not in ids or left + right not in ids:
            raise ModelError(f"tokenizer: merge {rank} ({line!r}) names no tokens")
        pairs.append((left, right))
    model = BPE(vocab=ids, merges=pairs, fuse_unk=False, ignore_merges=cut.whole_words)
    tokenizer = Tokenizer(model)
    if (normalizer := cut.normalizer()) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = cut.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _score_merges(vocabulary: Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Merges of a SentencePiece BPE vocabulary, which stores scores in their place.

    Every way to cut a piece into two pieces is a merge of that piece's score. Of equal
    scores, the longer left part comes first, as it does when Hugging Face converts such a
    vocabulary.
    """
    kinds = vocabulary.kinds or (TokenKind.NORMAL,) * len(vocabulary.tokens)
    normal = {
        name: token
        for name, token in ids.items()
        if kinds[token] in (TokenKind.NORMAL, TokenKind.UNUSED)
    }
    scores = vocabulary.scores
    if not scores:
        raise ModelError("tokenizer: a 'llama' vocabulary needs tokenizer.ggml.scores")
    order = sorted(normal, key=lambda name: -scores[normal[name]])
    pairs: list[tuple[str, str]] = []
    for name in order:
        for cut in range(len(name) - 1, 0, -1):
            if (left := name[:cut]) in normal and (right := name[cut:]) in normal:
                pairs.append((left, right))
    return pairs


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    ids = _ids(vocabulary)
    unknown = None if vocabulary.unknown_id is None else vocabulary.tokens[vocabulary.unknown_id]
    model = BPE(
        vocab=ids,
        merges=_score_merges(vocabulary, ids),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_space_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _add_special(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    special, ordinary = [], []
    for token, kind in enumerate(vocabulary.kinds):
        name = vocabulary.tokens[token]
        if not name:
            continue
        if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN):
            special.append(AddedToken(name, special=True, normalized=False))
        elif kind == TokenKind.USER_DEFINED:
            ordinary.append(AddedToken(name, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(ordinary)


def _surround(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Puts the start and end ids around a text that is encoded with special tokens."""
    single, known = ["$A"], []
    for label, token in (("start", vocabulary.add_bos), ("end", vocabulary.add_eos)):
        if token is not None:
            single.insert(0 if label == "start" else len(single), label)
            known.append({"id": label, "ids": [token], "tokens": [vocabulary.tokens[token]]})
    if known:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=known
        )
