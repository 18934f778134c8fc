"""Ids of the real vocabularies against two independent implementations, and their bytes."""

from __future__ import annotations

import json
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.text import Tokenizer
from lockstep.types import RequestError
from lockstep.weights import open_checkpoint

# Texts with their ids by llama.cpp (xllamacpp 2026.10.11549, its server's /tokenize with
# parse_special), from the same two GGUF files.
GOLDEN = json.loads((Path(__file__).parent / "data" / "llamacpp_ids.json").read_text("ascii"))


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_ids_equal_llama_cpp(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue("gemma" if name == "gemma3-270m" else "smollm2")
    assert len(GOLDEN) > 150
    different = [
        row["text"]
        for row in GOLDEN
        if tokenizer.encode(row["text"], add_special_tokens=False) != row[name]
    ]
    assert different == []


class SlowSmolLM:
    """SmolLM2's tokenizer written down again: digits, GPT-2's words, merges by rank."""

    DIGIT = regex.compile(r"\p{N}|\P{N}+")
    WORD = regex.compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        merges = metadata["tokenizer.ggml.merges"]
        self.ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(merges)}
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        rest = [byte for byte in range(256) if byte not in printable]
        self.stand_in = {byte: chr(byte) for byte in printable}
        self.stand_in |= {byte: chr(256 + index) for index, byte in enumerate(rest)}
        self.word = lru_cache(None)(self._word)

    def _word(self, word: str) -> tuple[int, ...]:
        parts = [self.stand_in[byte] for byte in word.encode()]
        while len(parts) > 1:
            ranked = [
                (self.ranks[pair], index)
                for index, pair in enumerate(pairwise(parts))
                if pair in self.ranks
            ]
            if not ranked:
                break
            _, at = min(ranked)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return tuple(self.ids[part] for part in parts)

    def encode(self, text: str) -> list[int]:
        return [
            token
            for piece in self.DIGIT.findall(text)
            for word in self.WORD.findall(piece)
            for token in self.word(word)
        ]


@pytest.fixture(scope="module")
def slow() -> SlowSmolLM:
    from lockstep.weights.gguf_file import GGUFFile

    return SlowSmolLM(GGUFFile(open_checkpoint("smollm2").path).metadata)


@pytest.mark.parametrize("text", ["x =  42", "a\n  7", "\t\t5 apples", "½ 1²3 Ⅷ ٣", "  \n 1"])
def test_i09_blanks_before_digits(smollm2: Tokenizer, slow: SlowSmolLM, text: str) -> None:
    assert smollm2.encode(text) == slow.encode(text)


MIXED = st.text(
    st.one_of(
        st.sampled_from(" \n\t\r0123456789.,'\"-_=(){}abcXYZ"),
        st.sampled_from("é漢字한글नमस्तेعربي😀👍🏽\u200d\u0301½²\u00a0\u3000ﬁ"),
        # SmolLM2's vocabulary lacks a few control characters and the highest planes.
        st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x3FFFF),
    ),
    max_size=40,
)


def test_what_a_vocabulary_cannot_write_is_left_out(smollm2: Tokenizer) -> None:
    assert smollm2.token_id("\u0104") is None  # byte 4
    assert smollm2.encode("a\x04b") == [*smollm2.encode("a"), *smollm2.encode("b")]


@settings(max_examples=300, deadline=None)
@given(text=MIXED)
def test_ids_equal_a_second_implementation(smollm2: Tokenizer, slow: SlowSmolLM, text: str) -> None:
    ids = smollm2.encode(text)
    assert ids == slow.encode(text)
    assert smollm2.decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(text=MIXED.filter(lambda text: "\u2581" not in text))
def test_round_trip(real: Tokenizer, text: str) -> None:
    ids = real.encode(text, add_special_tokens=False)
    assert real.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(real.token_bytes, ids)) == text.encode()


def test_special_tokens(smollm2: Tokenizer, gemma: Tokenizer) -> None:
    assert smollm2.eos_ids[0] == 2
    assert smollm2.bos_id == 1
    assert smollm2.vocab_size == 49152
    assert {0, 1, 2} <= smollm2.special_ids
    assert 104 not in smollm2.special_ids
    assert smollm2.encode("hi") == smollm2.encode("hi", add_special_tokens=False)
    assert smollm2.encode("<|im_end|>") == [2]
    assert smollm2.decode([2, 104]) == "x"
    assert smollm2.decode([2, 104], skip_special_tokens=False) == "<|im_end|>x"
    assert gemma.eos_ids == (1, 106)  # <eos>, and <end_of_turn> by convention
    assert gemma.encode("hi")[0] == gemma.bos_id == 2
    assert gemma.encode("hi")[1:] == gemma.encode("hi", add_special_tokens=False)


def test_every_id_has_bytes(real: Tokenizer) -> None:
    # A13: a token with bytes has a text; only ids beyond the vocabulary have neither.
    for token in range(real.vocab_size):
        data = real.token_bytes(token)
        assert data
        text = real.token_text(token)
        assert text
        assert text == f"bytes:{''.join(f'{chr(92)}x{b:02x}' for b in data)}" or (
            text.encode() == data
        )
    assert real.token_bytes(real.vocab_size) == b""
    assert real.token_text(real.vocab_size) == ""
    assert real.token_bytes(-1) == b""


def test_byte_tokens_keep_their_bytes(real: Tokenizer) -> None:
    # A11: parts of a character are their own bytes, never those of U+FFFD.
    for text in ("😀", "\U00013000", "𝕳"):
        ids = real.encode(text, add_special_tokens=False)
        assert b"".join(map(real.token_bytes, ids)) == text.encode()
    part = smallest_part(real)
    assert real.token_bytes(part) != "\ufffd".encode()
    assert real.token_text(part).startswith("bytes:\\x")


def smallest_part(tokenizer: Tokenizer) -> int:
    """A token that is the first byte of a longer character."""
    return tokenizer.encode("\U00013000", add_special_tokens=False)[0]


def test_alternatives_keep_their_leading_space(real: Tokenizer) -> None:
    # A13: an alternative is shown as it reads in the middle of a text.
    (token,) = real.encode(" world", add_special_tokens=False)
    assert real.token_text(token) == " world"


def test_bad_word_ids(real: Tokenizer) -> None:
    found = real.bad_word_ids(["world", "two words"])
    texts = [b"".join(map(real.token_bytes, ids)).decode() for ids in found]
    assert texts == ["world", " world", "two words", " two words"]
    assert len(found[1]) == 1
    assert real.bad_word_ids([]) == ()
    assert real.bad_word_ids(["a", "a", " a"]) == real.bad_word_ids(["a"])


def test_text_that_is_no_unicode_is_refused(real: Tokenizer) -> None:
    with pytest.raises(RequestError):
        real.encode("\ud800")
