"""Bad input: a 4xx that names the field, and a server that goes on."""

from __future__ import annotations

import dataclasses
import gc
import json
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from lockstep.requests import RequestBuilder
from lockstep.server.protocol import MAX_MESSAGES, ChatBody, CompletionBody, GenerationBody
from lockstep.types import EngineInfo, RequestError, SamplingParams
from tests.server.support import MAX_CONTEXT, smollm2_tokenizer

HELLO = [{"role": "user", "content": "hi"}]
EMPTY_INFO = EngineInfo("m", "a", "d", "c", "b", 1, 3, 1, 8, 1, 8, 0, 0, "f", 0.0)


def check(response: httpx.Response, status: int, param: str | None = None, text: str = "") -> Any:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param
    assert text in error["message"]
    return error


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 1.5),
        ("top_p", -0.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("n", 0),
        ("n", 129),
        ("n", "2"),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", 2**40),
        ("min_tokens", 17),
        ("seed", 2**63),
        ("seed", 1.5),
        ("stop", ["a", ""]),
        ("stop", 3),
        ("stop", [3]),
        ("stop", [f"s{i}" for i in range(257)]),
        ("stop", ["x" * 4097]),
        ("stop_token_ids", list(range(257))),
        ("bad_words", ["w"] * 1025),
        ("logprob_token_ids", [1] * 1025),
        ("repetition_penalty", 5e-324),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [49152]),
        ("logprob_token_ids", [10**12]),
        ("logit_bias", {"191222": -100, "99999": 5}),
        ("logit_bias", {"12": 101}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 1, "001": 2}),
        ("logit_bias", {"1": "2"}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {str(token): 1 for token in range(1025)}),
        ("logit_bias", [1]),
        ("logprobs", 129),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("logprobs_mode", "best"),
        ("priority", 2**40),
        ("best_of", 3),
        ("suffix", "tail"),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("no_such_field", 1),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", ["fine", ""]),
        ("prompt", None),
        ("prompt", 3),
        ("prompt", {"text": "x"}),
        ("prompt", [1, "x"]),
        ("prompt", [1.5]),
        ("prompt", [-1]),
        ("prompt", [49152]),
        ("prompt", [2**70]),
        ("prompt", ["x"] * 2049),
    ],
)
def test_a_bad_field_is_named(http: httpx.Client, param: str, value: Any) -> None:
    body = {"model": "parrot", "prompt": "fine", param: value}
    error = check(http.post("/v1/completions", json=body), 400, param)
    assert error["type"] == "invalid_request_error"
    assert http.post("/v1/completions", json={"model": "parrot", "prompt": "x"}).status_code == 200


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400"])
@pytest.mark.parametrize(
    "param",
    [
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ],
)
def test_numbers_that_are_none_are_refused(http: httpx.Client, param: str, value: str) -> None:
    text = f'{{"model": "parrot", "prompt": "x", "{param}": {value}}}'
    response = http.post(
        "/v1/completions", content=text, headers={"Content-Type": "application/json"}
    )
    check(response, 400, param)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("messages", []),
        ("messages", "hi"),
        ("messages", [{"role": "user"}]),
        ("messages", [{"content": "hi"}]),
        ("messages", [{"role": "tool", "content": "x", "tool_call_id": "1"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
        ("messages", [{"role": "user", "content": 3}]),
        ("messages", [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]),
        ("top_logprobs", 3),
        ("logprob_token_ids", [3]),
        ("max_completion_tokens", -1),
        ("tools", [{"type": "function", "function": {"name": "not a name"}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]),
        ("tools", [{"type": "function", "function": {"name": "f"}}] * 2),
        ("tools", [{"type": "custom", "custom": {"name": "f"}}]),
        ("tools", [{"type": "function", "function": {"name": str(i)}} for i in range(257)]),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "yaml"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("reasoning_effort", "high"),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("chat_template_kwargs", {"messages": []}),
    ],
)
def test_a_bad_chat_field_is_named(http: httpx.Client, param: str, value: Any) -> None:
    body = {"model": "parrot", "messages": HELLO, param: value}
    response = http.post("/v1/chat/completions", json=body)
    allowed = (param, "max_tokens") if param == "max_completion_tokens" else (param,)
    assert response.json()["error"]["param"] in allowed, response.text
    assert response.status_code == 400


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("tools", []),
        ("tool_choice", "none"),
        ("response_format", {"type": "text"}),
        ("parallel_tool_calls", True),
        ("user", "someone"),
        ("metadata", {"a": "b"}),
        ("store", False),
        ("service_tier", "auto"),
        ("seed", None),
        ("temperature", None),
        ("logprobs", False),
    ],
)
def test_fields_that_change_no_answer_are_accepted(
    http: httpx.Client, param: str, value: Any
) -> None:
    body = {"model": "parrot", "messages": HELLO, "max_tokens": 2, param: value}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text


def test_an_over_long_prompt_names_both_numbers(http: httpx.Client) -> None:
    exact = {"model": "parrot", "prompt": [500] * MAX_CONTEXT, "max_tokens": 0, "echo": True}
    assert http.post("/v1/completions", json={**exact, "logprobs": 0}).status_code == 200
    nearly = {"model": "parrot", "prompt": [500] * (MAX_CONTEXT - 1), "max_tokens": 9}
    reply = http.post("/v1/completions", json=nearly).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 1
    for body in ({**exact, "max_tokens": 1}, {**exact, "prompt": [500] * (MAX_CONTEXT + 1)}):
        error = check(http.post("/v1/completions", json=body), 400, "prompt")
        assert error["code"] == "context_length_exceeded"
        assert str(len(body["prompt"])) in error["message"]  # type: ignore[arg-type]
        assert str(MAX_CONTEXT) in error["message"]
    chat = {"model": "parrot", "messages": [{"role": "user", "content": "x " * 600}]}
    error = check(http.post("/v1/chat/completions", json=chat), 400, "messages")
    assert error["code"] == "context_length_exceeded"
    assert str(MAX_CONTEXT) in error["message"]


def test_an_unknown_model_is_404(http: httpx.Client) -> None:
    for path, rest in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": HELLO})):
        response = http.post(f"/v1/{path}", json={"model": "gpt-17", **rest})
        assert check(response, 404, "model", "gpt-17")["code"] == "model_not_found"
    check(http.post("/v1/completions", json={"prompt": "x"}), 400, "model")


@pytest.mark.parametrize("text", ["{", "", "[]", "null", "3", '{"model": ', "\x00", '"x"'])
def test_a_body_that_is_no_object_is_400(http: httpx.Client, text: str) -> None:
    response = http.post(
        "/v1/completions", content=text, headers={"Content-Type": "application/json"}
    )
    check(response, 400)


def test_a_deeply_nested_or_undecodable_body_is_400(http: httpx.Client) -> None:
    headers = {"Content-Type": "application/json"}
    for content in (b"[" * 50_000, b'{"model": "parrot", "prompt": "\xff\xfe"}'):
        response = http.post("/v1/completions", content=content, headers=headers)
        check(response, 400)


def test_lone_surrogates_are_refused(http: httpx.Client) -> None:
    headers = {"Content-Type": "application/json"}
    for param, text in (
        ("prompt", r'{"model": "parrot", "prompt": "\ud800"}'),
        ("stop", r'{"model": "parrot", "prompt": "x", "stop": "\udc00"}'),
        ("bad_words", r'{"model": "parrot", "prompt": "x", "bad_words": ["\udc00"]}'),
    ):
        check(http.post("/v1/completions", content=text, headers=headers), 400, param)
    text = r'{"model": "parrot", "messages": [{"role": "user", "content": "\ud800"}]}'
    check(http.post("/v1/chat/completions", content=text, headers=headers), 400, "messages")


def test_too_large_bodies_are_413_declared_or_not(http: httpx.Client) -> None:
    large = b'{"model": "parrot", "prompt": "' + b"x" * 200_000 + b'"}'
    headers = {"Content-Type": "application/json"}
    check(http.post("/v1/completions", content=large, headers=headers), 413)
    pieces = (large[start : start + 1000] for start in range(0, len(large), 1000))
    check(http.post("/v1/completions", content=pieces, headers=headers), 413)


def test_other_paths_and_methods_have_the_same_shape(http: httpx.Client) -> None:
    check(http.get("/v1/nothing"), 404)
    check(http.get("/v1/completions"), 405)


def test_prompts_times_choices_are_bounded(http: httpx.Client) -> None:
    body = {"model": "parrot", "prompt": ["a"] * 17, "n": 128, "max_tokens": 1}
    check(http.post("/v1/completions", json=body), 400, "prompt", "2176 answers")


def test_a_crowd_of_messages_is_refused() -> None:
    body = {"model": "parrot", "messages": HELLO * (MAX_MESSAGES + 1)}
    with pytest.raises(ValidationError, match="too_long"):
        ChatBody.model_validate(body)


MANY = 7_000


@pytest.mark.parametrize(
    ("model", "field", "value"),
    [
        (CompletionBody, "prompt", [1.5] * MANY),
        (CompletionBody, "stop", [3] * MANY),
        (CompletionBody, "stop_token_ids", ["x"] * MANY),
        (CompletionBody, "logprob_token_ids", ["x"] * MANY),
        (CompletionBody, "bad_words", [3] * MANY),
        (CompletionBody, "guided_choice", [3] * MANY),
        (CompletionBody, "logit_bias", {str(index): "x" for index in range(MANY)}),
        (ChatBody, "messages", [3] * MANY),
        (ChatBody, "messages", [{"role": "user", "content": [3] * MANY}]),
        (ChatBody, "messages", [{"role": "assistant", "tool_calls": [3] * MANY}]),
        (ChatBody, "tools", [3] * MANY),
        (ChatBody, "modalities", [3] * MANY),
        (ChatBody, "stream_options", {str(index): 1 for index in range(MANY)}),
    ],
)
def test_a_long_bad_body_is_refused_in_a_few_errors(
    http: httpx.Client, model: type[GenerationBody], field: str, value: Any
) -> None:
    """Each error costs time on the loop that all clients share."""
    body: dict[str, Any] = {"model": "parrot", "prompt": "x"}
    path = "/v1/completions"
    if model is ChatBody:
        body, path = {"model": "parrot", "messages": HELLO}, "/v1/chat/completions"
    body = {**body, field: value}
    assert error_count(model, body) <= 4
    check(http.post(path, json=body), 400, field)


def error_count(model: type[GenerationBody], body: dict[str, Any]) -> int:
    try:
        model.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0


def test_a_crowd_of_unknown_fields_is_refused_in_one_error() -> None:
    body = {"model": "parrot", "messages": HELLO, **{f"k{index}": 1 for index in range(MANY)}}
    assert error_count(ChatBody, body) == 1


def test_min_tokens_needs_a_token_that_does_not_end() -> None:
    info = dataclasses.replace(EMPTY_INFO, vocab_size=3)
    builder = RequestBuilder(smollm2_tokenizer(), info)
    params = SamplingParams(min_tokens=1, stop_token_ids=(1,))
    with pytest.raises(RequestError, match="leaves no token") as caught:
        builder.build([1], params)
    assert caught.value.field == "min_tokens"
    builder.build([1], dataclasses.replace(params, min_tokens=0))


def test_long_bodies_are_read_alike(http: httpx.Client) -> None:
    for size in (10, 12_000):  # below and above `LONG_BODY`
        text = json.dumps({"model": "parrot", "prompt": [[1.5]] * size})
        headers = {"Content-Type": "application/json"}
        check(http.post("/v1/completions", content=text[:-1], headers=headers), 400)
        check(http.post("/v1/completions", content=text, headers=headers), 400, "prompt")
    assert gc.isenabled()
