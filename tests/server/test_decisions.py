"""Both shapes of decisions over a parrot, whose logprobs are known: shapes, errors, accounts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from typesafe_sdk import (
    Choice,
    Noul,
    Score,
    TypeSafeBadRequestError,
    TypeSafeClient,
    TypeSafeNotFoundError,
)

from tests.fakes import logprob_of
from tests.server.support import ServerThread, fake_llm, smollm2_tokenizer, wait_until

TEXT = "I was charged twice for my order and nobody answers."


def predicate(**more: Any) -> dict[str, Any]:
    return {"type": "predicate", "instructions": "It is about billing.", **more}


def choice(*values: str | bool, **more: Any) -> dict[str, Any]:
    options = [{"value": value} for value in values]
    return {"type": "choice", "instructions": "Which?", "choices": options, **more}


def score(*labels: str) -> dict[str, Any]:
    return {"type": "score", "instructions": "How?", "levels": [{"label": one} for one in labels]}


def post(http: httpx.Client, *questions: Any, **more: Any) -> httpx.Response:
    body = {"model": "parrot", "input": TEXT, "questions": list(questions), **more}
    return http.post("/v1/decisions", json=body)


def weights(labels: str) -> list[float]:
    ids = [smollm2_tokenizer().encode_inside(label)[0] for label in labels.split()]
    return [math.exp(logprob_of(token)) for token in ids]


@pytest.fixture
def typesafe(parrot_server: ServerThread) -> Iterator[TypeSafeClient]:
    with TypeSafeClient(base_url=parrot_server.url, api_key="none") as client:
        yield client


def test_answers_stand_in_the_order_of_questions_with_their_names(client: openai.OpenAI) -> None:
    reply = client.decisions.create(
        model="parrot",
        input=TEXT,
        questions=[
            score("low", "high"),  # type: ignore[list-item]
            predicate(name="billing"),  # type: ignore[list-item]
            choice("calm", "angry", name="tone"),  # type: ignore[list-item]
            predicate(),  # type: ignore[list-item]
        ],
    )
    shapes = [(answer.type, answer.name) for answer in reply.answers]
    assert shapes == [
        ("score", None),
        ("predicate", "billing"),
        ("choice", "tone"),
        ("predicate", None),
    ]
    assert reply.model == "parrot"


def test_probability_confidence_and_mass(http: httpx.Client) -> None:
    three = weights("A B C")
    (answer,) = post(http, choice("x", "y", "z")).json()["answers"]
    mass = math.fsum(three)
    assert math.isclose(answer["mass"], mass)
    best = max(three)
    assert answer["choice"] == "xyz"[three.index(best)]
    assert math.isclose(answer["confidence"], best)
    got = [entry["probability"] for entry in answer["probabilities"]]
    assert all(math.isclose(p, w / mass) for p, w in zip(got, three, strict=True))
    yes, no = weights("Yes No")
    (told,) = post(http, predicate()).json()["answers"]
    assert math.isclose(told["probability"], yes / (yes + no))
    low, high = weights("0 1")
    (rated,) = post(http, score("low", "high")).json()["answers"]
    assert math.isclose(rated["score"], high / (low + high))
    assert [entry["value"] for entry in rated["probabilities"]] == [0, 1]
    assert [entry["label"] for entry in rated["probabilities"]] == ["low", "high"]


def test_a_text_and_a_boolean_are_two_choices(client: openai.OpenAI) -> None:
    asked = choice("true", True, "false", False)
    (answer,) = client.decisions.create(
        model="parrot",
        input=TEXT,
        questions=[asked],  # type: ignore[list-item]
    ).answers
    assert answer.type == "choice"
    values = [entry.value for entry in answer.probabilities]
    assert [type(value) for value in values] == [str, bool, str, bool]
    assert values == ["true", True, "false", False]


def test_a_threshold_lets_an_earlier_choice_win(http: httpx.Client) -> None:
    plain = post(http, choice("x", "y")).json()["answers"][0]
    loser = "x" if plain["choice"] == "y" else "y"
    asked = choice("x", "y")
    for option in asked["choices"]:
        option["threshold"] = 0.0 if option["value"] == loser else 1.0
    held = post(http, asked).json()["answers"][0]
    assert held["choice"] == loser
    assert held["probabilities"] == plain["probabilities"]


def test_little_mass_is_refused_where_asked_and_only_there(http: httpx.Client) -> None:
    assert post(http, predicate(name="b"), refuse_below=1.0).json()["answers"][0] | {"mass": 0} == {
        "type": "refusal",
        "name": "b",
        "mass": 0,
    }
    assert post(http, predicate()).json()["answers"][0]["type"] == "predicate"


def test_the_input_is_read_once_and_the_next_call_finds_it(http: httpx.Client) -> None:
    text = "A story that is told for the first time in this test. " * 12
    questions = [predicate(), choice("a", "b"), score("x", "y"), choice("c", "d", "e")]
    first = post(http, *questions, input=text).json()["usage"]
    details = first["input_tokens_details"]
    assert details["cached_tokens"] + details["cache_write_tokens"] == first["input_tokens"]
    assert first["output_tokens"] == len(questions)
    assert first["total_tokens"] == first["input_tokens"] + first["output_tokens"]
    assert first["output_tokens_details"] == {"reasoning_tokens": 0}
    again = post(http, *questions, input=text).json()["usage"]
    assert again["input_tokens"] == first["input_tokens"]
    assert again["input_tokens_details"]["cached_tokens"] >= again["input_tokens"] - len(questions)
    alone = post(http, questions[0], input=text).json()["usage"]["input_tokens"]
    assert first["input_tokens"] < 2 * alone  # and not four times


def test_400_questions_and_more_choices_than_letters(http: httpx.Client) -> None:
    answers = post(http, *(predicate(name=f"q{i}") for i in range(400))).json()["answers"]
    assert [answer["name"] for answer in answers] == [f"q{i}" for i in range(400)]
    many = [f"o{i}" for i in range(60)]
    (answer,) = post(http, choice(*many)).json()["answers"]
    assert [entry["value"] for entry in answer["probabilities"]] == many
    assert math.isclose(math.fsum(e["probability"] for e in answer["probabilities"]), 1.0)


def test_messages_calls_and_json_are_read(http: httpx.Client) -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be strict."}]},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "Weather?", "prompt_cache_breakpoint": {}},
                {"type": "input_json", "data": {"city": "Oslo"}},
            ],
        },
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"c":"Oslo"}'},
        {"type": "function_call_output", "call_id": "1", "output": "rain"},
        {"type": "custom_tool_call", "call_id": "1", "name": "tool", "input": "x"},
        {
            "type": "custom_tool_call_output",
            "call_id": "1",
            "output": [{"type": "input_text", "text": "y"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "phase": "final_answer",
            "content": [
                {"type": "output_text", "text": "Rain."},
                {"type": "refusal", "refusal": "No more."},
            ],
        },
    ]
    extra = {
        "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
        "safety_identifier": "s",
    }
    parts = [{"type": "input_text", "text": "Is it"}, {"type": "input_json", "data": {"a": 1}}]
    reply = post(http, predicate(instructions=parts), input=items, **extra)
    assert reply.status_code == 200, reply.text


DEEP: dict[str, Any] = {}
for _ in range(40):
    DEEP = {"x": DEEP}


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"questions": []}, "questions", "invalid_type"),
        ({"questions": [predicate()] * 401}, "questions", "invalid_type"),
        (
            {"questions": [predicate()] * 3 + [choice(3, "b")]},
            "questions[3].choices[0].value",
            None,
        ),  # type: ignore[arg-type]
        ({"questions": [choice("a")]}, "questions[0].choices", None),
        ({"questions": [choice(*map(str, range(256)))]}, "questions[0].choices", None),
        ({"questions": [choice("a", True, "a")]}, "questions[0].choices[2].value", None),
        ({"questions": [choice(True, True)]}, "questions[0].choices[1].value", None),
        ({"questions": [choice("a", " ")]}, "questions[0].choices[1].value", None),
        ({"questions": [score("a")]}, "questions[0].levels", None),
        ({"questions": [score(*"abcdefghijk")]}, "questions[0].levels", None),
        ({"questions": [score("a", "")]}, "questions[0].levels[1].label", None),
        ({"questions": [predicate(instructions="")]}, "questions[0].instructions", None),
        ({"questions": [predicate(instructions=[])]}, "questions[0].instructions", None),
        ({"questions": [{"type": "predicate"}]}, "questions[0].instructions", "missing_parameter"),
        ({"questions": [{"type": "essay"}]}, "questions[0]", None),
        ({"questions": [predicate(nme="x")]}, "questions[0].nme", "unknown_parameter"),
        ({"questions": [7]}, "questions[0]", None),
        ({"input": ""}, "input", None),
        ({"input": []}, "input", None),
        ({"input": 7}, "input", None),
        ({"input": "word " * 700}, "input", "context_length_exceeded"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0]", None),
        ({"input": [{"role": "user", "content": 7}]}, "input[0].content", None),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
            "unsupported_parameter",
        ),
        (
            {"input": [{"role": "system", "content": [{"type": "input_json", "data": {}}]}]},
            "input[0].content[0].type",
            None,
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "9", "output": "x"}]},
            "input[0].call_id",
            None,
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_json", "data": DEEP}]}]},
            "input[0].content[0].data",
            None,
        ),
        (
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_json", "data": {"x": [0] * 9999}}]}
                ]
            },
            "input[0].content[0].data",
            None,
        ),
        ({"refuse_below": 2}, "refuse_below", None),
        ({"priority": 2**31}, "priority", None),
        ({"temperature": 1}, "temperature", "unknown_parameter"),
        ({"model": 7}, "model", None),
    ],
)
def test_errors_name_the_place(
    http: httpx.Client, change: dict[str, Any], param: str, code: str | None
) -> None:
    body = {"model": "parrot", "input": TEXT, "questions": [predicate()], **change}
    reply = http.post("/v1/decisions", json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert code is None or error["code"] == code


def test_lone_surrogates_are_refused_wherever_they_stand(http: httpx.Client) -> None:
    for change in (
        {"input": "\ud800"},
        {"input": [{"role": "user", "content": "\ud800"}]},
        {"questions": [predicate(instructions="\ud800")]},
        {"questions": [choice("\ud800", "b")]},
        {"questions": [predicate(name="\ud800")]},
        {"\ud800": 1},
    ):
        body = {"model": "parrot", "input": TEXT, "questions": [predicate()], **change}
        reply = http.post(
            "/v1/decisions",
            content=json.dumps(body),
            headers={"Content-Type": "application/json"},
        )
        assert reply.status_code == 400, change
    assert post(http, predicate()).status_code == 200


@pytest.mark.parametrize("content", [b"", b"[]", b"7", b'{"model":', b'"x"'])
def test_bodies_that_are_no_objects(http: httpx.Client, content: bytes) -> None:
    for route in ("/v1/decisions", "/v1/systemone", "/v1/score", "/v1/embeddings", "/tokenize"):
        headers = {"Content-Type": "application/json"}
        assert http.post(route, content=content, headers=headers).status_code == 400


def test_an_unknown_model_is_404(http: httpx.Client) -> None:
    assert post(http, predicate(), model="other").status_code == 404


def test_more_questions_than_the_queue_takes(http: httpx.Client) -> None:
    """A call waits for itself; it is refused only where others fill the queue."""
    questions = [predicate(name=str(index)) for index in range(90)]
    with (
        ServerThread(lambda: fake_llm("parrot", max_queue=7, max_sequences=2)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        answers = post(client, *questions).json()["answers"]
    assert answers == post(http, *questions).json()["answers"]


def test_a_client_that_leaves_takes_its_questions_along() -> None:
    questions = [choice("a", "b", instructions=f"Question {i}?") for i in range(200)]
    with (
        ServerThread(lambda: fake_llm("slow", max_sequences=2)) as server,
        httpx.Client(base_url=server.url, timeout=2) as client,
    ):
        with pytest.raises(httpx.ReadTimeout):
            post(client, *questions, model="slow")
        wait_until(lambda: server.llm.stats().running == server.llm.stats().waiting == 0, 3)
        assert 0 < server.llm.stats().finished < 200
        assert server.llm.stats().cancelled > 0


# --- TypeSafe's shape ----------------------------------------------------------------------


def test_systemone_by_its_own_client(typesafe: TypeSafeClient) -> None:
    reply = typesafe.system_one(
        state={"message": "charged twice", "tags": ["billing"]},
        questions={
            "billing": Noul(instructions="Is it about billing?", criteria={"true": "money"}),
            "tone": Choice(criteria={"calm": None, "angry": {"signs": ["!"]}}),
            "urgency": Score(instructions="How urgent?", criteria=["low", {"level": 1}, "high"]),
            "bare": Noul(),
        },
    )
    yes, no = weights("Yes No")
    assert list(reply.answers) == ["billing", "tone", "urgency", "bare"]
    assert math.isclose(reply.nouls["billing"].noul, yes / (yes + no))
    tone = reply.choices["tone"]
    assert list(tone.probabilities) == ["calm", "angry"]
    assert tone.probabilities[tone.choice] == max(tone.probabilities.values())
    urgency = reply.scores["urgency"]
    assert urgency.legend == {0: "low", 1: {"level": 1}, 2: "high"}
    assert math.isclose(math.fsum(urgency.probabilities.values()), 1.0)
    expected = math.fsum(index * p for index, p in urgency.probabilities.items())
    assert math.isclose(urgency.score, expected)
    assert reply.model == "parrot"
    assert reply.usage.output_tokens == 4
    assert reply.usage.input_tokens


def test_both_shapes_are_one_decision(typesafe: TypeSafeClient, http: httpx.Client) -> None:
    told = typesafe.system_one(
        TEXT, {"q": Choice(instructions="Which?", criteria={"x": "one", "y": None})}, model="parrot"
    )
    asked = choice("x", "y")
    asked["choices"][0]["description"] = "one"
    (answer,) = post(http, asked).json()["answers"]
    assert told.choices["q"].confidence == answer["confidence"]
    assert told.choices["q"].choice == answer["choice"]


def test_models_for_both_clients(typesafe: TypeSafeClient, client: openai.OpenAI) -> None:
    (model,) = typesafe.models.list().models
    assert model.name == "parrot"
    assert len(model.release_date.split("-")) == 3
    assert [card.id for card in client.models.list()] == ["parrot"]


@pytest.mark.parametrize(
    ("question", "where"),
    [
        ({"type": "choice", "criteria": {"one": None}}, "questions.q.criteria"),
        ({"type": "choice", "criteria": {"a": 7, "b": None}}, "questions.q.criteria.a"),
        ({"type": "choice", "criteria": {"": None, "b": None}}, "questions.q.criteria"),
        ({"type": "score", "criteria": []}, "questions.q.criteria"),
        ({"type": "score", "criteria": ["low", ""]}, "questions.q.criteria"),
        ({"type": "score", "criteria": ["low", {"x": DEEP}]}, "questions.q.criteria[1]"),
        ({"type": "maybe"}, "questions.q"),
        ({"type": "noul", "criteria": {"yes": "x"}}, "questions.q.criteria.yes"),
    ],
)
def test_systemone_errors(http: httpx.Client, question: dict[str, Any], where: str) -> None:
    reply = http.post("/v1/systemone", json={"state": "x", "questions": {"q": question}})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == where


def test_names_that_are_no_unicode(http: httpx.Client) -> None:
    for questions in ({"\ud800": {"type": "noul"}}, {"q": {"type": "noul", "\ud800": 1}}):
        reply = http.post(
            "/v1/systemone",
            content=json.dumps({"state": "x", "questions": questions}),
            headers={"Content-Type": "application/json"},
        )
        assert reply.status_code == 400


def test_a_noul_without_anything_to_ask(http: httpx.Client) -> None:
    reply = http.post("/v1/systemone", json={"state": "x", "questions": {"": {"type": "noul"}}})
    assert reply.json()["error"]["param"] == "questions..instructions"


@pytest.mark.parametrize(("temperature", "share"), [(0.0, 1.0), (1.0, None), (1e6, 0.5)])
def test_a_temperature_sharpens_or_flattens(
    http: httpx.Client, temperature: float, share: float | None
) -> None:
    question = {"type": "choice", "criteria": {"a": None, "b": None}}
    body = {"state": "x", "questions": {"q": question}}
    plain = http.post("/v1/systemone", json=body).json()["answers"]["q"]
    told = http.post("/v1/systemone", json=body | {"temperature": temperature}).json()
    answer = told["answers"]["q"]
    assert answer["mass"] == plain["mass"]
    expected = plain["probabilities"][plain["choice"]] if share is None else share
    assert math.isclose(answer["probabilities"][answer["choice"]], expected, rel_tol=1e-5)


def test_typesafe_client_reads_errors(typesafe: TypeSafeClient) -> None:
    asked = {"q": Choice(criteria={"a": None, "b": None})}
    with pytest.raises(TypeSafeBadRequestError, match="state must not be empty"):
        typesafe.system_one("", asked)
    with pytest.raises(TypeSafeNotFoundError, match="'other' is not served here"):
        typesafe.system_one("x", asked, model="other")
