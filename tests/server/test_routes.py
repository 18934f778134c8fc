"""The OpenAI shapes, streamed and whole, over a model that repeats its prompt."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.server.support import smollm2_tokenizer

TEXT = "The naïve café owner said: 你好, 🤦🏽‍♀️ done."
CHAT = [{"role": "user", "content": "Say é and 🙂."}]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={"model": "parrot", **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "parrot"
    assert client.models.retrieve("parrot").id == "parrot"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_a_completion_is_the_text_and_its_counts(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="parrot", prompt=TEXT, max_tokens=100)
    (choice,) = reply.choices
    count = len(smollm2_tokenizer().encode(TEXT))
    assert choice.text == TEXT
    assert choice.finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == count
    assert reply.usage.completion_tokens == count + 1  # the end token counts
    assert reply.usage.total_tokens == 2 * count + 1


def test_max_tokens_defaults_to_sixteen_for_completions_only(client: openai.OpenAI) -> None:
    long = "word " * 40
    reply = client.completions.create(model="parrot", prompt=long)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16
    assert reply.choices[0].finish_reason == "length"
    chat = client.chat.completions.create(
        model="parrot", messages=[{"role": "user", "content": long}]
    )
    assert chat.choices[0].finish_reason == "stop"
    assert (chat.choices[0].message.content or "").count("word") == 40


@pytest.mark.parametrize(
    "extra", [{}, {"logprobs": 2}, {"echo": True}, {"stop": ["🤦🏽"]}, {"n": 3}]
)
def test_joined_chunks_equal_the_whole_completion(
    http: httpx.Client, extra: dict[str, Any]
) -> None:
    body = {"model": "parrot", "prompt": [TEXT, "other text"], "max_tokens": 60, "seed": 5, **extra}
    whole = http.post("/v1/completions", json=body).json()
    chunks = events(http.post("/v1/completions", json={**body, "stream": True}))
    texts: dict[int, str] = {}
    tokens: dict[int, list[str]] = {}
    reasons: dict[int, Any] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        index = choice["index"]
        texts[index] = texts.get(index, "") + choice["text"]
        tokens.setdefault(index, []).extend((choice["logprobs"] or {}).get("tokens", []))
        assert index not in reasons, "nothing follows a finish reason"
        if choice["finish_reason"]:
            reasons[index] = choice["finish_reason"]
    assert len(whole["choices"]) == 2 * extra.get("n", 1)
    for choice in whole["choices"]:
        index = choice["index"]
        assert texts[index] == choice["text"]
        assert reasons[index] == choice["finish_reason"]
        assert tokens[index] == (choice["logprobs"] or {}).get("tokens", [])


def test_joined_chat_chunks_equal_the_whole_message(http: httpx.Client) -> None:
    body = {"model": "parrot", "messages": CHAT, "n": 2, "logprobs": True, "top_logprobs": 1}
    whole = http.post("/v1/chat/completions", json=body).json()
    chunks = events(http.post("/v1/chat/completions", json={**body, "stream": True}))
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        assert mine[-1]["delta"] == {}
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "stop"
        assert all(c["finish_reason"] is None for c in mine[:-1])
        content = [e for c in mine for e in (c["logprobs"] or {"content": []})["content"]]
        assert content == choice["logprobs"]["content"]


@pytest.mark.parametrize(
    "text",
    [
        "안녕하세요, 무엇을 도와드릴까요? 오늘은 날씨가 좋습니다.",
        "e\u0301x, n\u0303o, 🇰🇷🇩🇪 and 👩‍👩‍👧 👍🏽.",
    ],
)
def test_a08_a10_no_character_is_lost_or_doubled_on_the_way(http: httpx.Client, text: str) -> None:
    ids = smollm2_tokenizer().encode(text)
    assert len(ids) > len(text) / 2, "this needs characters that are split over tokens"
    body = {"model": "parrot", "max_tokens": 400, "stream": True}
    chunks = events(http.post("/v1/completions", json={**body, "prompt": text}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    chat = [{"role": "user", "content": text}]
    chunks = events(http.post("/v1/chat/completions", json={**body, "messages": chat}))
    joined = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert f"\n{text}\n" in joined
    assert "\ufffd" not in joined
    body = {"model": "parrot", "input": text, "stream": True}
    lines = http.post("/v1/responses", json=body).text.split("\n")
    said = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    deltas = [e["delta"] for e in said if e["type"] == "response.output_text.delta"]
    assert f"\n{text}\n" in "".join(deltas)


def test_usage_comes_once_at_the_end_of_a_stream(http: httpx.Client) -> None:
    body = {"model": "parrot", "messages": CHAT, "stream": True}
    plain = events(http.post("/v1/chat/completions", json=body))
    assert all("usage" not in chunk for chunk in plain)
    asked = events(
        http.post("/v1/chat/completions", json={**body, "stream_options": {"include_usage": True}})
    )
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in asked[:-1])
    assert asked[-1]["choices"] == []
    usage = asked[-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_ids_in_and_text_in_give_the_same_answer(http: httpx.Client) -> None:
    ids = smollm2_tokenizer().encode(TEXT)
    by_text = complete(http, prompt=TEXT, max_tokens=60, stop=["owner"], return_token_ids=True)
    by_ids = complete(http, prompt=ids, max_tokens=60, stop=["owner"], return_token_ids=True)
    assert by_ids["choices"] == by_text["choices"]
    assert by_text["choices"][0]["text"] == "The naïve café "
    assert by_text["choices"][0]["stop_reason"] == "owner"
    assert by_text["choices"][0]["prompt_token_ids"] == ids
    several = complete(http, prompt=[ids, ids], max_tokens=60, stop=["owner"])
    assert [choice["text"] for choice in several["choices"]] == ["The naïve café "] * 2


def test_echo_with_logprobs_scores_the_prompt(http: httpx.Client) -> None:
    reply = complete(http, prompt=TEXT, echo=True, max_tokens=0, logprobs=10, temperature=0)
    (choice,) = reply["choices"]
    count = len(smollm2_tokenizer().encode(TEXT))
    assert choice["text"] == TEXT
    assert choice["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert len(logprobs[name]) == count, name
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


def test_offsets_point_at_the_tokens_in_the_text(http: httpx.Client) -> None:
    reply = complete(http, prompt="alpha beta gamma", echo=True, max_tokens=9, logprobs=0)
    (choice,) = reply["choices"]
    logprobs = choice["logprobs"]
    *shown, end = zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
    for token, offset in shown:
        assert choice["text"][offset:].startswith(token)
    assert end == ("<|im_end|>", len(choice["text"]))  # it has an entry, though no text


def test_one_token_after_an_echo_has_one_entry_even_if_it_ends_the_text(
    http: httpx.Client,
) -> None:
    """Clients that score drop exactly one entry, whatever was drawn."""
    reply = complete(http, prompt=[0, 28120], echo=True, max_tokens=1, logprobs=1)
    (choice,) = reply["choices"]
    assert len(choice["logprobs"]["tokens"]) == 3
    ended = complete(http, prompt=[0], echo=True, max_tokens=1, logprobs=1)["choices"][0]
    assert ended["finish_reason"] == "stop"
    assert len(ended["logprobs"]["tokens"]) == 2


def test_logprob_bytes_join_to_the_text(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="parrot",
        messages=[{"role": "user", "content": TEXT}],
        logprobs=True,
        top_logprobs=2,
    )
    (choice,) = reply.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    joined = b"".join(bytes(entry.bytes or []) for entry in content)
    assert joined.decode() == choice.message.content
    assert all(entry.token for entry in content)
    assert all(entry.bytes for entry in content)


def test_extension_fields_answer(http: httpx.Client) -> None:
    reply = complete(
        http,
        prompt="alpha beta gamma",
        max_tokens=9,
        logprobs=1,
        prompt_logprobs=1,
        return_token_ids=True,
        stop_token_ids=[smollm2_tokenizer().encode(" gamma")[0]],
        ignore_eos=True,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.1,
        min_tokens=1,
        bad_words=["never"],
        skip_special_tokens=False,
        priority=-3,
        logprobs_mode="processed",
    )
    (choice,) = reply["choices"]
    assert choice["stop_reason"] == smollm2_tokenizer().encode(" gamma")[0]
    assert choice["finish_reason"] == "stop"
    assert choice["prompt_logprobs"][0] is None
    for entry, token in zip(
        choice["prompt_logprobs"][1:], choice["prompt_token_ids"][1:], strict=True
    ):
        assert entry[str(token)]["decoded_token"]


def test_the_openai_client_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="parrot",
        messages=[{"role": "user", "content": [{"type": "text", "text": TEXT}]}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert TEXT in text
    assert chunks[-1].usage is not None
    completions = client.completions.create(model="parrot", prompt=TEXT, max_tokens=60, stream=True)
    assert "".join(chunk.choices[0].text for chunk in completions) == TEXT


def test_developer_is_the_system_role_and_null_extras_pass(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(
        model="parrot", messages=[{"role": "user", "content": "hello"}]
    )
    again = client.chat.completions.create(
        model="parrot",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "hello"},
            first.choices[0].message.model_dump(),  # type: ignore[list-item]
            {"role": "user", "content": "again"},
        ],
    )
    assert "system\nBe brief." in (again.choices[0].message.content or "")


def test_stats_and_health(http: httpx.Client) -> None:
    complete(http, prompt="count these tokens", max_tokens=4)
    assert http.get("/health").json()["status"] == "ok"
    stats = http.get("/stats").json()
    assert stats["state"] == "ready"
    assert stats["engine"]["generated_tokens"] > 0
    assert stats["info"]["max_context"] == 512
