"""`/tokenize` and `/detokenize`: the ids that the generating routes read."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.support import MAX_CONTEXT, smollm2_tokenizer

CHAT = [{"role": "user", "content": "Hi there"}]


def test_a_prompt_and_back(http: httpx.Client) -> None:
    text = "Héllo wörld 🎉\n"
    reply = http.post("/tokenize", json={"model": "parrot", "prompt": text}).json()
    assert reply["tokens"] == smollm2_tokenizer().encode(text)
    assert reply["count"] == len(reply["tokens"])
    assert reply["max_model_len"] == MAX_CONTEXT
    assert reply["token_strs"] is None
    assert http.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": text}


def test_token_strings(http: httpx.Client) -> None:
    body = {"prompt": "Hello you", "return_token_strs": True}
    assert http.post("/tokenize", json=body).json()["token_strs"] == ["Hello", " you"]


def test_messages_are_the_chats_prompt(http: httpx.Client) -> None:
    reply = http.post("/tokenize", json={"messages": CHAT}).json()
    body = {"model": "parrot", "messages": CHAT, "return_token_ids": True, "max_tokens": 1}
    chat = http.post("/v1/chat/completions", json=body).json()
    assert reply["tokens"] == chat["prompt_token_ids"]
    closed = http.post("/tokenize", json={"messages": CHAT, "add_generation_prompt": False}).json()
    assert reply["tokens"][: closed["count"]] == closed["tokens"]
    assert closed["count"] < reply["count"]


def test_messages_with_functions_are_the_chats_prompt(http: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    body: dict[str, Any] = {"messages": CHAT, "tools": tools}
    reply = http.post("/tokenize", json=body).json()
    more = {"model": "parrot", "return_token_ids": True, "max_tokens": 1}
    chat = http.post("/v1/chat/completions", json=body | more).json()
    assert reply["tokens"] == chat["prompt_token_ids"]


def test_nothing_is_no_tokens(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_control_tokens_keep_their_names(http: httpx.Client) -> None:
    assert http.post("/detokenize", json={"tokens": [1, 2]}).json() == {
        "prompt": "<|im_start|><|im_end|>"
    }


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"prompt": "x", "tools": []}, "tools"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "robot"}]}, "messages[0].role"),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "text": "y"}, "text"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [49152]}, "tokens"),
        ("/detokenize", {"tokens": [1, "x"]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, True]}, "tokens[1]"),
    ],
)
def test_what_is_refused(http: httpx.Client, route: str, body: Any, param: str) -> None:
    reply = http.post(route, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_another_model_is_404(http: httpx.Client) -> None:
    for route, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        assert http.post(route, json={"model": "other", **body}).status_code == 404
