"""Calls in texts: the same however the text is cut, and nothing that is not one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config import REASONING_PARSERS, TOOL_PARSERS
from lockstep.text.answer import AnswerFormat
from lockstep.text.events import CallText, Text
from lockstep.text.reasoning import THINK_MARKERS
from lockstep.text.tools import Function
from lockstep.text.tools.registry import FORMATS
from lockstep.types import RequestError
from tests.text.tools.formats import (
    MARKED,
    Call,
    answer_format,
    letters,
    read,
    summary,
    values,
    write,
)

NAMES = sorted(FORMATS)

calls = st.lists(
    st.just(("now", {}))
    | st.fixed_dictionaries(
        {"city": letters},
        optional={
            "days": st.integers(-(10**12), 10**12),
            "where": st.lists(st.floats(-1e9, 1e9), max_size=3),
            "more": st.dictionaries(letters, values, max_size=3),
            "exact": st.booleans(),
        },
    ).map(lambda arguments: ("get_weather", arguments)),
    min_size=1,
    max_size=3,
)


def cuts_of(data: st.DataObject, text: str) -> list[int]:
    return data.draw(st.lists(st.integers(0, len(text)), max_size=12))


@pytest.mark.parametrize("name", NAMES)
@given(wanted=calls, before=letters, after=letters, data=st.data())
@settings(max_examples=60, deadline=None)
def test_calls_are_read_as_they_were_meant(
    name: str, wanted: list[Call], before: str, after: str, data: st.DataObject
) -> None:
    if name not in MARKED:
        before = after = ""
    text = before + write(name, wanted) + after
    events = read(text, answer_format(name), cuts_of(data, text))
    found = summary(events)
    assert [(call, json.loads(arguments)) for call, arguments in found.calls] == wanted
    divided = "\n" if before.strip() and after.strip() else ""
    assert found.content == before.rstrip() + divided + after.lstrip()
    assert found.open_calls == 0
    assert events == read(text, answer_format(name), [])
    assert events == read(text, answer_format(name), range(len(text)))
    assert events == read(text, answer_format(name, eager=True), cuts_of(data, text))


@pytest.mark.parametrize("name", NAMES)
@given(wanted=calls, data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_damaged_text_is_read_alike_however_cut(
    name: str, wanted: list[Call], data: st.DataObject
) -> None:
    """Characters lost, doubled or put in anywhere, or the end missing."""
    text = write(name, wanted)
    for _ in range(data.draw(st.integers(0, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 6)))
        text = text[:start] + data.draw(letters) + text[end:]
    text = text[: data.draw(st.integers(0, len(text)))]
    whole = read(text, answer_format(name), [])
    assert whole == read(text, answer_format(name), cuts_of(data, text))
    assert whole == read(text, answer_format(name), range(len(text)))
    found = summary(whole)
    assert found.open_calls == 0
    for call, arguments in found.calls:
        assert call in ("get_weather", "now")
        assert isinstance(json.loads(arguments), dict)
    if not found.calls:
        assert found.content == text
    eager = read(text, answer_format(name, eager=True), cuts_of(data, text))
    assert eager == read(text, answer_format(name, eager=True), range(len(text)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("eager", [False, True])
def test_every_single_cut_of_one_answer(name: str, eager: bool) -> None:
    form = answer_format(name, eager=eager)
    text = write(name, [("get_weather", {"city": 'Zürich "x"', "days": 3}), ("now", {})])
    whole = read(text, form, [])
    assert len(summary(whole).calls) == 2
    for cut in range(len(text)):
        assert read(text, form, [cut]) == whole, text[:cut]


def test_a38_a39b_arguments_in_pieces_of_any_size() -> None:
    arguments = '{"wd":23,"sd":0.8,"injection":"ZSJB39","module_id":"M62121G9142"}'
    text = f'<tool_call>\n{{"name": "now", "arguments": {arguments}}}\n</tool_call>'
    for form in (answer_format("hermes"), answer_format("hermes", eager=True)):
        for step in (1, 2, 5, len(text)):
            found = summary(read(text, form, range(0, len(text), step)))
            assert found.calls == [("now", arguments)]
            assert found.content == ""


def test_eager_arguments_come_while_they_are_written() -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par'
    events = read(text, answer_format("hermes", eager=True), [])
    assert events[-1] == CallText('{"city": "Par')
    assert summary(events).open_calls == 1
    assert read(text, answer_format("hermes"), []) == [Text(text)]


BROKEN = {
    "hermes": [
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>\n{}\n</tool_call>",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "x"}',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": []}</tool_call>',
        '<tool_call>{"name": "now", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "3"}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "{"}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": 01}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": "\\x"}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {}, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "name": "now"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>{'name': 'now'}</tool_call>",
        '<tool_call>{"name": "now", "arguments": ' + '{"a": [' * 200 + "</tool_call>",
        "Hello <tool_cal",
        "call </tool_call> end",
    ],
    "llama3_json": ['{"a": 1}', "{", "{}", '{"name": "Bob", "age": 3}', "<|python_tag|>print(3)"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][]", "[TOOL_CALLS]now", "[TOOL_CALLS]unknown{}"],
    "pythonic": [
        "[1, 2]",
        "[now(]",
        "[now(1)]",
        "[now(a=b)]",
        "[now(a=1, a=2)]",
        "[now(**{})]",
        "[now(a=1e999)]",
        "[now(a={1: 2})]",
        "[unknown()]",
        "[now(a=f'{1}')]",
        "[now(a='x]",
        "[now(a=" + "[" * 300,
        "now()",
    ],
    "qwen3_coder": [
        "<function=unknown></function>",
        "<tool_call>\n<function=now>\n<parameter=a>1</parameter>",
        "<function=now><parameter=a>1</parameter><parameter=a>2</parameter></function>",
        "<tool_call>{}</tool_call>",
        "<function=" + "x" * 300,
    ],
}


@pytest.mark.parametrize(("name", "text"), [(n, t) for n, texts in BROKEN.items() for t in texts])
def test_a37_what_is_no_call_is_content(name: str, text: str) -> None:
    found = summary(read(text, answer_format(name), range(len(text))))
    assert found.calls == []
    assert found.content == text


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name":"now"}</tool_call>', {}),
        ("hermes", '<tool_call>{"name":"now","arguments":null}</tool_call>', {}),
        ("hermes", '<tool_call>{"name":"now","parameters":{"a":1}}</tool_call>', {"a": 1}),
        ("hermes", '<tool_call>{"arguments":{"a":1},"name":"now"}</tool_call>', {"a": 1}),
        ("hermes", '<tool_call>{"name":"now","arguments":"{\\"a\\": 1}"}</tool_call>', {"a": 1}),
        ("hermes", '<tool_call>{"id":7,"name":"now","x":[{}],"arguments":{}}', {}),
        ("hermes", '<tool_call>[{"name":"now","arguments":{"a":1}}]</tool_call>', {"a": 1}),
        ("hermes", '<tool_call>{"name":"now","arguments":{"a":"x\ny"}}</tool_call>', {"a": "x\ny"}),
        ("hermes", '<tool_call>{"name":"now","arguments":{"a":-1.5e-3}}', {"a": -0.0015}),
        ("llama3_json", '<|python_tag|>{"name":"now","parameters":{"a":1}}', {"a": 1}),
        ("llama3_json", '\n{"name":"now","parameters":{"a":1}}\n', {"a": 1}),
        ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {"a": 1}}]', {"a": 1}),
        ("mistral", '[TOOL_CALLS]now[CALL_ID]abc123[ARGS]{"a": 1}', {"a": 1}),
        ("mistral_named", '[TOOL_CALLS]now{"a": 1}', {"a": 1}),
        ("pythonic", "<|python_start|>[now(a=1)]<|python_end|>", {"a": 1}),
        (
            "pythonic",
            "[now(a=[true, false, null, -1], b=(1, 'x'))]",
            {"a": [True, False, None, -1], "b": [1, "x"]},
        ),
        ("pythonic", '[now(a="\\ud83d\\ude42")]', {"a": "🙂"}),
        ("qwen3_coder", "<function=now>\n<parameter=a>\n1\n</parameter>\n</function>", {"a": 1}),
        ("qwen3_coder", "<function=now><parameter=a>x < y</parameter></function>", {"a": "x < y"}),
        ("qwen3_coder", "<function=now><parameter=a>NaN</parameter></function>", {"a": "NaN"}),
    ],
)
def test_what_models_write_beside_the_form(name: str, text: str, arguments: Any) -> None:
    found = summary(read(text, answer_format(name), range(len(text))))
    assert [(call, json.loads(own)) for call, own in found.calls] == [("now", arguments)]
    assert found.content == ""


HALF = "\\ud83d"  # of a surrogate pair: JSON may write it, UTF-8 cannot


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f'<tool_call>{{"name":"now","arguments":{{"a":"{HALF}"}}}}</tool_call>'),
        (
            "hermes",
            f'<tool_call>{{"name":"now","arguments":"{{\\"a\\":\\"{HALF}\\"}}"}}</tool_call>',
        ),
        ("llama3_json", f'{{"parameters":"{{\\"a\\":\\"{HALF}\\"}}","name":"now"}}'),
        ("mistral_named", f'[TOOL_CALLS]now{{"a": "{HALF}"}}'),
        ("qwen3_coder", f'<function=now><parameter=a>"{HALF}"</parameter></function>'),
    ],
)
def test_half_of_a_surrogate_pair_stays_an_escape(name: str, text: str) -> None:
    found = summary(read(text, answer_format(name), []))
    [(_, arguments)] = found.calls
    arguments.encode()  # as every reply is
    assert json.loads(arguments) == {"a": "\ud83d"}


def test_half_of_a_surrogate_pair_is_no_literal_of_python() -> None:
    text = f'[now(a="{HALF}")]'
    assert summary(read(text, answer_format("pythonic"), [])).content == text


def test_text_between_calls_is_content() -> None:
    one = write("hermes", [("now", {})])
    found = summary(read(f" a \n{one}\n\n{one} b {one} c ", answer_format("hermes"), []))
    assert len(found.calls) == 3
    assert found.content == " a\nb\nc "


def test_a_broken_call_leaves_the_others() -> None:
    one = write("hermes", [("now", {})])
    found = summary(read(f"{one}\n<tool_call>{{oops</tool_call>{one}", answer_format("hermes"), []))
    assert len(found.calls) == 2
    assert found.content == "<tool_call>{oops</tool_call>"  # nothing before it to divide from


@given(
    parts=st.lists(
        st.sampled_from(["<think>", "</think>", "<thi", "</", " ", "\n", "x", "é", "<tool_call>"])
        | letters,
        max_size=8,
    ),
    opened=st.booleans(),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_reasoning_is_divided_alike_however_cut(
    parts: list[str], opened: bool, data: st.DataObject
) -> None:
    text = "".join(parts)
    for name in (None, "hermes"):
        form = answer_format(name, thinking=THINK_MARKERS["think"], thinking_opened=opened)
        whole = read(text, form, [])
        assert whole == read(text, form, range(len(text)))
        assert whole == read(text, form, cuts_of(data, text))
        found = summary(whole)
        assert found.thought == found.thought.strip()
        began = opened or text.lstrip().startswith("<think>")
        if not began:
            assert (found.thought, found.content) == ("", text)
        elif "</think>" not in text:
            body = text if opened else text.lstrip().removeprefix("<think>")
            assert (found.thought, found.content) == (body.strip(), "")
        else:
            body = text if opened else text.lstrip().removeprefix("<think>")
            thought, _, rest = body.partition("</think>")
            assert (found.thought, found.content) == (thought.strip(), rest.lstrip())


def test_names_in_the_settings_are_those_that_exist() -> None:
    assert set(TOOL_PARSERS) == {"auto", *FORMATS}
    assert set(REASONING_PARSERS) == {"auto", "none", *THINK_MARKERS}


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "naïve", "a\n"])
def test_a_function_needs_a_name(name: str) -> None:
    with pytest.raises(RequestError, match="function's name"):
        Function(name)


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ([1], r"parameters of 'f' must be a JSON Schema, got \[1\]"),
        ({"type": "array"}, "parameters of 'f' must be a schema of type 'object', got 'array'"),
        ({"properties": [1]}, r"parameters.properties of 'f' must be an object, got \[1\]"),
        ({"required": 5}, "parameters.required of 'f' must be a list of names, got 5"),
    ],
)
def test_a_function_needs_parameters_that_can_be_read(parameters: Any, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint) as caught:
        Function("f", "", parameters)
    assert (caught.value.field, caught.value.code) == ("tools", "invalid_function_parameters")


def test_a_function_needs_a_description_of_text() -> None:
    with pytest.raises(RequestError, match="description of 'f' must be a text, got 5"):
        Function("f", 5)  # type: ignore[arg-type]


ODD = [5, True, {"type": 7}, {"type": ["string", 7]}, {"anyOf": 3, "oneOf": {}, "enum": 4}]


@pytest.mark.parametrize("schema", ODD)
def test_a_schema_that_nobody_keeps_is_no_reason_to_fail(schema: Any) -> None:
    """Calls of functions that are not strict are read, whatever their schemas say."""
    function = Function("now", "", {"properties": {"a": schema}})
    for name in NAMES:
        form = AnswerFormat(tools=FORMATS[name], functions=(function,))
        found = summary(read(write(name, [("now", {"a": "x"})]), form, []))
        assert [(call, json.loads(own)) for call, own in found.calls] == [("now", {"a": "x"})]
