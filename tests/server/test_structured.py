"""Structured output over HTTP: its names, what is refused, OpenAI's client on a real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from lockstep.async_llm import AsyncLLM
from lockstep.weights import PACKAGED_MODELS
from tests.server.support import ServerThread

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"type": ["string", "null"], "maxLength": 8}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
PERSON = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA, "strict": True}}
CHAT = [{"role": "user", "content": "Say something short."}]


def post(http: httpx.Client, route: str = "completions", **body: Any) -> httpx.Response:
    given = {"prompt": "a b c"} if route == "completions" else {"messages": CHAT}
    return http.post(
        f"/v1/{'chat/' if route == 'chat' else ''}completions",
        content=json.dumps({"model": "parrot", **given, **body}),  # escapes lone surrogates
        headers={"content-type": "application/json"},
    )


def text(response: httpx.Response) -> tuple[str, str]:
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice.get("text") or choice["message"]["content"], choice["finish_reason"]


@pytest.mark.parametrize("route", ["completions", "chat"])
@pytest.mark.parametrize(
    "field",
    [
        {"response_format": PERSON},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
    ],
)
def test_a_schema_by_every_name(http: httpx.Client, route: str, field: dict[str, Any]) -> None:
    for seed in range(3):
        found, reason = text(post(http, route, max_tokens=120, seed=seed, **field))
        if reason == "stop":
            jsonschema.validate(json.loads(found), SCHEMA)
        else:
            assert reason == "length"
    found, reason = text(post(http, route, max_tokens=2, **field))
    assert reason == "length"


@pytest.mark.parametrize("route", ["completions", "chat"])
@pytest.mark.parametrize(
    ("field", "wanted"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
        ({"guided_choice": ["yes"]}, ("yes",)),
        ({"structured_outputs": {"regex": r"\d"}}, tuple("0123456789")),
        ({"guided_regex": "x{4}"}, ("xxxx",)),
        ({"structured_outputs": {"grammar": 'start: "a" ("b" | "c")'}}, ("ab", "ac")),
        ({"guided_grammar": 'root ::= "a" tail\ntail ::= "b" | "c"'}, ("ab", "ac")),
    ],
)
def test_other_constraints_by_vllms_names(
    http: httpx.Client, route: str, field: dict[str, Any], wanted: tuple[str, ...]
) -> None:
    found, reason = text(post(http, route, **field))
    assert found in wanted
    assert reason == "stop"


def test_text_and_null_ask_for_nothing(http: httpx.Client) -> None:
    assert text(post(http, response_format={"type": "text"})) == ("a b c", "stop")
    assert text(post(http, response_format=None, guided_json=None)) == ("a b c", "stop")


def test_json_object(http: httpx.Client) -> None:
    found, reason = text(post(http, "chat", response_format={"type": "json_object"}, max_tokens=3))
    assert found.startswith("{")
    assert reason in ("stop", "length")


def test_streamed_pieces_join_to_the_whole(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "parrot",
        "messages": CHAT,
        "response_format": PERSON,
        "seed": 4,
        "max_tokens": 60,
        "n": 3,
    }
    whole = client.chat.completions.create(**ask).choices
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**ask, stream=True)]
    for choice in whole:
        pieces = [piece for piece in chunks if piece.index == choice.index]
        assert "".join(piece.delta.content or "" for piece in pieces) == choice.message.content
        assert pieces[-1].finish_reason == choice.finish_reason
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
    assert len({choice.message.content for choice in whole}) > 1, "each has a grammar of its own"


BAD: list[tuple[dict[str, Any], str, str]] = [
    # A42
    ({"guided_regex": "("}, "guided_regex", "unclosed group"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "must be true"),
    ({"structured_outputs": {"json": ""}}, "structured_outputs", "not JSON"),
    ({"guided_json": ""}, "guided_json", "not JSON"),
    # A43
    (
        {"guided_json": {"type": "object", "properties": {"foo": "bar"}}},
        "guided_json",
        "/properties/foo",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"properties": {"foo": "bar"}}},
            }
        },
        "response_format",
        "/properties/foo",
    ),
    ({"guided_json": {"items": {"uniqueItems": True}}}, "guided_json", "/items/uniqueItems"),
    (
        {"guided_json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
        "guided_json",
        "oneOf",
    ),
    ({"guided_json": {"minimum": 5, "maximum": 1, "type": "integer"}}, "guided_json", "minimum"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
    ({"guided_grammar": "root ::= ((("}, "guided_grammar", "GBNF"),
    ({"guided_grammar": '%llguidance {}\nstart: "a"'}, "guided_grammar", "options"),
    ({"guided_grammar": ""}, "guided_grammar", "non-empty"),
    ({"guided_choice": []}, "guided_choice", "non-empty"),
    ({"guided_choice": [""]}, "guided_choice", "non-empty"),
    ({"guided_choice": ["a", 3]}, "guided_choice", ""),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
    ({"structured_outputs": {"json": 3}}, "structured_outputs", "object"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "together"),
    ({"response_format": PERSON, "guided_regex": "a"}, "guided_regex", "together"),
    ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
    ({"response_format": {}}, "response_format", "type"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "object"),
    ({"response_format": {"type": "text", "x": 1}}, "response_format", "x"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format",
        "schema is missing",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format",
        "name",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {}, "strict": "yes"},
            }
        },
        "response_format",
        "strict",
    ),
    ({"guided_regex": "a" * 70_000}, "guided_regex", "65536"),
    ({"guided_json": {"const": "\ud800"}}, "", ""),
    ({"guided_regex": "\ud800"}, "", ""),
    ({"guided_choice": ["\ud800"]}, "", ""),
    ({"guided_grammar": "start: '\ud800'"}, "", ""),
]


@pytest.mark.parametrize(("body", "field", "told"), BAD, ids=lambda v: str(v)[:50])
@pytest.mark.parametrize("route", ["completions", "chat"])
def test_a_bad_constraint_is_a_400_that_names_it_and_the_next_request_works(
    http: httpx.Client, route: str, body: dict[str, Any], field: str, told: str
) -> None:
    response = post(http, route, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    if field:
        assert error["param"] == field
    assert told in error["message"]
    assert "%llguidance" not in error["message"] or "options" in told
    assert text(post(http, guided_choice=["ok"])) == ("ok", "stop")


def test_a_deeply_nested_schema_is_a_400(http: httpx.Client) -> None:
    body = (
        '{"model": "parrot", "prompt": "a", "guided_json": ' + '{"items":' * 300 + "{}" + "}" * 301
    )
    response = http.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400, response.text


def test_a_grammar_that_leaves_nothing_is_the_clients_error(http: httpx.Client) -> None:
    response = post(http, guided_choice=["a"], bad_words=["a"])
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"].startswith("grammar: ")
    assert text(post(http)) == ("a b c", "stop")


def test_hostile_grammars_do_not_hold_up_others(http: httpx.Client) -> None:
    """While slow grammars compile, an ordinary request is answered."""
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    with ThreadPoolExecutor(6) as pool:
        slow = [
            pool.submit(post, http, guided_json={**wide, "title": str(i)}, max_tokens=3)
            for i in range(4)
        ]
        for _ in range(5):
            assert text(post(http)) == ("a b c", "stop")
        assert {future.result().status_code for future in slow} <= {200, 400}


# --- a real model ---------------------------------------------------------------------------


class Step(BaseModel):
    action: Literal["search", "answer", "ask"]
    reason: str | None = Field(description="why", max_length=40)


class Plan(BaseModel):
    title: str = Field(max_length=30)
    steps: list[Step] = Field(max_length=2)
    urgent: bool


@pytest.fixture(scope="module")
def real() -> Iterator[openai.OpenAI]:
    model = next(model for model in PACKAGED_MODELS if model.name == "smollm2")
    if not model.installed():
        pytest.skip(f"smollm2 is not installed: {model.install}")
    with (
        ServerThread(lambda: AsyncLLM("smollm2", threads=1, cache_bytes=128 << 20)) as server,
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=100
        ) as client,
    ):
        yield client


ASK: list[Any] = [{"role": "user", "content": "Plan a short trip to Paris, as JSON."}]


def test_openais_parse_gives_a_pydantic_model(real: openai.OpenAI) -> None:
    for seed, temperature in ((1, 0.0), (2, 1.0)):
        reply = real.chat.completions.parse(
            model="smollm2",
            messages=ASK,
            response_format=Plan,
            max_tokens=250,
            seed=seed,
            temperature=temperature,
        )
        assert isinstance(reply.choices[0].message.parsed, Plan)
        assert reply.choices[0].finish_reason == "stop"


def test_openais_streamed_parse(real: openai.OpenAI) -> None:
    with real.chat.completions.stream(
        model="smollm2", messages=ASK, response_format=Step, max_tokens=80, seed=1
    ) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Step)


def test_a44_a_nullable_field_is_valid_at_temperature_zero(real: openai.OpenAI) -> None:
    reply = real.chat.completions.create(
        model="smollm2",
        messages=ASK,
        response_format=PERSON,  # type: ignore[call-overload]
        max_tokens=80,
        temperature=0,
    )
    jsonschema.validate(json.loads(reply.choices[0].message.content or ""), SCHEMA)


def test_a_cut_answer_says_length(real: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        real.chat.completions.parse(
            model="smollm2", messages=ASK, response_format=Plan, max_tokens=4
        )


def test_neighbours_change_no_bit(real: openai.OpenAI) -> None:
    """Constrained and free requests, alone and all at once, with logprobs, on shared prefixes."""
    asks: list[dict[str, Any]] = []
    for number in range(6):
        asks.append(
            {
                "model": "smollm2",
                "messages": [{"role": "user", "content": "Tell me of Paris. " * (1 + number % 3)}],
                "max_tokens": 16,
                "seed": number,
                "temperature": (0.0, 1.0)[number % 2],
                "logprobs": True,
                "top_logprobs": 2,
            }
        )
    asks[0]["response_format"] = PERSON
    asks[1]["response_format"] = {"type": "json_object"}
    asks[2]["extra_body"] = {"structured_outputs": {"regex": "[a-z ]{20,}"}}
    asks[3]["response_format"] = PERSON

    def run(ask: dict[str, Any]) -> Any:
        choice = real.chat.completions.create(**ask).choices[0]
        return choice.message.content, choice.finish_reason, choice.logprobs

    alone = [run(ask) for ask in asks]
    for order in (asks, asks[::-1]):
        with ThreadPoolExecutor(len(order)) as pool:
            crowd = list(pool.map(run, order))
        assert (crowd if order is asks else crowd[::-1]) == alone
