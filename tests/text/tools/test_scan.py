"""JSON a character at a time agrees with Python's reader."""

from __future__ import annotations

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.text.tools.scan import MAX_DEPTH, JsonValue
from tests.text.tools.formats import values


def scanned(text: str) -> str | None:
    """What comes out for a whole value; None when it is refused or not complete."""
    value = JsonValue()
    pieces = []
    for character in text + " ":
        if value.done:
            break
        piece = value.feed(character)
        if piece is None:
            return None
        pieces.append(piece)
    return "".join(pieces) if value.done else None


def refuse(constant: str) -> None:
    raise ValueError(constant)


@given(value=values, indent=st.sampled_from([None, 1]), ascii=st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_value_is_read(value: object, indent: int | None, ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    assert (scanned(text) or "").rstrip() == text


@given(text=st.text(st.sampled_from('{}[]",:0123.eE+-truefalsn\\u/bx \n\t'), max_size=24))
@example("-0.5e+10")
@example("01")
@example('["\\ud83d"]')
@example("[1,]")
@example('{"a":1,}')
@settings(max_examples=400, deadline=None)
def test_whatever_is_accepted_is_json_and_nothing_else(text: str) -> None:
    result = scanned(text.strip())
    try:
        wanted, end = json.JSONDecoder(strict=False, parse_constant=refuse).raw_decode(text.strip())
    except ValueError:
        assert result is None
        return
    if isinstance(wanted, int | float) and not isinstance(wanted, bool):
        return  # where a number ends that stands alone is not settled by its characters
    assert result is not None
    assert json.loads(result) == wanted
    assert len(result.rstrip()) >= end


def test_depth_is_bounded() -> None:
    assert scanned("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not None
    assert scanned("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)) is None


def test_a_line_break_in_a_string_is_escaped() -> None:
    assert scanned('["a\n\tb\x00"]') == '["a\\n\\tb\\u0000"]'
