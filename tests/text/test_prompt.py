"""A turn as the model reads it; ids that are known are not computed again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.text import Tokenizer
from lockstep.text.dialect import dialect_of
from lockstep.text.prompt import ChatPrompt, show
from lockstep.text.tokenizer import common_beginning
from lockstep.text.tools import Function
from lockstep.text.turn import Turn, functions_of
from lockstep.types import RequestError
from lockstep.weights import open_checkpoint

MODELS = ("smollm2", "gemma3-270m")
TOKENIZERS = {name: open_checkpoint(name).tokenizer() for name in MODELS}
LOOK = Function("look", "Looks.", {"type": "object", "properties": {"c": {"type": "string"}}})
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"c": "Oslo"}'}}
ASKED: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
]

PIECES = (
    *("<|im_start|>", "<|im_end|>", "<end_of_turn>", "<start_of_turn>", "<|im_", "|>", "<bos>"),
    *(" ", "\n", "  ", "\t\n", "a", "word " * 9, "\u00e9", "\N{SNOWMAN}", "<0x41>", "\u2581", "12"),
)
pieces = st.sampled_from(PIECES)
texts = st.lists(pieces, max_size=12).map("".join) | st.text(max_size=30)


@pytest.mark.parametrize("name", MODELS)
@given(head=texts, one=texts, two=texts)
def test_ids_beside_a_known_text_are_those_of_the_text_alone(
    name: str, head: str, one: str, two: str
) -> None:
    tokenizer = TOKENIZERS[name]
    known, other = head + one, head + two
    ids = tokenizer.encode(known, add_special_tokens=False)
    alone = tokenizer.encode(other, add_special_tokens=False)
    assert tokenizer.encode_beside(other, known, ids) == alone


@given(texts, texts, texts)
def test_what_texts_begin_with_in_common(head: str, one: str, two: str) -> None:
    a, b = head + one, head + two
    shared = common_beginning(a, b)
    assert a[:shared] == b[:shared]
    assert shared == min(len(a), len(b)) or a[shared] != b[shared]


def test_a_long_conversation_is_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS["smollm2"]
    turn = Turn([{"role": "user", "content": "A long document, told in many words. " * 300}])
    chat = ChatPrompt.of(tokenizer, show(tokenizer, dialect_of(tokenizer), turn))
    opening = chat.shown.text(tokenizer, opened=False)
    asked = [*turn.messages, {"role": "assistant", "content": "Yes."}]
    asked.append({"role": "user", "content": "Sure?"})
    later = tokenizer.render_chat(asked)
    expected = {text: tokenizer.encode(text, add_special_tokens=False) for text in (opening, later)}
    encoded: list[int] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    for text, ids in expected.items():
        assert chat.ids_of(tokenizer, text) == ids
    assert sum(encoded) < 400


def test_a_model_without_functions_is_told_of_them_in_text() -> None:
    tokenizer = TOKENIZERS["smollm2"]
    shown = show(tokenizer, dialect_of(tokenizer), Turn(ASKED, [LOOK]))
    assert [message["role"] for message in shown.messages] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert '"arguments": {"c": "Oslo"}' in shown.messages[2]["content"]
    assert "rain" in shown.messages[3]["content"]
    assert shown.tools is None


def test_arguments_may_be_an_object_and_contents_parts() -> None:
    tokenizer = TOKENIZERS["smollm2"]
    function = {"name": "look", "arguments": {"c": "Oslo"}}
    other = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "rain"}]},
    ]
    dialect = dialect_of(tokenizer)
    one, two = (show(tokenizer, dialect, Turn(given, [LOOK])) for given in (ASKED, other))
    assert one.text(tokenizer) == two.text(tokenizer)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "tool", "content": "x"}, r"messages\[1\].tool_call_id must be the id"),
        ({"role": "assistant", "tool_calls": 7}, r"messages\[1\].tool_calls must be a list"),
        ({"role": "assistant", "tool_calls": ["x"]}, r"tool_calls\[0\] must have an id and a f"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, r"must have an id and a function"),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "x"}}]},
            "must have a name and arguments",
        ),
    ],
)
def test_calls_that_are_none(message: dict[str, Any], complaint: str) -> None:
    tokenizer = TOKENIZERS["smollm2"]
    turn = Turn([{"role": "user", "content": "x"}, message])
    with pytest.raises(RequestError, match=complaint) as caught:
        show(tokenizer, dialect_of(tokenizer), turn)
    assert caught.value.field == "messages"


def test_tools_that_are_none() -> None:
    (found,) = functions_of([{"type": "function", "function": {"name": "look"}}])
    assert (found.name, found.parameters, found.strict) == ("look", {}, False)
    named = {"function": {"name": "look"}}
    for tools in ("look", [7], [{"function": {}}], [{"name": "look"}], [named, named]):
        with pytest.raises(RequestError) as caught:
            functions_of(tools)  # type: ignore[arg-type]
        assert caught.value.field == "tools"
