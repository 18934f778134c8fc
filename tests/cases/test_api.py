"""Faults seen in the field at the interface, tried on the real SmolLM2."""

from __future__ import annotations

import json
import math
import socket
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from lockstep import LLM, RequestError, SamplingParams
from lockstep.text import Tokenizer
from tests.server.support import ServerThread, fake_client, smollm2_tokenizer, wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
ALPHABET = "Here is the English alphabet: ABC"


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={"model": "smollm2", "temperature": 0, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def streamed(
    http: httpx.Client, path: str = "/v1/completions", **body: Any
) -> list[dict[str, Any]]:
    body = {"model": "smollm2", "temperature": 0, "stream": True, **body}
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


def test_a01_no_part_of_a_stop_string_is_streamed(http: httpx.Client) -> None:
    free = complete(http, prompt=ALPHABET, max_tokens=24)["choices"][0]["text"]
    assert len(free) > 16
    for start, end in ((3, 10), (5, 14), (8, 9)):  # over token borders and inside of tokens
        stop = free[start:end]
        expected = free[: free.index(stop)]
        chunks = streamed(http, prompt=ALPHABET, max_tokens=24, stop=[stop])
        assert text_of(chunks) == expected
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["choices"][0]["stop_reason"] == stop
    unmatched = free[4:10] + "\x00"
    assert text_of(streamed(http, prompt=ALPHABET, max_tokens=24, stop=[unmatched])) == free


def test_a04_token_ids_and_text_stop_alike(http: httpx.Client) -> None:
    prompt = "Write two short paragraphs about rain.\n\nRain is"
    ids = smollm2_tokenizer().encode(prompt)
    answers = [
        complete(http, prompt=given, max_tokens=80, stop=[stop], return_token_ids=True)["choices"][
            0
        ]
        for given in (prompt, ids)
        for stop in ("\n\n", ".")
    ]
    assert answers[:2] == answers[2:]
    assert answers[1]["finish_reason"] == "stop"
    assert "." not in answers[1]["text"]


def test_a05_stops_of_several_words_end_exactly_before(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Repeat exactly, nothing else: alpha beta gamma delta"}]
    body = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 24}
    free = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert len(free.split()) > 3
    second = free.index(free.split()[1])
    for stop in (
        free[second : second + 12],
        free[second:].split()[0],
        free[second + 2 : second + 4],
    ):
        chunks = streamed(http, "/v1/chat/completions", **{**body, "stop": [stop]})
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
        assert text == free[: free.index(stop)]


def test_a07_a_prompt_that_ends_inside_a_character_is_not_repeated(http: httpx.Client) -> None:
    tokenizer = smollm2_tokenizer()
    ids = tokenizer.encode("Hello world 𝄞")
    while tokenizer.decode(ids, skip_special_tokens=False).endswith("𝄞"):
        ids.pop()
    assert tokenizer.decode(ids).endswith("\ufffd")
    chunks = streamed(http, prompt=ids, max_tokens=8)
    (choice,) = complete(http, prompt=ids, max_tokens=8, return_token_ids=True)["choices"]
    whole = tokenizer.decode([*ids, *choice["token_ids"]])
    # The character that the prompt began is the answer's: what it ends was never shown.
    assert whole[: len("Hello world ")] == "Hello world "
    assert text_of(chunks) == whole[len("Hello world ") :]
    assert choice["text"] == whole[len("Hello world ") :]


EMOJI = [{"role": "user", "content": "Reply with this emoji and nothing else: 🙂"}]


def test_a11_logprob_bytes_are_the_tokens_own(client: openai.OpenAI) -> None:
    emoji = smollm2_tokenizer().encode("🙂", add_special_tokens=False)
    assert len(emoji) > 1, "this needs a character that is split over tokens"
    reply = client.chat.completions.create(
        model="smollm2",
        messages=EMOJI,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=len(emoji),
        logprobs=True,
        logit_bias={str(token): 100 for token in emoji},
        extra_body={"repetition_penalty": 100.0},
    )
    (choice,) = reply.choices
    content = (choice.logprobs and choice.logprobs.content) or []
    joined = b"".join(bytes(entry.bytes or []) for entry in content)
    assert joined.decode("utf-8", "replace") == choice.message.content
    assert [239, 191, 189] not in [entry.bytes for entry in content]
    assert any(entry.token.startswith("bytes:\\x") for entry in content)


def test_a13_alternatives_are_never_empty(client: openai.OpenAI) -> None:
    bias = {str(smollm2_tokenizer().encode("🙂", add_special_tokens=False)[0]): 100}
    reply = client.chat.completions.create(
        model="smollm2",
        messages=EMOJI,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=6,
        logprobs=True,
        top_logprobs=20,
        logit_bias=bias,  # type: ignore[arg-type]
    )
    content = (reply.choices[0].logprobs and reply.choices[0].logprobs.content) or []
    assert content
    for entry in content:
        assert len(entry.top_logprobs) == 20
        for other in entry.top_logprobs:
            assert other.token
            assert other.bytes
            if not other.token.startswith("bytes:"):
                assert other.token.encode() == bytes(other.bytes)


def test_a14_replies_parse_with_openais_types(http: httpx.Client) -> None:
    chat = {
        "model": "smollm2",
        "messages": EMOJI,
        "max_tokens": 4,
        "logprobs": True,
        "top_logprobs": 2,
    }
    reply = ChatCompletion.model_validate(http.post("/v1/chat/completions", json=chat).json())
    assert reply.choices[0].logprobs is not None
    entries = reply.choices[0].logprobs.content or []
    assert len(entries) == 4
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    for chunk in streamed(http, "/v1/chat/completions", **chat):
        ChatCompletionChunk.model_validate(chunk)
    legacy = complete(http, prompt="Once upon", max_tokens=4, logprobs=2)
    parsed = Completion.model_validate(legacy)
    logprobs = parsed.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens or []) == len(logprobs.token_logprobs or []) == 4


def test_a15_logprobs_are_raw_unless_asked(http: httpx.Client) -> None:
    def first(**extra: Any) -> dict[str, float]:
        body = {"prompt": "The sky is", "max_tokens": 1, "logprobs": 5, "seed": 7, **extra}
        top = complete(http, **body)["choices"][0]["logprobs"]["top_logprobs"][0]
        return dict(sorted(top.items(), key=lambda item: -item[1])[:5])

    raw = first(temperature=1.0)
    for extra in ({"temperature": 0.2}, {"temperature": 0}, {"top_p": 0.0001, "temperature": 1.0}):
        assert first(**extra) == raw
    processed = first(temperature=0.2, logprobs_mode="processed")
    assert max(processed.values()) > max(raw.values())
    assert first(temperature=1.0, top_p=0.0001, logprobs_mode="processed") != raw


def test_a17_echo_without_tokens_scores_the_prompt(http: httpx.Client) -> None:
    prompt = "The quick brown fox jumps over the lazy dog."
    reply = complete(http, prompt=prompt, echo=True, max_tokens=0, logprobs=10)
    (choice,) = reply["choices"]
    assert choice["text"] == prompt
    assert choice["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0
    values = choice["logprobs"]["token_logprobs"]
    assert values[0] is None
    assert len(values) == reply["usage"]["prompt_tokens"]
    assert all(value < 0 for value in values[1:])
    assert all(len(top) >= 10 for top in choice["logprobs"]["top_logprobs"][1:])


def test_a18_prompt_logprobs_are_whole_on_a_warm_cache(llm: LLM) -> None:
    ids = list(range(100, 133))  # one more than two pages
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    first, second = llm.generate(ids, params), llm.generate(ids, params)
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == 33
    assert first.prompt_logprobs[0] is None
    assert all(entry is not None for entry in first.prompt_logprobs[1:])
    assert second.prompt_logprobs == first.prompt_logprobs


@pytest.fixture(scope="module")
def short_llm() -> Any:
    with LLM("smollm2", threads=1, cache_bytes=16 << 20, max_context=64, progress=False) as made:
        yield made


def test_a20_a_prompt_of_exactly_the_context_is_scored(short_llm: LLM) -> None:
    ids = list(range(1000, 1064))
    assert len([v for v in short_llm.score(ids).logprobs if v is not None]) == 63  # type: ignore[union-attr]
    nearly = short_llm.generate(ids[:63], GREEDY)
    assert len(nearly.token_ids) == 1
    assert nearly.finish_reason == "length"
    for prompt, call in ((ids, short_llm.generate), ([*ids, 7], short_llm.score)):
        with pytest.raises(RequestError) as caught:
            call(prompt)  # type: ignore[operator]
        assert caught.value.code == "context_length_exceeded"
        assert str(len(prompt)) in str(caught.value)
        assert "64" in str(caught.value)


def test_a21_nothing_is_cut_off_in_silence(short_llm: LLM) -> None:
    secret = "The password is swordfish. " + "Filler words go here. " * 20 + "The password is"
    length = len(short_llm.tokenizer.encode(secret))
    with pytest.raises(RequestError, match=rf"\b{length} tokens.*\b64\b") as caught:
        short_llm.generate(secret, GREEDY)
    assert caught.value.code == "context_length_exceeded"


def test_a23_a_bias_beyond_the_vocabulary_hurts_nobody(http: httpx.Client) -> None:
    body = {"model": "smollm2", "prompt": "Hi", "logit_bias": {"191222": -100, "99999": 5}}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logit_bias"
    assert complete(http, prompt="Hi", max_tokens=2)["choices"][0]["finish_reason"]


def test_a24_a_bias_bans_and_forces(llm: LLM) -> None:
    free = llm.generate("My name is", GREEDY)
    banned = dict.fromkeys(set(free.token_ids), -100.0)
    without = llm.generate(
        ["My name is"] * 3,
        SamplingParams(temperature=1.0, seed=1, max_tokens=24, logit_bias=banned),
    )
    assert not {token for c in without for token in c.token_ids} & set(banned)
    forced = llm.generate(
        "My name is", SamplingParams(temperature=1.0, max_tokens=8, logit_bias={260: 100.0})
    )
    assert set(forced.token_ids) == {260}


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a25_numbers_that_are_none_are_refused(field: str, value: float) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a27_a29_edge_values_mean_what_they_say(llm: LLM) -> None:
    with pytest.raises(RequestError, match="min_p"):
        SamplingParams(min_p=1.5)
    prompt = "A long time ago"
    greedy = llm.generate(prompt, GREEDY)
    drawn: dict[str, Any] = {"temperature": 1.0, "max_tokens": 24, "seed": 0}
    narrow = [{"min_p": 1.0}, {"top_p": 0.0}, {"top_k": 1}, {"temperature": 1e-4}]
    off = [{}, {"top_k": 0}, {"top_k": -1}, {"top_k": 2**31 - 1}, {"min_p": 0.0}, {"top_p": 1.0}]
    params = [SamplingParams(**{**drawn, **extra}) for extra in narrow + off]
    answers = llm.generate([prompt] * len(params), params)
    for extra, answer in zip(narrow, answers, strict=False):
        assert answer.token_ids == greedy.token_ids, extra
    free = answers[len(narrow)]
    assert free.token_ids != greedy.token_ids
    for extra, answer in zip(off, answers[len(narrow) :], strict=True):
        assert answer.token_ids == free.token_ids, extra
    nothing = llm.generate(prompt, SamplingParams(max_tokens=0))
    assert nothing.token_ids == ()
    assert nothing.finish_reason == "length"


def test_a30_choices_differ_and_repeat_and_all_stream_to_their_end(http: httpx.Client) -> None:
    body = {"prompt": "My favourite", "n": 3, "seed": 1, "temperature": 1.0, "max_tokens": 12}
    options = {"include_usage": True}
    runs = [streamed(http, **body, stream_options=options) for _ in range(2)]
    texts = [[text_of(chunks, index) for index in range(3)] for chunks in runs]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3
    for chunks in runs:
        ends = [
            choice["index"]
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["finish_reason"]
        ]
        assert sorted(ends) == [0, 1, 2]
    whole = complete(http, **body, return_token_ids=True)
    assert [choice["text"] for choice in whole["choices"]] == texts[0]
    counted = sum(len(choice["token_ids"]) for choice in whole["choices"])
    assert runs[0][-1]["usage"]["completion_tokens"] == counted
    assert whole["usage"]["completion_tokens"] == counted


def test_a30_a_choice_that_ends_early_leaves_the_others_streaming(http: httpx.Client) -> None:
    body = {"prompt": "My favourite", "n": 3, "seed": 1, "temperature": 1.0, "max_tokens": 24}
    free = complete(http, **body, return_token_ids=True)["choices"]
    drawn = [choice["token_ids"] for choice in free]
    assert [len(ids) for ids in drawn] == [24] * 3
    # A token that only the first choice draws, so that it ends there and nowhere else.
    early = next(i for i, t in enumerate(drawn[0]) if i >= 2 and t not in drawn[1] + drawn[2])
    assert early < 8
    chunks = streamed(
        http,
        **body,
        stop_token_ids=[drawn[0][early]],
        stream_options={"include_usage": True},
    )
    ends = {
        choice["index"]: (position, choice["finish_reason"])
        for position, chunk in enumerate(chunks)
        for choice in chunk["choices"]
        if choice["finish_reason"]
    }
    assert {index: reason for index, (_, reason) in ends.items()} == {
        0: "stop",
        1: "length",
        2: "length",
    }
    after = chunks[ends[0][0] + 1 :]
    for index in (1, 2):
        assert len(text_of(after, index)) > len(free[index]["text"]) // 3
        assert text_of(chunks, index) == free[index]["text"]
    assert text_of(after, 0) == ""
    assert free[0]["text"].startswith(text_of(chunks, 0))
    assert len(text_of(chunks, 0)) < len(free[0]["text"])
    assert chunks[-1]["usage"]["completion_tokens"] == early + 1 + 24 + 24


def test_a32_a_client_that_hangs_up_stops_the_engine(server: ServerThread) -> None:
    stats = server.llm.stats
    wait_until(lambda: stats().running == 0)
    before = stats()
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(
        {"model": "smollm2", "prompt": "Count:", "max_tokens": 4000, "ignore_eos": True}
    )
    connection = socket.create_connection((host, int(port)))
    connection.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n{content}".encode()
    )
    wait_until(lambda: stats().generated_tokens >= before.generated_tokens + 3)
    connection.close()
    closed = stats()
    assert closed.running == 1
    wait_until(lambda: stats().running == 0, 3.0)
    wait_until(lambda: stats().pages_used == before.pages_used, 3.0)
    # Every step reports, and each makes one token.
    assert stats().generated_tokens - closed.generated_tokens <= 5
    assert stats().steps - closed.steps <= 6
    assert stats().cancelled == before.cancelled + 1


def test_a33_a_turn_that_was_dropped_does_not_harm_the_next(
    server: ServerThread, http: httpx.Client, llm: LLM
) -> None:
    stats = server.llm.stats
    wait_until(lambda: stats().running == 0)
    before = stats()
    messages = [{"role": "system", "content": "You are a patient guide in a small observatory."}]
    turns = ["Why is the sky blue?", "Tell me a long story.", "Why do stars twinkle?", "And Mars?"]
    for number, turn in enumerate(turns, 1):
        messages.append({"role": "user", "content": turn})
        body = {"model": "smollm2", "messages": messages, "temperature": 0, "logprobs": True}
        if number == 2:
            said = _first_words(http, {**body, "max_tokens": 2000})
            messages.append({"role": "assistant", "content": said})
            continue
        reply = http.post(
            "/v1/chat/completions", json={**body, "max_tokens": 12, "return_token_ids": True}
        ).json()
        (choice,) = reply["choices"]
        llm.flush_cache()
        fresh = llm.chat(messages, SamplingParams(temperature=0, max_tokens=12, logprobs=0))
        assert fresh.cached_tokens == 0
        assert reply["prompt_token_ids"] == list(fresh.prompt_token_ids), number
        assert choice["token_ids"] == list(fresh.token_ids), number
        assert choice["message"]["content"] == fresh.text
        values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert values
        assert values == [entry.logprob for entry in fresh.logprobs][: len(values)]
        if number == 3:
            cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached > 0, "it reads what earlier turns have left"
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
    wait_until(lambda: stats().running == 0 and stats().finished == before.finished + 3)
    after = stats()
    assert after.cancelled == before.cancelled + 1
    assert after.failed == before.failed
    assert after.submitted == before.submitted + 4
    assert after.waiting == 0
    assert after.pages_used == before.pages_used


def _first_words(http: httpx.Client, body: dict[str, Any]) -> str:
    """The first text of a streamed answer; the connection is closed upon it."""
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: "):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                if choice["delta"].get("content"):
                    return str(choice["delta"]["content"])
    raise AssertionError("the stream ended without text")


def test_a34_usage_comes_last_and_once(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="smollm2",
        messages=EMOJI,  # type: ignore[arg-type]
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert 1 <= chunks[-1].usage.completion_tokens <= 5
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.system_fingerprint for chunk in chunks}) == 1
    assert chunks[0].system_fingerprint


# Gemma 2's template, in its essentials: it complains about system messages and turn order.
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{{ '<turn>' + message['role'] + '\\n' + message['content'] }}{% endfor %}"
)
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi."}
ASSISTANT = {"role": "assistant", "content": "Hello."}


def test_a45_a_template_without_system_role_says_so() -> None:
    from lockstep.async_llm import AsyncLLM

    model = smollm2_tokenizer()
    tokenizer = Tokenizer(model._backend, eos_ids=model.eos_ids, chat_template=NO_SYSTEM)
    with ServerThread(lambda: AsyncLLM.from_client(fake_client(), tokenizer)) as server:
        for messages, complaint in (
            ([SYSTEM], "System role not supported"),
            ([SYSTEM, USER], "System role not supported"),
            ([USER, USER], "must alternate"),
            ([USER, ASSISTANT], ""),
        ):
            body = {"model": "parrot", "messages": messages, "max_tokens": 4}
            response = httpx.post(f"{server.url}/v1/chat/completions", json=body)
            if complaint:
                assert response.status_code == 400
                assert complaint in response.json()["error"]["message"]
                assert response.json()["error"]["param"] == "messages"
            else:
                assert response.status_code == 200


@pytest.mark.parametrize("messages", [[SYSTEM], [SYSTEM, USER], [USER, USER], [USER, ASSISTANT]])
def test_a45_the_real_template_takes_any_order(
    http: httpx.Client, messages: list[dict[str, str]]
) -> None:
    body = {"model": "smollm2", "messages": messages, "max_tokens": 2}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_two_hundred_clients_and_a_pool_for_ten() -> None:
    """Short answers of the real model; each equals its answer alone."""
    import asyncio

    from lockstep.async_llm import AsyncLLM

    prompts = [f"Guest number {index} likes" for index in range(200)]
    page_bytes = 16 * 30 * 2 * 3 * 64 * 2
    greedy = {"model": "smollm2", "temperature": 0, "max_tokens": 2, "logprobs": 0}

    async def crowd(url: str) -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=100, limits=limits) as http:
            posts = (
                http.post("/v1/completions", json={**greedy, "prompt": prompt})
                for prompt in prompts
            )
            return await asyncio.gather(*posts)

    def make() -> AsyncLLM:
        return AsyncLLM("smollm2", threads=1, cache_bytes=12 * page_bytes, max_context=64)

    with ServerThread(make) as server:
        replies = asyncio.run(crowd(server.url))
        assert [reply.status_code for reply in replies] == [200] * 200
        wait_until(lambda: server.llm.stats().running == 0)
        assert server.llm.stats().pages_total <= 20
        for index in (0, 77, 199):
            alone = httpx.post(
                f"{server.url}/v1/completions", json={**greedy, "prompt": prompts[index]}
            )
            assert alone.json()["choices"] == replies[index].json()["choices"]
        wait_until(lambda: server.llm.stats().pages_used == 0)


def test_given_ids_have_their_exact_logprob_at_every_position(http: httpx.Client) -> None:
    ids = [smollm2_tokenizer().encode(word)[0] for word in (" yes", " no")]
    body = {"prompt": "I asked and she said", "max_tokens": 2, "logprob_token_ids": ids}
    (choice,) = complete(http, **body, prompt_logprobs=0)["choices"]
    given = choice["logprobs"]["given_logprobs"]
    assert [len(values) for values in given] == [2, 2]
    wide = complete(http, **{**body, "logprob_token_ids": None}, logprobs=128)["choices"][0]
    top = wide["logprobs"]["top_logprobs"][0]
    for word, value in zip((" yes", " no"), given[0], strict=True):
        assert top.get(word, value) == value
    assert all(set(map(str, ids)) <= set(entry) for entry in choice["prompt_logprobs"][1:])
