"""A response is the fold of its events, for any answer and any way of cutting it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from lockstep.outputs import Delta
from lockstep.server.answers import (
    CallArguments,
    CallStarted,
    Content,
    Finished,
    Piece,
    Reasoning,
    Tokens,
)
from lockstep.server.replies import ChatLogprob
from lockstep.server.responses.builder import ResponseBuilder
from lockstep.server.responses.events import Event, frame
from lockstep.server.responses.objects import (
    InputTokensDetails,
    Message,
    OutputTokensDetails,
    Response,
    ResponseUsage,
)

OPENAI_EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
USAGE = ResponseUsage(
    input_tokens=7,
    output_tokens=5,
    total_tokens=12,
    input_tokens_details=InputTokensDetails(cached_tokens=4, cache_write_tokens=3),
    output_tokens_details=OutputTokensDetails(reasoning_tokens=2),
)
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
SEGMENTS = st.lists(st.tuples(st.sampled_from(["reasoning", "content", "call"]), TEXTS), max_size=6)
REASONS = st.sampled_from(["stop", "length", "tool_calls", "cancelled", "fails"])


def logprobs_of(delta: Delta) -> list[ChatLogprob]:
    return [
        ChatLogprob(token=str(t), logprob=-1.0, bytes=[t], top_logprobs=[]) for t in delta.token_ids
    ]


def build(
    pieces: Sequence[Piece | None], *, logprobs: bool = False
) -> tuple[list[Event], Response]:
    """The events of a whole answer; None stands for an engine that fails."""
    builder = ResponseBuilder(
        Response(id="resp_1", created_at=1, model="m", system_fingerprint="f"),
        lambda: USAGE,
        logprobs_of if logprobs else None,
    )
    events = builder.start()
    for piece in pieces:
        events += builder.fail("it broke") if piece is None else builder.push(piece)
    return events, builder.response


def pieces_of(
    segments: Sequence[tuple[str, str]], reason: str, cut: int, tokens: bool = False
) -> list[Piece | None]:
    """The answer in pieces of `cut` characters."""
    pieces: list[Piece | None] = []
    calls = 0
    for kind, text in segments:
        if kind == "call":
            pieces.append(CallStarted(0, calls, f"call_{calls}", "f"))
            calls += 1
        for start in range(0, len(text), cut):
            part = text[start : start + cut]
            if tokens:
                pieces.append(Tokens(0, Delta(0, token_ids=tuple(part.encode()))))
            if kind == "call":
                pieces.append(CallArguments(0, calls - 1, part))
            else:
                pieces.append(Content(0, part) if kind == "content" else Reasoning(0, part))
    pieces.append(None if reason == "fails" else Finished(0, reason, None))
    return pieces


def read(event: Event) -> dict[str, Any]:
    name, data, *rest = frame(event).decode().split("\n")
    assert rest == ["", ""]
    body: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert name == f"event: {body['type']}"
    OPENAI_EVENT.validate_json(json.dumps(body))
    return body


def fold(stream: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output as a client puts it together from beginnings and deltas alone."""
    items: list[dict[str, Any]] = []
    for event in stream:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        if "output_index" not in event:
            continue
        item = items[event["output_index"]]
        if "item_id" in event:
            assert event["item_id"] == item["id"]
        match kind.removeprefix("response."):
            case "content_part.added":
                assert event["content_index"] == len(item["content"])
                item["content"].append(event["part"])
            case "output_text.delta":
                part = item["content"][event["content_index"]]
                part["text"] += event["delta"]
                part["logprobs"] += event["logprobs"]
            case "reasoning_text.delta":
                item["content"][event["content_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "output_text.done":
                part = item["content"][event["content_index"]]
                assert (event["text"], event["logprobs"]) == (part["text"], part["logprobs"])
            case "reasoning_text.done":
                assert event["text"] == item["content"][event["content_index"]]["text"]
            case "function_call_arguments.done":
                assert event["arguments"] == item["arguments"]
            case "content_part.done":
                assert event["part"] == item["content"][event["content_index"]]
            case "output_item.done":
                item["status"] = event["item"]["status"]
                assert event["item"] == item
    return items


@settings(max_examples=100, deadline=None)
@given(SEGMENTS, REASONS, st.integers(1, 13), st.booleans())
def test_events_fold_to_the_whole_response(
    segments: list[tuple[str, str]], reason: str, cut: int, tokens: bool
) -> None:
    pieces = pieces_of(segments, reason, cut, tokens)
    made, response = build(pieces, logprobs=tokens)
    stream = [read(event) for event in made]
    whole = json.loads(msgspec.json.encode(response))
    OpenAIResponse.model_validate(whole)
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    assert [event["type"] for event in stream[:2]] == ["response.created", "response.in_progress"]
    for event in stream[:2]:
        assert event["response"]["status"] == "in_progress"
        assert event["response"]["output"] == []
        assert event["response"]["usage"] is None
    assert stream[-1]["response"] == whole
    assert fold(stream) == whole["output"]
    assert sum("response" in event for event in stream) == 3


@settings(max_examples=100, deadline=None)
@given(SEGMENTS, REASONS, st.integers(1, 13))
def test_cutting_changes_no_item(segments: list[tuple[str, str]], reason: str, cut: int) -> None:
    def bare(response: Response) -> Any:
        body = msgspec.to_builtins(msgspec.structs.replace(response, completed_at=0))
        for item in body["output"]:
            del item["id"]
        return body

    _, cut_up = build(pieces_of(segments, reason, cut, True), logprobs=True)
    _, in_one = build(pieces_of(segments, reason, 100, True), logprobs=True)
    assert bare(cut_up) == bare(in_one)


@pytest.mark.parametrize(
    ("reason", "status", "last"),
    [
        ("stop", "completed", "response.completed"),
        ("tool_calls", "completed", "response.completed"),
        ("length", "incomplete", "response.incomplete"),
        ("cancelled", "failed", "response.failed"),
        ("fails", "failed", "response.failed"),
    ],
)
def test_the_end_says_how_it_went(reason: str, status: str, last: str) -> None:
    made, response = build(pieces_of([("reasoning", "hm"), ("content", "hello")], reason, 2))
    assert read(made[-1])["type"] == last
    assert response.status == status
    assert [item.status for item in response.output] == [
        "completed",
        "completed" if status == "completed" else "incomplete",
    ]
    assert (response.incomplete_details is not None) == (reason == "length")
    assert (response.error is not None) == (status == "failed")
    assert (response.usage is not None) == (status != "failed")
    assert (response.completed_at is not None) == (status == "completed")


def test_an_answer_without_text_is_an_empty_message() -> None:
    made, response = build([Finished(0, "stop", None)])
    (item,) = fold([read(event) for event in made])
    assert item["type"] == "message"
    assert [part["text"] for part in item["content"]] == [""]
    assert response.status == "completed"


def test_logprobs_go_with_texts_only() -> None:
    def tokens(*ids: int) -> Tokens:
        return Tokens(0, Delta(0, token_ids=ids))

    pieces: list[Piece | None] = [
        tokens(1),
        Reasoning(0, "hm"),
        tokens(2),  # its text is held back and comes with the next
        tokens(3),
        Content(0, "ab"),
        tokens(4),
        CallStarted(0, 0, "call_0", "f"),
        CallArguments(0, 0, "{}"),
        tokens(5),
        Content(0, "c"),
        tokens(6),  # shows no text
        Finished(0, "stop", None),
    ]
    _, response = build(pieces, logprobs=True)
    texts = [item.content[0] for item in response.output if isinstance(item, Message)]
    assert [[entry.token for entry in part.logprobs] for part in texts] == [["2", "3"], ["5", "6"]]
