"""Stop strings: never leaked, found over any token border, the same however text is cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.text import TextStream, Tokenizer
from lockstep.text.stops import StopMatcher
from lockstep.types import FinishReason, SamplingParams


class Characters:
    """One token a piece of text."""

    eos_ids = (0,)
    special_ids = frozenset((0,))
    strips_leading_space = False

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = ["<end>", *pieces]

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token].encode()


def stream_of(pieces: list[str], **settings: object) -> TextStream:
    params = SamplingParams(max_tokens=None, **settings)  # type: ignore[arg-type]
    return TextStream(Characters(pieces), [], params)  # type: ignore[arg-type]


def play(pieces: list[str], **settings: object) -> tuple[list[str], str | int | None]:
    """Deltas of the pieces pushed one by one until a stop, and what stopped them."""
    stream = stream_of(pieces, **settings)
    deltas = []
    for token in range(1, len(pieces) + 1):
        finish = FinishReason.LENGTH if token == len(pieces) else None
        delta = stream.push([token], finish)
        deltas.append(delta.text)
        if stream.closed:
            break
    return deltas, stream.stopped


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The stop string that is complete first, of several the longest; by looking everywhere."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=10),
    stops=st.lists(st.text("ab ", min_size=1, max_size=5), min_size=1, max_size=4),
    width=st.integers(1, 5),
    include=st.booleans(),
)
def test_equal_to_looking_everywhere(
    pieces: list[str], stops: list[str], width: int, include: bool
) -> None:
    text = "".join(pieces)
    expected, stop = reference(text, stops)
    stream = stream_of(pieces, stop=tuple(stops), include_stop_str_in_output=include)
    joined, sent = "", []
    for at in range(0, len(pieces), width):
        last = at + width >= len(pieces)
        tokens = [token + 1 for token in range(at, min(at + width, len(pieces)))]
        delta = stream.push(tokens, FinishReason.LENGTH if last else None)
        joined += delta.text
        sent.append(delta.text)
        if stream.closed:
            break
    assert stream.stopped == stop
    assert joined == expected + (stop if include and stop else "")
    # Nothing that was sent early had to be taken back, and nothing that cannot become a
    # stop string was held: what is missing is a beginning of one.
    if stop is None and not include:
        assert joined == text


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_held_text_is_exactly_what_may_still_match(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    for end in range(1, len(text) + 1):
        matcher.push(text[end - 1])
        seen = text[:end]
        longest = max(
            (
                length
                for stop in stops
                for length in range(1, len(stop))
                if seen.endswith(stop[:length])
            ),
            default=0,
        )
        assert matcher.held() == longest


def test_a01_no_piece_of_a_stop_string_is_sent() -> None:
    deltas, stopped = play(["DE", "FG", "HI", "J", "KL"], stop=("DEFGHIJ",))
    assert deltas == ["", "", "", ""]
    assert stopped == "DEFGHIJ"


def test_a01_text_that_did_not_become_a_stop_is_released() -> None:
    deltas, stopped = play(["DE", "FG", "xy"], stop=("DEFGHIJ",))
    assert deltas == ["", "", "DEFGxy"]
    assert stopped is None
    deltas, stopped = play(["a", "DE"], stop=("DEF",))
    assert deltas == ["a", "DE"]  # released when the sequence ends
    assert stopped is None


def test_a05_a_stop_of_two_words_ends_exactly_before_it() -> None:
    words = ["alpha", " beta", " gamma", " delta"]
    deltas, stopped = play(words, stop=("beta gamma",))
    assert "".join(deltas) == "alpha "
    assert stopped == "beta gamma"
    assert "".join(play(words, stop=("gamma",))[0]) == "alpha beta "


def test_a05_the_rest_of_the_token_is_cut() -> None:
    deltas, stopped = play(["one", " two three", " four"], stop=("two",))
    assert "".join(deltas) == "one "
    assert stopped == "two"


def test_a04_text_and_token_prompts_stop_alike(real: Tokenizer) -> None:
    text = "First line.\nSecond line.\n\nThird paragraph."
    prompt = real.encode("Write")
    ids = real.encode(text, add_special_tokens=False)
    params = SamplingParams(max_tokens=None, stop=("\n\n",))
    results = []
    for given_prompt in (prompt, tuple(prompt)):
        stream = TextStream(real, given_prompt, params)
        joined, taken = "", 0
        for token in ids:
            delta = stream.push([token])
            joined += delta.text
            taken += delta.tokens
            if stream.closed:
                break
        results.append((joined, taken, stream.stopped))
    assert results[0] == results[1]
    assert results[0][0] == "First line.\nSecond line."
    assert results[0][2] == "\n\n"
    # All at once: the tokens after the stop are not part of the answer.
    whole = TextStream(real, prompt, params).push(ids, FinishReason.LENGTH)
    assert (whole.text, whole.tokens, whole.stopped) == results[0]


def test_the_stop_that_is_complete_first_wins_whatever_the_cut() -> None:
    for pieces in (["xabcd"], ["x", "a", "b", "c", "d"], ["xab", "cd"]):
        deltas, stopped = play(pieces, stop=("abcd", "bc"))
        assert ("".join(deltas), stopped) == ("xa", "bc")
    assert play(["xabc"], stop=("c", "abc", "bc"))[1] == "abc"


def test_stop_in_the_output_when_asked_for() -> None:
    deltas, _ = play(["one", " two three"], stop=("two",), include_stop_str_in_output=True)
    assert "".join(deltas) == "one two"


@pytest.mark.parametrize("width", [1, 2, 5])
def test_min_tokens_lets_early_stops_pass(width: int) -> None:
    pieces = ["a.", "b.", "c.", "d.", "e."]
    stream = stream_of(pieces, stop=(".",), min_tokens=3)
    joined, taken = "", 0
    for at in range(0, len(pieces), width):
        delta = stream.push([token + 1 for token in range(at, min(at + width, len(pieces)))])
        joined += delta.text
        taken += delta.tokens
        if stream.closed:
            break
    assert joined == "a.b.c"
    assert taken == 3
    assert stream.stopped == "."


def test_end_tokens_show_no_text() -> None:
    stream = stream_of(["hi"], skip_special_tokens=False)
    assert stream.push([1, 0], FinishReason.STOP).text == "hi"
    assert stream.stopped is None
    stream = stream_of(["hi"], skip_special_tokens=False, include_stop_str_in_output=True)
    assert stream.push([1, 0], FinishReason.STOP).text == "hi<end>"
    # A token that stands there for another reason is text like any other.
    stream = stream_of(["hi"], skip_special_tokens=False)
    assert stream.push([0, 1], FinishReason.LENGTH).text == "<end>hi"


def test_a_clients_stop_token_is_named() -> None:
    stream = stream_of(["hi", "bye"], stop_token_ids=(2,))
    delta = stream.push([1, 2], FinishReason.STOP)
    assert (delta.text, delta.stopped, delta.tokens) == ("hi", 2, 2)


def test_offsets_grow_and_fit_the_text() -> None:
    stream = stream_of(["a", "bc", "", "é", "stop", "x"], stop=("stop",))
    offsets, text = [], ""
    for tokens in ([1, 2], [3], [4, 5, 6]):
        delta = stream.push(tokens)
        offsets.extend(delta.token_offsets)
        text += delta.text
    assert text == "abcé"
    assert offsets == [0, 1, 3, 3, 4]


class Counted(str):
    """Text that counts how often a character of it is looked at."""

    looks = 0

    def __getitem__(self, key: Any) -> str:
        Counted.looks += 1
        return super().__getitem__(key)


def test_long_stop_strings_cost_no_more_a_character() -> None:
    matcher = StopMatcher(["a" * 5000 + "b"])
    matcher._stops[0].text = Counted(matcher._stops[0].text)
    for _ in range(100):  # the worst kind of text: every "x" undoes what was matched
        assert matcher.push("a" * 99 + "x") is None
    assert Counted.looks <= 3 * 100 * 100
    assert matcher.push("a" * 7) is None
    assert matcher.held() == 7


def test_after_the_end_nothing_is_added() -> None:
    stream = stream_of(["a"])
    stream.push([1], FinishReason.LENGTH)
    assert stream.push([1]).text == ""
    assert stream.push([1]).tokens == 0
