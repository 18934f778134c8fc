"""One path: streamed and whole answers are joins of the same pieces, however tokens arrive.

A scripted engine hands out tokens; there is no model, no process and no socket.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from lockstep.async_llm import AnswerStream
from lockstep.engine.client import EngineClient
from lockstep.engine.mailbox import OutputQueue
from lockstep.outputs import Answer, Delta
from lockstep.server.answers import (
    CallArguments,
    CallStarted,
    Content,
    Finished,
    Piece,
    PieceBuilder,
    PieceStream,
    Reasoning,
    Tokens,
)
from lockstep.server.chat import ChatCall
from lockstep.server.completions import CompletionCall
from lockstep.server.generation import Envelope
from lockstep.server.protocol import ChatBody, CompletionBody
from lockstep.server.replies import encode
from lockstep.text.answer import PLAIN, AnswerFormat
from lockstep.text.reasoning import THINK_MARKERS
from lockstep.types import (
    FinishReason,
    Request,
    RequestError,
    SamplingParams,
    SequenceOutput,
    TokenLogprob,
)
from tests.server.support import smollm2_tokenizer
from tests.text.tools.formats import FUNCTIONS, answer_format, write

ENVELOPE = Envelope("id-1", 7, "parrot", "f")
END = 2  # <|im_end|>
THINKING = THINK_MARKERS["think"]
FORMS = {
    "plain": PLAIN,
    "tools": answer_format("hermes"),
    "eager": answer_format("hermes", eager=True),
    "thinking": AnswerFormat(thinking=THINKING),
    "both": answer_format("hermes", thinking=THINKING),
    "opened": answer_format("hermes", thinking=THINKING, thinking_opened=True),
}


@dataclass(frozen=True)
class Script:
    """What the engine says of one choice: its tokens, and why it ended."""

    tokens: tuple[int, ...]
    finish: FinishReason = FinishReason.STOP


def script(text: str, finish: FinishReason = FinishReason.STOP) -> Script:
    tokens = tuple(smollm2_tokenizer().encode(text, add_special_tokens=False))
    return Script((*tokens, END) if finish is FinishReason.STOP else tokens, finish)


class Engine:
    """Hands out the outputs of scripted choices, `interval` tokens at a time (0: all)."""

    def __init__(
        self, request: Request, scripts: Sequence[Script], interval: int, seed: int = 0
    ) -> None:
        self.cancelled: list[int | None] = []
        chance = random.Random(seed)
        waiting = [self._outputs(request, index, s, interval) for index, s in enumerate(scripts)]
        self._outputs_left = [waiting[0].pop(0)]  # the others start from its prompt
        while any(waiting):
            queue = chance.choice([queue for queue in waiting if queue])
            self._outputs_left.append(queue.pop(0))

    def _outputs(
        self, request: Request, index: int, script: Script, interval: int
    ) -> list[SequenceOutput]:
        tokens = script.tokens
        size = interval or max(1, len(tokens))
        pieces = [tokens[start : start + size] for start in range(0, len(tokens), size)] or [()]
        wanted = request.sampling.prompt_logprobs is not None
        scores = (None, *map(_logprob, request.prompt[1:])) if wanted and index == 0 else None
        return [
            SequenceOutput(
                request.id,
                index,
                piece,
                tuple(map(_logprob, piece)) if request.sampling.logprobs is not None else (),
                prompt_logprobs=scores if number == 0 else None,
                finish=script.finish if number == len(pieces) - 1 else None,
                cached_tokens=1,
            )
            for number, piece in enumerate(pieces)
        ]

    async def get(self) -> SequenceOutput:
        return self._outputs_left.pop(0)

    def cancel(self, request: str, choice: int | None = None) -> None:
        self.cancelled.append(choice)


def _logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, 1, ((token, -0.5), (0, -3.0)))


def running(
    sampling: SamplingParams,
    scripts: Sequence[Script],
    interval: int,
    seed: int = 0,
    prompt: tuple[int, ...] = (1, 500, 501),
) -> AnswerStream:
    request = Request("r", prompt, replace(sampling, n=len(scripts)), stop_ids=(END, 0))
    engine = Engine(request, scripts, interval, seed)
    return AnswerStream(
        cast("EngineClient", engine),
        cast("OutputQueue", engine),
        Answer(smollm2_tokenizer(), request),
    )


def chat(
    body: ChatBody, form: AnswerFormat, scripts: Sequence[Script], interval: int, seed: int = 0
) -> ChatCall:
    streams = [running(body.sampling(), scripts, interval, seed)]
    return ChatCall(body, ENVELOPE, PieceStream(streams, form), smollm2_tokenizer())


def plain(reply: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", msgspec.json.decode(encode(reply)))


async def streamed(call: ChatCall | CompletionCall) -> list[dict[str, Any]]:
    return [plain(chunk) async for chunk in call.stream()]


def body(**fields: Any) -> ChatBody:
    messages = [{"role": "user", "content": "x"}]
    return ChatBody.model_validate({"model": "parrot", "messages": messages, **fields})


def join(chunks: Sequence[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    """The choices that a client joins from chunks, as OpenAI's clients do it."""
    choices: list[dict[str, Any]] = [{"text": "", "thought": "", "calls": []} for _ in range(n)]
    for chunk in chunks:
        for part in chunk["choices"]:
            choice, delta = choices[part["index"]], part["delta"]
            assert "finish_reason" not in choice, "nothing follows a finish reason"
            choice["text"] += delta.get("content") or ""
            choice["thought"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                if call["index"] == len(choice["calls"]):
                    assert call["id"]
                    assert call["type"] == "function"
                    choice["calls"].append([call["function"]["name"], ""])
                else:
                    assert call["index"] == len(choice["calls"]) - 1
                    assert "id" not in call
                    assert "name" not in call["function"]
                choice["calls"][-1][1] += call["function"]["arguments"]
            choice.setdefault("logprobs", []).extend((part["logprobs"] or {}).get("content", []))
            choice.setdefault("token_ids", []).extend(part.get("token_ids", []))
            if part["finish_reason"]:
                choice["finish_reason"] = part["finish_reason"]
                choice["stop_reason"] = part["stop_reason"]
    return choices


def told(reply: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a whole reply in the same shape."""
    choices = []
    for choice in reply["choices"]:
        message = choice["message"]
        calls = message.get("tool_calls", [])
        assert message["content"] or message["content"] == ("" if not calls else None)
        assert len({call["id"] for call in calls}) == len(calls)
        assert "tool_calls" not in message or calls
        choices.append(
            {
                "text": message["content"] or "",
                "thought": message.get("reasoning_content", ""),
                "calls": [[c["function"]["name"], c["function"]["arguments"]] for c in calls],
                "logprobs": (choice["logprobs"] or {}).get("content", []),
                "token_ids": choice.get("token_ids", []),
                "finish_reason": choice["finish_reason"],
                "stop_reason": choice["stop_reason"],
            }
        )
    return choices


words = st.lists(
    st.sampled_from(
        [
            *(
                "<think>",
                "</think>",
                "\n",
                " ",
                "é",
                "🤦🏽‍♀️",
                "stop",
                "Hello",
                "DEF",
                "<tool_call>",
            ),
            write("hermes", [("get_weather", {"city": "Zürich 🙂", "days": 3})]),
            write("hermes", [("now", {}), ("now", {"a": [1, {"b": "</tool_call>"}]})]),
            '<tool_call>{"name": "now", "arguments": {"x": ',
            '{"name": "now"}',
        ]
    ),
    max_size=6,
).map("".join)
scripts = st.lists(
    st.builds(script, words, st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    | st.builds(
        Script,
        st.lists(st.integers(3, 49151), max_size=12).map(tuple),
        st.sampled_from([FinishReason.LENGTH, FinishReason.CANCELLED]),
    ),
    min_size=1,
    max_size=3,
)


@given(
    form=st.sampled_from(sorted(FORMS)),
    scripts=scripts,
    stop=st.sampled_from([[], ["stop"], ["EFG", "\n\n"], ["</tool_call>"], ["Hello", "lo"]]),
    seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    intervals=st.tuples(st.sampled_from([1, 2, 5, 0]), st.sampled_from([1, 2, 5, 0])),
    extras=st.booleans(),
)
@settings(max_examples=250, deadline=None)
async def test_joined_chunks_equal_the_whole_message(
    form: str,
    scripts: list[Script],
    stop: list[str],
    seeds: tuple[int, int],
    intervals: tuple[int, int],
    extras: bool,
) -> None:
    fields: dict[str, Any] = {"stop": stop, "n": len(scripts)}
    if extras:
        fields |= {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    streaming = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    whole = plain(await chat(body(**fields), FORMS[form], scripts, intervals[0], seeds[0]).whole())
    chunks = await streamed(chat(body(**streaming), FORMS[form], scripts, intervals[1], seeds[1]))
    choices = told(whole)
    for choice, joined in zip(choices, join(chunks, len(scripts)), strict=True):
        assert joined == choice
    assert chunks[-1]["usage"] == whole["usage"]
    for choice, own in zip(choices, scripts, strict=True):
        if choice["finish_reason"] == "tool_calls":
            assert choice["calls"]
        for name, arguments in choice["calls"]:
            assert name in {function.name for function in FUNCTIONS}
            if form != "eager" or choice["finish_reason"] == "tool_calls":
                assert isinstance(json.loads(arguments), dict)
        if own.finish is FinishReason.LENGTH and choice["stop_reason"] is None:
            assert choice["finish_reason"] == "length"
        if extras:
            assert tuple(choice["token_ids"]) == own.tokens[: len(choice["token_ids"])]
    generated = sum(len(choice["token_ids"]) for choice in choices)
    assert not extras or whole["usage"]["completion_tokens"] == generated


@pytest.mark.parametrize("form", sorted(FORMS))
async def test_every_interval_gives_one_answer(form: str) -> None:
    text = "<think>\nHm, 🙂.\n</think>\n\nWell.\n" + write(
        "hermes", [("get_weather", {"city": 'a"\\\n🙂', "days": 3}), ("now", {})]
    )
    answers = []
    for interval in (1, 2, 5, 0):
        reply = await chat(body(logprobs=True), FORMS[form], [script(text)], interval).whole()
        answers.append((told(plain(reply)), plain(reply)["usage"]))
    assert all(answer == answers[0] for answer in answers)
    ((choice,), usage) = answers[0]
    assert choice["finish_reason"] == ("stop" if form in ("plain", "thinking") else "tool_calls")
    details = usage["completion_tokens_details"]
    tokens = smollm2_tokenizer().encode("<think>\nHm, 🙂.\n</think>", add_special_tokens=False)
    thinks = form in ("thinking", "both", "opened")
    assert details["reasoning_tokens"] == (len(tokens) if thinks else 0)


async def test_a30_choices_are_streamed_to_their_own_ends() -> None:
    scripts = [script("one"), script("one two three four"), script("one two")]
    fields = body(n=3, stream=True, seed=1, temperature=1)
    chunks = await streamed(chat(fields, PLAIN, scripts, 1, seed=3))
    choices = join(chunks, 3)
    assert [choice["text"] for choice in choices] == ["one", "one two three four", "one two"]
    whole = plain(await chat(body(n=3), PLAIN, scripts, 1).whole())
    assert whole["usage"]["completion_tokens"] == sum(len(s.tokens) for s in scripts)


async def test_a34_usage_stands_in_the_last_chunk_only() -> None:
    call = write("hermes", [("now", {})])
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = await streamed(chat(body(**with_usage), FORMS["tools"], [script(call)], 1))
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    chunks = await streamed(chat(body(stream=True), FORMS["tools"], [script(call)], 1))
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_so_far_stands_in_every_chunk_when_asked_for() -> None:
    scripts = [script("one two three"), script("four")]
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields: dict[str, Any] = {"n": 2, "stream": True, "stream_options": options}
    prompt = {"model": "parrot", "prompt": [1, 500, 501]}
    streams = [running(SamplingParams(), scripts, 1)]
    text = CompletionCall(
        CompletionBody.model_validate({**prompt, **fields}),
        ENVELOPE,
        [[1, 500, 501]],
        PieceStream(streams),
        smollm2_tokenizer(),
    )
    for call in (chat(body(**fields), PLAIN, scripts, 1), text):
        chunks = await streamed(call)
        assert all(chunk["choices"] for chunk in chunks[:-1])
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert set(counts) >= {1, 2}
        assert chunks[-1]["choices"] == []
        assert counts[-1] == counts[-2] == sum(len(s.tokens) for s in scripts)
        assert all(chunk["usage"]["prompt_tokens"] == 3 for chunk in chunks)
    with pytest.raises(RequestError, match="needs include_usage"):
        body(stream=True, stream_options={"continuous_usage_stats": True}).sampling()


async def test_a14_openais_types_take_every_reply() -> None:
    text = "<think>Hm.</think>Text. " + write("hermes", [("get_weather", {"city": "x"})])
    fields = {"logprobs": True, "top_logprobs": 2, "n": 2}
    for form in FORMS.values():
        whole = await chat(body(**fields), form, [script(text), script("é")], 2).whole()
        reply = ChatCompletion.model_validate_json(encode(whole), strict=True)
        content = reply.choices[0].logprobs
        assert content is not None
        assert content.content
        assert content.content[0].top_logprobs
        for chunk in await streamed(
            chat(body(**fields, stream=True), form, [script(text), script("é")], 2)
        ):
            ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True)


async def test_a37_no_reason_of_calls_without_calls() -> None:
    for text in ("Hello, how are you?", "<tool_call>", '<tool_call>{"name": "now", "argu'):
        for form in ("tools", "both"):
            reply = plain(await chat(body(), FORMS[form], [script(text)], 1).whole())
            assert reply["choices"][0]["finish_reason"] == "stop"
            assert "tool_calls" not in reply["choices"][0]["message"]


async def test_calls_that_lack_room_end_for_length() -> None:
    text = write("hermes", [("now", {}), ("get_weather", {"city": "Paris"})])[:-30]
    scripted = [script(text, FinishReason.LENGTH)]
    (eager,) = told(plain(await chat(body(), FORMS["eager"], scripted, 1).whole()))
    (settled,) = told(plain(await chat(body(), FORMS["tools"], scripted, 1).whole()))
    assert eager["finish_reason"] == settled["finish_reason"] == "length"
    assert [name for name, _ in eager["calls"]] == ["now", "get_weather"]
    assert [name for name, _ in settled["calls"]] == ["now"]
    assert settled["text"].startswith("<tool_call>")


async def test_pieces_come_in_order_and_iterate_alike() -> None:
    text = "<think>a</think>b " + write("hermes", [("now", {"x": 1})])
    streams = [running(SamplingParams(), [script(text)], 1)]
    pieces = [piece async for piece in PieceStream(streams, FORMS["both"])]
    kinds = [type(piece) for piece in pieces if not isinstance(piece, Tokens)]
    assert kinds == [Reasoning, Content, CallStarted, CallArguments, Finished]
    assert [piece.delta.token_ids for piece in pieces if isinstance(piece, Tokens)] == [
        (token,) for token in script(text).tokens
    ]


async def test_a_choice_at_its_stop_string_ends_in_the_engine_while_others_go_on() -> None:
    scripts = [script("a b STOP c d e f"), script("a b c d e f g h")]
    stream = running(SamplingParams(stop=("STOP",)), scripts, 1)
    engine = cast("Engine", stream._client)
    async for delta in stream:
        if delta.finish_reason is not None:
            assert engine.cancelled == [0], "the engine knows no stop strings"
    first, second = stream.answer.completion().choices
    assert (first.text, second.text) == ("a b ", "a b c d e f g h")


@pytest.mark.parametrize("prompts", [1, 2])
@pytest.mark.parametrize("closing", [False, True])
async def test_leaving_early_ends_the_requests(prompts: int, closing: bool) -> None:
    streams = [running(SamplingParams(), [script("a b c d")], 1) for _ in range(prompts)]
    pieces = PieceStream(streams)
    steps = pieces.steps()
    await anext(steps)
    if closing:
        await steps.aclose()
    else:
        pieces.cancel()
    for stream in streams:
        assert None in cast("Engine", stream._client).cancelled


@given(
    choices=st.lists(scripts, min_size=1, max_size=2),
    stop=st.sampled_from([[], ["stop"], ["EFG", "\n\n"]]),
    echo=st.booleans(),
    logprobs=st.sampled_from([None, 0, 2]),
    extras=st.booleans(),
    intervals=st.tuples(st.sampled_from([1, 2, 5, 0]), st.sampled_from([1, 2, 5, 0])),
)
@settings(max_examples=50, deadline=None)
async def test_joined_parts_equal_the_whole_completion(
    choices: list[list[Script]],
    stop: list[str],
    echo: bool,
    logprobs: int | None,
    extras: bool,
    intervals: tuple[int, int],
) -> None:
    n = min(map(len, choices))
    prompts = [[1, 500 + index, 501] for index in range(len(choices))]
    fields = {"model": "parrot", "prompt": prompts, "n": n, "stop": stop, "echo": echo}
    fields |= {"logprobs": logprobs, "return_token_ids": extras}
    if extras:
        fields |= {"prompt_logprobs": 1}

    def call(interval: int, **more: Any) -> CompletionCall:
        own = CompletionBody.model_validate({**fields, **more})
        streams = [
            running(own.sampling(), scripts[:n], interval, index, tuple(prompts[index]))
            for index, scripts in enumerate(choices)
        ]
        return CompletionCall(own, ENVELOPE, prompts, PieceStream(streams), smollm2_tokenizer())

    whole = plain(await call(intervals[0]).whole())
    usage = {"include_usage": True}
    chunks = await streamed(call(intervals[1], stream=True, stream_options=usage))
    assert chunks[-1]["usage"] == whole["usage"]
    joined: dict[int, dict[str, Any]] = {}
    for chunk in chunks[:-1]:
        (part,) = chunk["choices"]
        before = joined.setdefault(part["index"], part)
        if before is not part:
            assert before["finish_reason"] is None
            _append(before, part)
    assert [joined[index] for index in sorted(joined)] == whole["choices"]
    assert len(joined) == n * len(choices)
    for choice in whole["choices"]:
        assert choice["finish_reason"]


def _append(choice: dict[str, Any], part: dict[str, Any]) -> None:
    choice["text"] += part["text"]
    for name in ("finish_reason", "stop_reason"):
        choice[name] = part[name]
    if part["logprobs"] is not None:
        for name, entries in part["logprobs"].items():
            choice["logprobs"][name] += entries
    if part.get("token_ids"):
        choice["token_ids"] += part["token_ids"]
    assert "prompt_logprobs" not in part
    assert "prompt_token_ids" not in part


def test_the_builder_alone_needs_no_loop() -> None:
    builder = PieceBuilder(4)
    made: Callable[[Delta], list[Piece]] = builder.push
    assert made(Delta(0, "a", (5,))) == [Tokens(4, Delta(0, "a", (5,))), Content(4, "a")]
    end = Delta(0, finish_reason=FinishReason.LENGTH)
    assert made(end) == [Finished(4, "length", None)]
    assert builder.tokens == 1
