"""`/v1/responses` as OpenAI's client sees it, over a model that repeats its prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseOutputMessage, ResponseOutputText

from lockstep.server.responses import call as call_module
from tests.server.support import ServerThread, fake_llm, wait_until
from tests.server.test_clients_leave import LONG, send

TEXT = "Say é and 🙂."


def ask(client: openai.OpenAI, **fields: Any) -> Response:
    response: Response = client.responses.create(**{"model": "parrot", "input": TEXT, **fields})
    Response.model_validate(response.to_dict())  # the client itself checks no types
    return response


def refused(client: openai.OpenAI, **fields: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, **fields)
    return caught.value


def part_of(response: Response) -> ResponseOutputText:
    (message,) = response.output
    assert isinstance(message, ResponseOutputMessage)
    (part,) = message.content
    assert isinstance(part, ResponseOutputText)
    return part


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_response_is_the_text_its_counts_and_what_was_asked(client: openai.OpenAI) -> None:
    response = ask(
        client,
        instructions="Be brief.",
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=100,
        metadata={"team": "a"},
        user="u",
        service_tier="auto",
        truncation="disabled",
        reasoning={"summary": "auto"},
        text={"format": {"type": "text"}, "verbosity": "medium"},
    )
    assert response.status == "completed"
    assert "Be brief." in response.output_text
    assert TEXT in response.output_text
    assert response.id.startswith("resp_")
    assert response.model == "parrot"
    assert response.instructions == "Be brief."
    assert (response.temperature, response.top_p) == (0.5, 0.9)
    assert response.max_output_tokens == 100
    assert response.metadata == {"team": "a"}
    assert response.user == "u"
    assert response.tools == []
    assert response.tool_choice == "auto"
    assert response.parallel_tool_calls is True
    assert response.error is None
    assert response.incomplete_details is None
    usage = response.usage
    assert usage is not None
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0
    count = client.responses.input_tokens.count(
        model="parrot", input=TEXT, instructions="Be brief."
    )
    assert count.input_tokens == usage.input_tokens


def test_running_out_of_tokens_is_incomplete(client: openai.OpenAI) -> None:
    response = ask(client, max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 3
    (message,) = response.output
    assert isinstance(message, ResponseOutputMessage)
    assert message.status == "incomplete"


@pytest.mark.parametrize("fields", [{}, {"max_output_tokens": 4}, {"top_logprobs": 2}])
def test_a_stream_ends_in_the_whole_response(client: openai.OpenAI, fields: Any) -> None:
    whole = ask(client, **fields)
    events = list(client.responses.create(model="parrot", input=TEXT, stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    streamed = last.response
    assert streamed.output_text == whole.output_text
    assert part_of(streamed).logprobs == part_of(whole).logprobs
    assert streamed.status == whole.status
    joined = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert joined == whole.output_text
    assert client.responses.retrieve(streamed.id) == streamed


def test_the_clients_own_stream_agrees(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="parrot", input=TEXT, extra_body={"stream_options": {"include_obfuscation": True}}
    ) as stream:
        snapshots = [
            event.snapshot for event in stream if event.type == "response.output_text.delta"
        ]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == ask(client).output_text


def test_a_stream_has_names_and_no_done(http: httpx.Client) -> None:
    body = {"model": "parrot", "input": TEXT, "stream": True}
    response = http.post("/v1/responses", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    for frame in frames:
        name, data = frame.split("\n")
        assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]


def test_logprobs_are_those_of_the_text(client: openai.OpenAI) -> None:
    response = ask(client, include=["message.output_text.logprobs"], top_logprobs=1)
    part = part_of(response)
    assert part.logprobs
    assert bytes(byte for entry in part.logprobs for byte in entry.bytes).decode() == part.text
    assert all(len(entry.top_logprobs) == 1 for entry in part.logprobs)
    assert part_of(ask(client)).logprobs == []


def test_a_chain_is_the_conversation_sent_whole(client: openai.OpenAI) -> None:
    first = ask(client, input="one two three", instructions="Count.")
    second = ask(client, input="four", previous_response_id=first.id, instructions="Count.")
    third = ask(client, input=[user("five")], previous_response_id=second.id, instructions="Count.")
    items: list[Any] = [user("one two three"), *first.output, user("four"), *second.output]
    whole = ask(client, input=[*items, user("five")], instructions="Count.")
    assert third.output_text == whole.output_text
    assert third.usage is not None
    assert whole.usage is not None
    assert third.usage.input_tokens == whole.usage.input_tokens
    # All that the second turn read and wrote is in the prefix cache.
    assert second.usage is not None
    assert third.usage.input_tokens_details.cached_tokens >= second.usage.total_tokens - 16
    assert third.previous_response_id == second.id
    # Instructions are not carried over.
    bare = ask(client, input="x", previous_response_id=first.id)
    assert bare.instructions is None
    assert not bare.output_text.startswith("system\nCount.")


def test_a_conversation_can_go_on_twice_from_one_point(client: openai.OpenAI) -> None:
    first = ask(client, input="one")
    left = ask(client, input="left", previous_response_id=first.id)
    right = ask(client, input="right", previous_response_id=first.id)
    assert "left" not in right.output_text
    assert "right" not in left.output_text


def test_an_incomplete_response_can_be_gone_on_from(client: openai.OpenAI) -> None:
    first = ask(client, input="one two three", max_output_tokens=2)
    second = ask(client, input="more", previous_response_id=first.id)
    assert first.output_text in second.output_text


def test_a_conversation_cannot_grow_without_being_read(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reasoning without content takes no tokens, so the context does not bound it."""
    monkeypatch.setattr(call_module, "MAX_CONVERSATION_BYTES", 150_000)
    unread = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x" * 70_000}
    turn: Any = [unread, user("hi")]
    first = ask(client, input=turn)
    second = ask(client, input=turn, previous_response_id=first.id)
    error = refused(client, input=turn, previous_response_id=second.id)
    assert (error.status_code, error.code) == (400, "conversation_too_large")


def test_an_item_can_be_named_by_its_id(client: openai.OpenAI) -> None:
    first = ask(client, input="one two")
    reference = {"type": "item_reference", "id": first.output[0].id}
    named = ask(client, input=[user("one two"), reference, user("three")])
    chained = ask(client, input="three", previous_response_id=first.id)
    assert named.output_text == chained.output_text


def test_input_items_are_all_that_the_model_read(client: openai.OpenAI) -> None:
    first = ask(client, input="one")
    second = ask(client, input=[user("two"), user("three")], previous_response_id=first.id)
    pages = client.responses.input_items.list(second.id, order="asc", limit=3)
    assert pages.has_more
    items = list(pages)  # the client turns the pages
    assert [item.content[0].text for item in items] == [  # type: ignore[union-attr, index]
        "one",
        first.output_text,
        "two",
        "three",
    ]
    latest = client.responses.input_items.list(second.id, limit=1)
    assert latest.data[0] == items[-1]
    with pytest.raises(openai.BadRequestError, match="after"):
        client.responses.input_items.list(second.id, after="msg_none")


def test_what_is_deleted_is_gone_but_not_for_what_was_built_on_it(client: openai.OpenAI) -> None:
    first = ask(client, input="one")
    second = ask(client, input="two", previous_response_id=first.id)
    client.responses.delete(first.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError) as caught:
            call(first.id)
        assert caught.value.code == "response_not_found"
    error = refused(client, previous_response_id=first.id)
    assert (error.status_code, error.code) == (404, "previous_response_not_found")
    assert error.param == "previous_response_id"
    third = ask(client, input="three", previous_response_id=second.id)
    assert "one" in third.output_text


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    first = ask(client, store=False)
    assert first.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    assert refused(client, previous_response_id=first.id).status_code == 404


def test_only_what_runs_can_be_cancelled(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="has ended"):
        client.responses.cancel(ask(client).id)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": []}, "input", "empty_prompt"),
        ({"input": "word " * 600}, "input", "context_length_exceeded"),
        ({"input": [{"type": "web_search_call"}]}, "input", "unsupported_parameter"),
        ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools", "unsupported_parameter"),
        ({"tools": [{"type": "function", "parameters": {}}]}, "tools", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "invalid_type"),
        ({"include": ["everything"]}, "include", "invalid_type"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "invalid_value"),
        ({"text": {"verbosity": "high"}}, "text", "invalid_type"),
        ({"max_output_tokens": -1}, "max_output_tokens", "invalid_value"),
        ({"top_logprobs": 1000}, "top_logprobs", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"metadata": {"a": 1}}, "metadata", "invalid_value"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "invalid_value"),
        ({"metadata": {"x" * 65: "a"}}, "metadata", "invalid_value"),
        ({"metadata": {str(i): "a" for i in range(17)}}, "metadata", "invalid_value"),
        ({"extra_body": {"n": 2}}, "n", "unsupported_parameter"),
        ({"extra_body": {"max_tokens": 5}}, "max_tokens", "unsupported_parameter"),
        ({"extra_body": {"surprise": 1}}, "surprise", "unknown_parameter"),
        ({"model": "other"}, "model", "model_not_found"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str, code: str
) -> None:
    error = refused(client, **fields)
    assert error.status_code == (404 if param == "model" else 400)
    assert (error.param, error.code) == (param, code)


@pytest.mark.parametrize(
    "fields",
    [
        r'"input": "\ud800"',
        r'"input": [{"role": "user", "content": "x", "id": "\ud800"}]',
        r'"input": "x", "metadata": {"a": "\ud800"}',
        r'"input": "x", "instructions": "\ud800"',
        r'"input": "x", "user": "\ud800"',
        r'"input": "x", "tools": [{"type": "function", "name": "f", "description": "\ud800"}]',
    ],
)
def test_text_that_is_no_unicode_is_refused(http: httpx.Client, fields: str) -> None:
    response = http.post(
        "/v1/responses",
        content='{"model": "parrot", ' + fields + "}",
        headers={"Content-Type": "application/json"},
    )
    assert response.status_code == 400, response.text


def test_chats_sampling_fields_are_taken(client: openai.OpenAI) -> None:
    response = ask(client, extra_body={"stop": ["é"], "seed": 3, "top_k": 5})
    assert response.status == "completed"
    assert response.output_text.endswith("Say ")


@pytest.fixture(scope="module")
def failing() -> Iterator[ServerThread]:
    with ServerThread(lambda: fake_llm("fails")) as server:
        yield server


def test_a_failure_is_the_last_event_or_an_error(failing: ServerThread) -> None:
    """The fake fails on token 13, which is `<jupyter_code>`."""
    with openai.OpenAI(base_url=f"{failing.url}/v1", api_key="none", max_retries=0) as client:
        fields: Any = {"model": "fails", "input": "<jupyter_code>"}
        with pytest.raises(openai.InternalServerError, match="told to fail"):
            client.responses.create(**fields)
        events = list(client.responses.create(stream=True, **fields))
        assert [event.type for event in events] == [
            "response.created",
            "response.in_progress",
            "response.failed",
        ]
        failed = events[-1].response
        assert failed.status == "failed"
        assert "told to fail" in failed.error.message
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(failed.id)


@pytest.fixture(scope="module")
def slow() -> Iterator[ServerThread]:
    """A step takes 30 ms."""
    with ServerThread(lambda: fake_llm("slow")) as server:
        yield server


def test_a33_a_dropped_turn_does_not_reach_the_next(slow: ServerThread) -> None:
    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as client:
        first = ask(client, model="slow", input="one", max_output_tokens=8)
        stream = client.responses.create(
            model="slow", input="two " * 100, previous_response_id=first.id, stream=True
        )
        dropped = next(iter(stream)).response.id
        stream.close()
        third = ask(
            client, model="slow", input="three", previous_response_id=first.id, max_output_tokens=8
        )
        fourth = ask(
            client, model="slow", input="four", previous_response_id=third.id, max_output_tokens=50
        )
        whole = ask(
            client,
            model="slow",
            input=[user("one"), *first.output, user("three"), *third.output, user("four")],
            max_output_tokens=50,
        )
        assert fourth.output_text == whole.output_text
        assert "three" in fourth.output_text
        assert "two" not in fourth.output_text
        assert refused(client, model="slow", previous_response_id=dropped).status_code == 404
        wait_until(lambda: slow.llm.stats().running == 0)
        wait_until(lambda: slow.llm.stats().pages_used == 0)
        assert slow.llm.stats().cancelled == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_response(slow: ServerThread, stream: bool) -> None:
    before = slow.llm.stats()
    connection = send(slow, "/v1/responses", {"model": "slow", "input": LONG, "stream": stream})
    wait_until(lambda: slow.llm.stats().generated_tokens > before.generated_tokens)
    connection.close()
    wait_until(lambda: slow.llm.stats().cancelled == before.cancelled + 1, 3.0)
    wait_until(lambda: slow.llm.stats().pages_used == 0, 3.0)


def test_keys_see_their_own_responses_only() -> None:
    with ServerThread(fake_llm, api_keys=("alice", "bob")) as server:
        alice, bob = (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
            for key in ("alice", "bob")
        )
        first = ask(alice)
        assert alice.responses.retrieve(first.id).id == first.id
        with pytest.raises(openai.NotFoundError):
            bob.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            bob.responses.delete(first.id)
        assert refused(bob, previous_response_id=first.id).status_code == 404
        reference = {"type": "item_reference", "id": first.output[0].id}
        assert refused(bob, input=[reference]).code == "item_not_found"
        assert alice.responses.retrieve(first.id).id == first.id


def test_a_server_told_to_store_nothing_stores_nothing() -> None:
    with (
        ServerThread(fake_llm, stored_responses=0) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        first = ask(client)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
