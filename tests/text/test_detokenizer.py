"""Bytes of tokens to text: nothing repeated, nothing lost, nothing taken back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.text import TextStream, Tokenizer
from lockstep.text.detokenizer import Detokenizer, incomplete_tail
from lockstep.types import FinishReason, SamplingParams

PLAIN = SamplingParams(max_tokens=None)
SHOWN = SamplingParams(max_tokens=None, skip_special_tokens=False)


class Pieces:
    """A vocabulary of given byte strings, for streams that no text encodes to."""

    eos_ids: tuple[int, ...] = ()

    def __init__(self, pieces: list[bytes], *, strips_leading_space: bool = False) -> None:
        self.pieces = pieces
        self.special_ids = frozenset(
            index for index, piece in enumerate(pieces) if piece.startswith(b"<s")
        )
        self.strips_leading_space = strips_leading_space

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]


def run(tokenizer: object, prompt: list[int], tokens: list[int], cuts: list[int]) -> list[str]:
    """The deltas of `tokens` pushed in parts that end at `cuts`."""
    stream = TextStream(tokenizer, prompt, SHOWN)  # type: ignore[arg-type]
    ends = sorted({cut for cut in cuts if 0 <= cut < len(tokens)})
    deltas, start = [], 0
    for end in ends:
        deltas.append(stream.push(tokens[start:end]).text)
        start = end
    deltas.append(stream.push(tokens[start:], FinishReason.LENGTH).text)
    return deltas


def follows(whole: str, prompt: str) -> str:
    """What `whole` has beyond `prompt`, whose last character may have been unfinished."""
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    assert prompt.endswith("\ufffd")
    assert whole.startswith(prompt[:-1])
    return whole[len(prompt) - 1 :]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32), count=st.integers(0, 40), before=st.integers(0, 12), data=st.data()
)
def test_any_cut_gives_the_whole(
    real: Tokenizer, seed: int, count: int, before: int, data: st.DataObject
) -> None:
    # Uniform ids would hardly ever be parts of characters: half are drawn from those.
    source = random.Random(seed)
    parts = part_tokens(real)
    tokens = [
        source.choice(parts) if source.random() < 0.5 else source.randrange(real.vocab_size)
        for _ in range(before + count)
    ]
    prompt, output = tokens[:before], tokens[before:]
    cuts = data.draw(st.lists(st.integers(0, max(0, count)), max_size=6))
    joined = "".join(run(real, prompt, output, cuts))
    whole = real.decode(tokens, skip_special_tokens=False)
    assert joined == follows(whole, real.decode(prompt, skip_special_tokens=False))
    assert joined == "".join(run(real, prompt, output, list(range(count))))


_PARTS: dict[int, list[int]] = {}


def part_tokens(tokenizer: Tokenizer) -> list[int]:
    """Tokens whose bytes are no whole characters."""
    if tokenizer.vocab_size not in _PARTS:
        _PARTS[tokenizer.vocab_size] = [
            token
            for token in range(tokenizer.vocab_size)
            if tokenizer.token_text(token).startswith("bytes:\\")
        ]
    return _PARTS[tokenizer.vocab_size]


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(
        st.one_of(
            st.binary(min_size=0, max_size=3),
            st.sampled_from(["😀".encode()[:2], "😀".encode()[2:], "é".encode(), b" ", b"\xf0"]),
            st.text(max_size=2).map(lambda text: text.encode("utf-8", "replace")),
        ),
        max_size=14,
    ),
    prompt=st.integers(0, 6),
    cuts=st.lists(st.integers(0, 14), max_size=5),
)
def test_any_bytes_decode_as_their_whole(pieces: list[bytes], prompt: int, cuts: list[int]) -> None:
    vocabulary = Pieces(pieces)
    tokens = list(range(len(pieces)))
    before = b"".join(pieces[:prompt])
    whole = b"".join(pieces).decode("utf-8", "replace")
    deltas = run(vocabulary, tokens[:prompt], tokens[prompt:], cuts)
    assert "".join(deltas) == follows(whole, before.decode("utf-8", "replace"))


def test_whole_decode_equals_tokenizers(smollm2: Tokenizer) -> None:
    # The byte-level decoder of the tokenizers library is a second implementation of `decode`.
    source = random.Random(5)
    library = smollm2._backend
    ordinary = [token for token in range(smollm2.vocab_size) if token not in smollm2.special_ids]
    for _ in range(200):
        tokens = source.choices(ordinary, k=20)
        assert smollm2.decode(tokens) == library.decode(tokens)


def test_whole_decode_equals_tokenizers_where_bytes_are_valid(gemma: Tokenizer) -> None:
    # tokenizers turns a whole run of byte tokens to U+FFFD when one of them is wrong, which
    # would take text back; where nothing is wrong the two agree.
    library = gemma._backend
    for text in ("curly “quotes” and … dots", "\U00013000 hieroglyph", "  two  spaces", "e\u0301"):
        ids = gemma.encode(text, add_special_tokens=False)
        assert gemma.decode(ids) == library.decode(ids) == text


@pytest.mark.parametrize(
    "pieces",
    [
        ["e", "\u0301", "x"],
        ["🇩", "🇪", "🇫", "🇷"],
        ["👩", "\u200d", "👩", "\u200d", "👧"],
        ["👍", "🏽", "!"],
    ],
)
def test_a10_combining_marks_are_not_sent_twice(pieces: list[str]) -> None:
    vocabulary = Pieces([piece.encode() for piece in pieces])
    deltas = run(vocabulary, [], list(range(len(pieces))), list(range(len(pieces))))
    assert deltas[1:] == pieces or deltas == pieces
    assert "".join(deltas) == "".join(pieces)


def test_a07_prompt_ends_inside_a_character(real: Tokenizer) -> None:
    ids = real.encode("Hello world \U00013000", add_special_tokens=False)
    text = real.encode("\U00013000", add_special_tokens=False)
    first = len(ids) - len(text)
    for cut in range(first + 1, len(ids)):
        stream = TextStream(real, ids[:cut], PLAIN)
        deltas = [stream.push([token]).text for token in ids[cut:]]
        assert "".join(deltas) == "\U00013000"
        assert deltas[-1] == "\U00013000"


def test_a07_a_character_that_is_never_finished_stays_with_the_prompt(real: Tokenizer) -> None:
    part = real.encode("\U00013000", add_special_tokens=False)[0]
    plain = real.encode(" yes", add_special_tokens=False)
    prompt = [*real.encode("Hello", add_special_tokens=False), part]
    assert "".join(run(real, prompt, plain, [])) == " yes"
    assert "".join(run(real, prompt, [], [])) == ""


@pytest.mark.parametrize(
    "text",
    ["안녕하세요, 무엇을 도와드릴까요? 오늘은 날씨가 좋습니다.", "ありがとう。漢字仮名交じり文"],
)
def test_a08_no_replacement_at_any_boundary(real: Tokenizer, text: str) -> None:
    ids = real.encode(text, add_special_tokens=False)
    for size in range(1, 6):
        stream = TextStream(real, [1], PLAIN)
        deltas = [stream.push(ids[at : at + size]).text for at in range(0, len(ids), size)]
        assert "".join(deltas) == text
        assert not any("\ufffd" in delta for delta in deltas)


def test_unfinished_character_at_the_end_is_one_replacement(real: Tokenizer) -> None:
    part = real.encode("\U00013000", add_special_tokens=False)[0]
    stream = TextStream(real, real.encode("a"), PLAIN)
    assert stream.push([part]).text == ""
    assert stream.push([], FinishReason.LENGTH).text == "\ufffd"


def test_a_real_replacement_character_is_text(real: Tokenizer) -> None:
    ids = real.encode("a\ufffdb", add_special_tokens=False)
    assert "".join(run(real, [], ids, list(range(len(ids))))) == "a\ufffdb"


def test_leading_space_of_the_encoder_is_not_output() -> None:
    vocabulary = Pieces([b"<s>", b" Hello", b" world"], strips_leading_space=True)
    opened = Detokenizer(vocabulary, [0], skip_special_tokens=True)
    assert [opened.push(1), opened.push(2)] == ["Hello", " world"]
    continued = Detokenizer(vocabulary, [0, 1], skip_special_tokens=True)
    assert continued.push(2) == " world"


def test_special_tokens_are_hidden_or_shown() -> None:
    vocabulary = Pieces([b"<s>", b"a"])
    assert Detokenizer(vocabulary, [], skip_special_tokens=True).push(0) == ""
    assert Detokenizer(vocabulary, [], skip_special_tokens=False).push(0) == "<s>"


def test_incomplete_tail_is_what_may_still_become_a_character() -> None:
    smile = "😀".encode()
    for length in range(1, 4):
        assert incomplete_tail(b"x" + smile[:length]) == smile[:length]
    assert incomplete_tail(smile) == b""
    assert incomplete_tail(b"\xff") == b""
    assert incomplete_tail(b"a\xf0") == b"\xf0"
    assert incomplete_tail(b"\x98\x80") == b""


def test_work_per_token_is_bounded() -> None:
    # Counted, not timed: how often bytes are asked for does not depend on what came before.
    asked = 0

    class Counting(Pieces):
        def token_bytes(self, token: int) -> bytes:
            nonlocal asked
            asked += 1
            return super().token_bytes(token)

    vocabulary = Counting([b"word "])
    stream = TextStream(vocabulary, [0] * 10_000, SHOWN)  # type: ignore[arg-type]
    assert asked <= 2
    asked = 0
    for _ in range(1000):
        stream.push([0])
    assert asked == 1000
