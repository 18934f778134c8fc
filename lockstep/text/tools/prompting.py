"""Conversations with function calls as a chat template reads them.

A template that knows functions gets them as they are. For one that does not, the
functions are told in the system message and calls and their results are written out, in
the format of `hermes`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.text.tools.base import Function
from lockstep.text.tools.marked import END, START
from lockstep.text.tools.mistral import short_id
from lockstep.types import RequestError

Message = Mapping[str, Any]

_INSTRUCTIONS = """You can call functions. These are the functions, one JSON object a line:
<tools>
{tools}
</tools>

To call a function, write one JSON object with its name and its arguments between tags, and \
nothing after it:
<tool_call>
{{"name": "function name", "arguments": {{"argument name": "value"}}}}
</tool_call>
Several calls stand one after another, each between its own tags. The results come back \
between <tool_response> tags. Call a function only if it helps to answer."""


def instructions(functions: Sequence[Function]) -> str:
    """What a system message says of the functions, and of how to call them."""
    lines = (json.dumps(f.declaration()["function"], ensure_ascii=False) for f in functions)
    return _INSTRUCTIONS.format(tools="\n".join(lines))


def native(messages: Sequence[Message], *, short_ids: bool) -> list[dict[str, Any]]:
    """For a template that knows functions: arguments as objects, results with names.

    Args:
        short_ids: ids become nine letters and digits.
    """
    result = []
    names: dict[str, str] = {}
    for message in messages:
        entry = dict(message)
        if calls := entry.get("tool_calls"):
            entry["tool_calls"] = [_native_call(call, short_ids) for call in calls]
            names |= {call["id"]: call["function"]["name"] for call in calls}
        if entry["role"] == "tool":
            call_id = entry["tool_call_id"]
            entry.setdefault("name", names.get(call_id, ""))
            entry["tool_call_id"] = short_id(call_id) if short_ids else call_id
        result.append(entry)
    return result


def one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Calls side by side as calls one after another, each with its result if it has one."""
    result: list[Message] = []
    left = list(messages)
    while left:
        message = left.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            result.append(message)
            continue
        answers: dict[str, Message] = {}
        while left and left[0]["role"] == "tool" and len(answers) < len(calls):
            answer = left.pop(0)
            answers[answer["tool_call_id"]] = answer
        for index, call in enumerate(calls):
            content = message["content"] if index == 0 else ""
            result.append({**message, "content": content, "tool_calls": [call]})
            if call["id"] in answers:
                result.append(answers[call["id"]])
    return result


def _native_call(call: Message, short_ids: bool) -> dict[str, Any]:
    function = call["function"]
    return {
        "id": short_id(call["id"]) if short_ids else call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": _object(function["arguments"])},
    }


def _object(arguments: str | Mapping[str, Any]) -> Any:
    """The arguments as an object; text that is none stays as it is."""
    if not isinstance(arguments, str):
        return dict(arguments)
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def written_out(messages: Sequence[Message], functions: Sequence[Function]) -> list[dict[str, Any]]:
    """For a template that knows no functions: everything as text of system, user, assistant.

    Results that follow one another, and a user's message behind them, are one message of
    the user, so that roles still take turns.
    """
    result: list[dict[str, Any]] = []
    open_results = False  # whether the last message is a user's that holds results
    for message in messages:
        entry = {key: value for key, value in message.items() if key != "tool_calls"}
        text = entry.get("content") or ""
        if message["role"] == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            entry = {"role": "user", "content": text}
        elif calls := message.get("tool_calls"):
            entry["content"] = "\n".join([*([text] if text else []), *map(_written, calls)])
        if open_results and entry["role"] == "user":
            result[-1]["content"] += "\n" + text
        else:
            result.append(entry)
        open_results = message["role"] == "tool"
    if functions:
        _tell(result, instructions(functions))
    return result


def _written(call: Message) -> str:
    function = call["function"]
    arguments = json.dumps(_object(function["arguments"]), ensure_ascii=False)
    name = json.dumps(function["name"])
    return f'{START}\n{{"name": {name}, "arguments": {arguments}}}\n{END}'


def _tell(messages: list[dict[str, Any]], text: str) -> None:
    if messages and messages[0]["role"] == "system":
        messages[0]["content"] = f"{messages[0]['content']}\n\n{text}"
    else:
        messages.insert(0, {"role": "system", "content": text})


def without_system(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The system message put before the first message of the user, as one text."""
    system, *rest = map(dict, messages)
    for message in rest:
        if message["role"] == "user":
            message["content"] = f"{system['content']}\n\n{message['content']}"
            return rest
    return [{**system, "role": "user"}, *rest]


def check_shape(messages: Sequence[Message]) -> None:
    """Calls and results must be such as this module reads.

    Raises:
        RequestError: naming the message and the part.
    """
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message["role"] == "tool" and not isinstance(message.get("tool_call_id"), str):
            raise _no(f"{where}.tool_call_id must be the id of the call that it answers")
        calls = message.get("tool_calls") or ()
        if not isinstance(calls, list | tuple):
            raise _no(f"{where}.tool_calls must be a list")
        for place, call in enumerate(calls):
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(call.get("id"), str):
                raise _no(f"{where}.tool_calls[{place}] must have an id and a function")
            named = isinstance(function.get("name"), str)
            if not named or not isinstance(function.get("arguments"), str | Mapping):
                raise _no(f"{where}.tool_calls[{place}].function must have a name and arguments")


def _no(text: str) -> RequestError:
    return RequestError(text, field="messages")


def check_calls(messages: Sequence[Message]) -> None:
    """Every result answers a call of the assistant's message before it, and every call has one.

    Raises:
        RequestError: naming the message and the id.
    """
    waiting: dict[str, int] = {}  # calls without a result, by id, and their message
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            call_id = message["tool_call_id"]
            if call_id not in waiting:
                raise RequestError(
                    f"messages[{index}].tool_call_id: {call_id!r} answers no call of the "
                    "assistant's message before it",
                    field="messages",
                )
            del waiting[call_id]
            continue
        _all_answered(waiting)
        for call in message.get("tool_calls") or ():
            if call["id"] in waiting:
                raise RequestError(
                    f"messages[{index}].tool_calls: the id {call['id']!r} is there twice",
                    field="messages",
                )
            waiting[call["id"]] = index
    _all_answered(waiting)


def _all_answered(waiting: Mapping[str, int]) -> None:
    for call_id, index in waiting.items():
        raise RequestError(
            f"messages[{index}].tool_calls: call {call_id!r} has no message of role 'tool' "
            "with its result behind it",
            field="messages",
        )
