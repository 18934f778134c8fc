"""Answers as models of each format write them, and what they should be read as."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from lockstep.text.answer import AnswerFormat, AnswerReader
from lockstep.text.events import CallClosed, CallOpened, CallText, Event, Text, Thought
from lockstep.text.tools import Function
from lockstep.text.tools.base import merged
from lockstep.text.tools.registry import FORMATS

WEATHER = Function(
    "get_weather",
    "What the weather is.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "where": {"type": "array", "items": {"type": "number"}},
            "more": {"type": "object"},
            "exact": {"type": "boolean"},
        },
        "required": ["city"],
    },
)
NOW = Function("now")
FUNCTIONS = (WEATHER, NOW)

Call = tuple[str, dict[str, Any]]


def write(name: str, calls: Sequence[Call]) -> str:
    """Calls in a format."""
    return _WRITERS[name](calls)


def _object(key: str, call: Call) -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_object('arguments', call)}\n</tool_call>" for call in calls)


def _coder(calls: Sequence[Call]) -> str:
    def one(call: Call) -> str:
        values = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n"
            "</parameter>\n"
            for key, value in call[1].items()
        )
        return f"<tool_call>\n<function={call[0]}>\n{values}</function>\n</tool_call>"

    return "\n".join(map(one, calls))


def _pythonic(calls: Sequence[Call]) -> str:
    def one(call: Call) -> str:
        return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in call[1].items())})"

    return f"[{', '.join(map(one, calls))}]"


_WRITERS = {
    "hermes": _hermes,
    "llama3_json": lambda calls: "; ".join(_object("parameters", call) for call in calls),
    "mistral": lambda calls: f"[TOOL_CALLS][{', '.join(_object('arguments', c) for c in calls)}]",
    "mistral_named": lambda calls: "".join(
        f"[TOOL_CALLS]{name}[ARGS]{json.dumps(values, ensure_ascii=False)}"
        for name, values in calls
    ),
    "pythonic": _pythonic,
    "qwen3_coder": _coder,
}
# Formats that let text stand before and after calls.
MARKED = ("hermes", "mistral", "mistral_named", "qwen3_coder")


@dataclass(frozen=True)
class Read:
    """What an answer was read as."""

    thought: str
    content: str
    calls: list[tuple[str, str]]  # complete ones: name and arguments
    open_calls: int


def read(text: str, form: AnswerFormat, cuts: Iterable[int]) -> list[Event]:
    """The events of a text that arrives cut at these places, neighbours joined."""
    reader = AnswerReader(form)
    events: list[Event] = []
    start = 0
    for cut in [*sorted(cuts), len(text)]:
        events += reader.push(text[start:cut])
        start = cut
    return joined_thoughts(merged([*events, *reader.finish()]))


def joined_thoughts(events: list[Event]) -> list[Event]:
    thought = "".join(event.text for event in events if isinstance(event, Thought))
    rest = [event for event in events if not isinstance(event, Thought)]
    return [Thought(thought), *rest] if thought else rest


def summary(events: Sequence[Event]) -> Read:
    thought = content = ""
    calls: list[tuple[str, str]] = []
    opened = closed = 0
    for event in events:
        match event:
            case Thought(text):
                assert not content
                assert not opened
                thought += text
            case Text(text):
                assert text
                content += text
            case CallOpened(name):
                opened += 1
                calls.append((name, ""))
            case CallText(text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
            case CallClosed():
                closed += 1
                assert closed == opened
    return Read(thought, content, calls[:closed], opened - closed)


def answer_format(name: str | None, *, eager: bool = False, **settings: Any) -> AnswerFormat:
    tools = None if name is None else FORMATS[name]
    return AnswerFormat(tools=tools, functions=FUNCTIONS, eager=eager, **settings)


# Characters that the formats give a meaning to, among others.
letters = st.text(
    st.sampled_from("ab \n\t\"'\\{}[](),:;=<>/é🙂\u2028") | st.characters(codec="utf-8"),
    max_size=12,
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(-1e9, 1e9) | letters,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(letters, inner, max_size=3),
    max_leaves=5,
)
