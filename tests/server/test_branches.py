"""Branches over HTTP: models that decide, heads that classify, loading while serving."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from langchain_openai import decisions
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.system_one import SystemOneModel
from pydantic_ai.providers.system_one import SystemOneProvider
from typesafe_sdk import Choice, Noul, Score, TypeSafeBadRequestError, TypeSafeClient

from lockstep.config import ConfigError
from lockstep.server import create_app
from tests.branch_fake import make_branch
from tests.decisions.test_docs import blocks
from tests.server.support import (
    ASKED,
    ServerThread,
    ask,
    choice,
    fake_llm,
    levels,
    smollm2_tokenizer,
)

# --- models that decide -----------------------------------------------------------------------


def test_models_list_the_branches_for_both_clients(judged_server: ServerThread) -> None:
    with openai.OpenAI(base_url=f"{judged_server.url}/v1", api_key="none") as client:
        cards = {card.id: card for card in client.models.list()}
        assert list(cards) == ["parrot", "codes", "judge", "reward"]
        assert cards["judge"].parent == "parrot"  # type: ignore[attr-defined]
        assert client.models.retrieve("judge").id == "judge"
    with TypeSafeClient(base_url=judged_server.url, api_key="none") as typesafe:
        described = {model.name: model.description for model in typesafe.models.list().models}
    assert "answer, search, refuse" in described["judge"]
    assert "any question" in described["codes"]


def test_the_openai_client_asks_judge_as_a_model(judged_server: ServerThread) -> None:
    with openai.OpenAI(base_url=f"{judged_server.url}/v1", api_key="none") as client:
        reply = client.decisions.create(
            model="judge",
            input=ASKED,
            questions=[choice("refuse", "answer", "search")],  # type: ignore[list-item]
        )
    (answer,) = reply.answers
    assert reply.model == "judge"
    assert answer.type == "choice"
    assert answer.choice == "answer"
    assert [entry.value for entry in answer.probabilities] == ["refuse", "answer", "search"]
    assert reply.usage.output_tokens == 1


def test_typesafes_client_asks_judge_as_a_model(judged_server: ServerThread) -> None:
    with TypeSafeClient(base_url=judged_server.url, api_key="none") as client:
        told = client.system_one(
            ASKED,
            {"next": Choice(criteria={"search": None, "answer": None, "refuse": None})},
            model="judge",
        )
        assert told.model == "judge"
        assert told.choices["next"].choice == "answer"
        rated = client.system_one(
            ASKED, {"how": Score(criteria=["low", "high"])}, model="reward"
        ).scores["how"]
        assert rated.legend == {0: "value"}
        with pytest.raises(TypeSafeBadRequestError, match="decides between"):
            client.system_one(ASKED, {"q": Noul(instructions="Is it?")}, model="judge")


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
def test_langchains_decisions_ask_judge_as_a_model(judged_server: ServerThread) -> None:
    asked: Any = {
        "base_url": f"{judged_server.url}/v1",
        "api_key": "none",
        "model": "judge",
        "max_retries": 0,
    }
    names = dict.fromkeys(("search", "answer", "refuse"), "as its name says")
    question = decisions.Choice(instructions="?", choices=names)
    told = decisions.OpenAIDecisions(**asked).invoke({"input": ASKED, "questions": {"q": question}})
    assert told.choices["q"].choice == "answer"


class Next(BaseModel):
    """What to do next."""

    step: Literal["search", "answer", "refuse"]


def test_pydantic_ai_asks_judge_as_a_model(judged_server: ServerThread) -> None:
    provider = SystemOneProvider(base_url=judged_server.url, api_key="none")
    agent = Agent(SystemOneModel("judge", provider=provider), output_type=Next)
    assert agent.run_sync(ASKED).output == Next(step="answer")


def test_answers_come_in_the_questions_order_and_the_branchs_thresholds_hold(
    judged: httpx.Client,
) -> None:
    """The branch refuses from 0.2, whatever the order in which its options are listed."""
    for values in (("answer", "search", "refuse"), ("refuse", "search", "answer")):
        body = {"model": "judge", "input": "hm", "questions": [choice(*values)]}
        (answer,) = judged.post("/v1/decisions", json=body).json()["answers"]
        assert answer["choice"] == "refuse"
        assert [e["value"] for e in answer["probabilities"]] == list(values)
        assert answer["mass"] == 1.0
    own = choice({"value": "search", "threshold": 0.01}, "answer", "refuse")
    (answer,) = ask(judged, own).json()["answers"]
    assert answer["choice"] == "search"  # the client's threshold, in the client's order


def test_answer_codes_answer_whatever_fits(judged: httpx.Client) -> None:
    asked = [
        {"type": "predicate", "instructions": "Is it so?"},
        choice("one", "two", "three"),
        choice("one", True),
    ]
    answers = ask(judged, *asked, model="codes").json()["answers"]
    assert [answer["type"] for answer in answers] == ["predicate", "choice", "choice"]
    reply = ask(judged, asked[0], choice("a", "b", "c", "d"), model="codes")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "questions[1]"
    assert "'D'" in reply.json()["error"]["message"]


def test_a_value_head_answers_a_score_with_its_number(judged: httpx.Client) -> None:
    body = {"model": "reward", "input": "value value value", "questions": [levels("bad", "good")]}
    (answer,) = judged.post("/v1/decisions", json=body).json()["answers"]
    assert answer["score"] == 6.0
    assert answer["confidence"] == 1.0
    reply = ask(judged, choice("bad", "good"), model="reward")
    assert reply.status_code == 400
    assert "a number" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "question",
    [
        choice("answer", "search"),
        choice("answer", "search", "refuse", "wait"),
        choice("answer", "search", "refused"),
        {"type": "predicate", "instructions": "Is it so?"},
        levels("answer", "search"),
    ],
)
def test_other_questions_than_its_own_are_refused(
    judged: httpx.Client, question: dict[str, Any]
) -> None:
    reply = ask(judged, question)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == ("questions[0]", "unsupported_question")
    assert "'answer', 'search', 'refuse'" in error["message"]


def test_a_decision_after_a_chat_computes_its_suffix_alone(judged: httpx.Client) -> None:
    """B05: the trunk's keys and values are reused up to the question."""
    chat = [{"role": "user", "content": "A long story about rivers. " * 12}]
    first = judged.post(
        "/v1/chat/completions", json={"model": "parrot", "messages": chat, "max_tokens": 2}
    ).json()
    body = {"model": "judge", "input": chat, "questions": [choice("answer", "search", "refuse")]}
    told = judged.post("/v1/decisions", json=body).json()
    details = told["usage"]["input_tokens_details"]
    # The assistant's turn is opened in the chat alone.
    header = smollm2_tokenizer().encode_inside("<|im_start|>assistant\n")
    assert details["cached_tokens"] == first["usage"]["prompt_tokens"] - len(header)
    assert details["cached_tokens"] + details["cache_write_tokens"] == told["usage"]["input_tokens"]
    again = judged.post(
        "/v1/chat/completions", json={"model": "parrot", "messages": chat, "max_tokens": 2}
    ).json()
    assert again["choices"] == first["choices"]


# --- heads ------------------------------------------------------------------------------------


def test_classify_gives_one_score_a_label(judged: httpx.Client) -> None:
    body = {"model": "judge", "input": [ASKED, "refuse refuse"]}
    reply = judged.post("/v1/classify", json=body).json()
    assert judged.post("/classify", json=body).json()["data"] == reply["data"]
    first, second = reply["data"]
    assert (first["label"], second["label"]) == ("answer", "refuse")
    assert first["labels"] == ["answer", "search", "refuse"]
    assert first["num_classes"] == len(first["scores"]) == len(first["probs"]) == 3
    assert first["scores"] == [4.0, 0.0, 0.0]
    assert sum(first["probs"]) == pytest.approx(1)
    chat = {"model": "judge", "messages": [{"role": "user", "content": ASKED}]}
    assert judged.post("/v1/classify", json=chat).json()["data"] == [first]
    value = judged.post("/v1/classify", json={"model": "reward", "input": "value"}).json()
    assert value["data"] == [{"index": 0, "num_classes": 1, "scores": [2.0]}]


@pytest.mark.parametrize("model", ["parrot", "codes"])
def test_a_model_without_a_head_is_not_asked_for_a_score(judged: httpx.Client, model: str) -> None:
    """B04: no hidden vector is ever taken for a score."""
    reply = judged.post("/v1/classify", json={"model": model, "input": ASKED})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_has_no_head")
    assert judged.post("/v1/classify", json={"model": "x", "input": ASKED}).status_code == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
        ({"messages": []}, "messages"),
        ({"input": "word " * 600}, "input"),
        ({"input": "a", "labels": ["x"]}, "labels"),
    ],
)
def test_bad_classify_bodies(judged: httpx.Client, body: dict[str, Any], param: str) -> None:
    reply = judged.post("/v1/classify", json={"model": "judge", **body})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/score", {"context": "hi", "options": ["a", "b"]}),
        ("/tokenize", {"prompt": "hi"}),
    ],
)
def test_a_branch_writes_and_embeds_nothing(
    judged: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    reply = judged.post(path, json={"model": "judge", **body})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_is_a_branch")


def test_chat_and_classify_at_once_leave_each_other_alone(judged: httpx.Client) -> None:
    """B01: one weight copy serves both, and no token moves."""
    asked = {
        "model": "parrot",
        "messages": [{"role": "user", "content": ASKED}],
        "stream": True,
    }

    def content() -> list[str]:
        lines = judged.post("/v1/chat/completions", json=asked).text.split("\n\n")
        deltas = [json.loads(line[6:]) for line in lines if line and "[DONE]" not in line]
        return [delta["choices"][0]["delta"].get("content", "") for delta in deltas]

    quiet = content()
    stop = threading.Event()
    answers: list[Any] = []

    def classify() -> None:
        with httpx.Client(base_url=judged.base_url, timeout=30) as http:
            while not stop.is_set():
                body = {"model": "judge", "input": [ASKED] * 8}
                answers.append(http.post("/v1/classify", json=body).json()["data"])

    thread = threading.Thread(target=classify)
    thread.start()
    try:
        busy = [content() for _ in range(5)]
    finally:
        stop.set()
        thread.join(30)
    assert all("".join(told) == "".join(quiet) for told in busy)
    assert answers
    assert all(told["scores"] == [4.0, 0.0, 0.0] for data in answers for told in data)


def test_an_engine_without_branches_says_so(http: httpx.Client) -> None:
    reply = ask(http, choice("a", "b"), model="judge")
    assert reply.status_code == 404
    gate = {"branch": "judge", "continue_if": ["answer"]}
    body = {"model": "parrot", "prompt": "x", "gate": gate}
    error = http.post("/v1/completions", json=body).json()["error"]
    assert (error["param"], error["code"]) == ("gate.branch", "branch_not_found")


def test_a_branch_cannot_have_the_models_name(tmp_path: Path) -> None:
    llm = fake_llm("judged", branches={"judged": make_branch(tmp_path, "judge")})
    with pytest.raises(ConfigError, match="'judged' is the name of the model"):
        create_app(llm)


# --- the guide --------------------------------------------------------------------------------


def at_hand(code: str, server: ServerThread) -> str:
    """The guide's code for the server at hand."""
    return code.replace("http://127.0.0.1:8000", server.url).replace('"smollm2"', '"parrot"')


def test_the_guides_clients(
    judged_server: ServerThread, capsys: pytest.CaptureFixture[str]
) -> None:
    served = blocks("branches.md", "python server")
    assert len(served) == 2
    for code in served:
        exec(at_hand(code, judged_server), {})
    assert "'source': 'labels'" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="a shell's quotes")
def test_the_guides_commands(judged_server: ServerThread) -> None:
    curls = [code for code in blocks("branches.md", "sh") if code.startswith("curl http")]
    assert len(curls) == 2
    for code in curls:
        command = shlex.split(at_hand(code, judged_server))
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        reply = json.loads(done.stdout)
        assert "decision" in reply or "label" in reply["data"][0]
