"""Tokenizers from the lists that GGUF files carry."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lockstep.text import Tokenizer
from lockstep.text.pretokenizers import word_cut
from lockstep.text.vocabulary import TokenKind, Vocabulary, build
from lockstep.types import ModelError

PIECES = ["<unk>", "<s>", "</s>", "\u2581", "h", "i", "hi", "\u2581hi", "x", "é"]
SENTENCEPIECE = Vocabulary(
    model="llama",
    tokens=[*PIECES, *(f"<0x{byte:02X}>" for byte in range(256))],
    kinds=[2, 3, 3, *[1] * 7, *[6] * 256],
    scores=[0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -1.0, -2.0, -9.0, -9.0, *[0.0] * 256],
    unknown_id=0,
    add_bos=1,
)
BYTES = Vocabulary(model="gpt2", pre="gpt-2", tokens=["a", "b", "ab", "<e>"], merges=["a b"])


def test_sentencepiece_with_its_leading_space() -> None:
    tokenizer = Tokenizer(build(SENTENCEPIECE), bos_id=1)
    assert tokenizer.encode("hi") == [1, 7]
    assert tokenizer.encode("hi hi", add_special_tokens=False) == [7, 7]
    assert tokenizer.decode([1, 7, 7]) == "hi hi"
    # The leading space is an artefact at the start only.
    assert tokenizer.strips_leading_space
    assert tokenizer.token_text(7) == " hi"
    assert tokenizer.bad_word_ids(["hi"]) == ((6,), (7,))


def test_sentencepiece_falls_back_to_bytes() -> None:
    tokenizer = Tokenizer(build(dataclasses.replace(SENTENCEPIECE, add_space_prefix=False)))
    ids = tokenizer.encode("xß", add_special_tokens=False)
    first = len(PIECES)
    assert ids == [8, first + 0xC3, first + 0x9F]
    assert tokenizer.decode(ids) == "xß"
    assert tokenizer.token_bytes(first + 0xC3) == b"\xc3"
    assert not tokenizer.strips_leading_space


def test_scores_order_merges() -> None:
    # "hi" merges before "▁h" could: with the scores turned round the cut differs.
    pieces = ["<unk>", "a", "b", "c", "ab", "bc"]
    for scores, cut in (([0, 0, 0, 0, -1, -2], ["ab", "c"]), ([0, 0, 0, 0, -2, -1], ["a", "bc"])):
        vocabulary = Vocabulary(
            model="llama",
            tokens=pieces,
            scores=[float(score) for score in scores],
            unknown_id=0,
            add_space_prefix=False,
        )
        ids = build(vocabulary).encode("abc").ids
        assert [pieces[token] for token in ids] == cut


def test_control_and_user_tokens() -> None:
    kinds = [TokenKind.NORMAL] * 3 + [TokenKind.CONTROL]
    tokenizer = Tokenizer(build(dataclasses.replace(BYTES, kinds=kinds)))
    assert tokenizer.encode("ab<e>b") == [2, 3, 1]
    assert tokenizer.special_ids == {3}
    kinds[3] = TokenKind.USER_DEFINED
    tokenizer = Tokenizer(build(dataclasses.replace(BYTES, kinds=kinds)))
    assert tokenizer.encode("ab<e>b") == [2, 3, 1]
    assert tokenizer.special_ids == frozenset()


def test_start_and_end_ids_surround_a_text() -> None:
    tokenizer = Tokenizer(build(dataclasses.replace(BYTES, add_bos=3, add_eos=1)))
    assert tokenizer.encode("a") == [3, 0, 1]
    assert tokenizer.encode("a", add_special_tokens=False) == [0]


def test_names_with_template_signs_surround_as_well() -> None:
    tokens = ["a", "<|b:1|>", "$A"]
    vocabulary = Vocabulary(model="gpt2", pre="gpt-2", tokens=tokens, add_bos=1, add_eos=2)
    assert Tokenizer(build(vocabulary)).encode("a") == [1, 0, 2]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": "unigram"}, "'unigram' is not supported"),
        ({"pre": "brand-new"}, "'brand-new'"),
        ({"pre": "default"}, "'default'"),
        ({"pre": ""}, "names no pre-tokenizer"),
        ({"merges": ["a c"]}, "merge 0"),
        ({"merges": ["ab"]}, "merge 0"),
        ({"kinds": [1]}, "1 entries of token_type"),
        ({"tokens": ["a", "b", "ab", "a"]}, "'a' stands twice"),
        ({"add_bos": 9}, "bos id 9"),
        ({"unknown_id": -1}, "unknown id -1"),
        ({"model": "llama"}, "scores"),
    ],
)
def test_what_cannot_be_built_is_named(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        build(dataclasses.replace(BYTES, **changes))


CASES = {
    # pattern words of each family for one line, cut by hand from the models' patterns
    "gpt-2": ["I", "'m", " 2024", " a", "  ", " b", "!!"],
    "smollm": ["I", "'m", " ", "2", "0", "2", "4", " a", "  ", " b", "!!"],
    "llama-bpe": ["I", "'m", " ", "202", "4", " a", "  ", " b", "!!"],
    "qwen2": ["I", "'m", " ", "2", "0", "2", "4", " a", "  ", " b", "!!"],
    "tekken": ["I", "'m", " ", "2", "0", "2", "4", " a", "  ", " b", "!!"],
}


@pytest.mark.parametrize("name", CASES)
def test_word_cuts(name: str) -> None:
    text = "I'm 2024 a   b!!"
    cut = word_cut(name).pre_tokenizer().pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == CASES[name]


def test_contractions_in_capitals() -> None:
    text = "I'M"
    words = {name: word_cut(name).pre_tokenizer().pre_tokenize_str(text) for name in CASES}
    assert len(words["llama-bpe"]) == 2  # I 'M
    assert len(words["gpt-2"]) == 3  # I ' M


def test_qwen2_composes_text() -> None:
    vocabulary = Vocabulary(model="gpt2", pre="qwen2", tokens=["Ã", "©"])
    assert build(vocabulary).encode("e\u0301").ids == [0, 1]
