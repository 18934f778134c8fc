"""Branches over HTTP: models that decide, heads that classify, loading while serving."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
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
from tests.server.support import BRANCH_BYTES, ServerThread, fake_llm, smollm2_tokenizer, wait_until

TEXT = "I can answer answer this from the documents"
ADMIN = {"Authorization": "Bearer boss"}


def ask(http: httpx.Client, *questions: Any, model: str = "judge") -> httpx.Response:
    body = {"model": model, "input": TEXT, "questions": list(questions)}
    return http.post("/v1/decisions", json=body)


def choice(*values: Any, **more: Any) -> dict[str, Any]:
    options = [value if isinstance(value, dict) else {"value": value} for value in values]
    return {"type": "choice", "instructions": "?", "choices": options, **more}


def levels(*labels: str) -> dict[str, Any]:
    return {"type": "score", "instructions": "?", "levels": [{"label": one} for one in labels]}


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
            input=TEXT,
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
            TEXT,
            {"next": Choice(criteria={"search": None, "answer": None, "refuse": None})},
            model="judge",
        )
        assert told.model == "judge"
        assert told.choices["next"].choice == "answer"
        rated = client.system_one(
            TEXT, {"how": Score(criteria=["low", "high"])}, model="reward"
        ).scores["how"]
        assert rated.legend == {0: "value"}
        with pytest.raises(TypeSafeBadRequestError, match="decides between"):
            client.system_one(TEXT, {"q": Noul(instructions="Is it?")}, model="judge")


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
    told = decisions.OpenAIDecisions(**asked).invoke({"input": TEXT, "questions": {"q": question}})
    assert told.choices["q"].choice == "answer"


class Next(BaseModel):
    """What to do next."""

    step: Literal["search", "answer", "refuse"]


def test_pydantic_ai_asks_judge_as_a_model(judged_server: ServerThread) -> None:
    provider = SystemOneProvider(base_url=judged_server.url, api_key="none")
    agent = Agent(SystemOneModel("judge", provider=provider), output_type=Next)
    assert agent.run_sync(TEXT).output == Next(step="answer")


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
    body = {"model": "judge", "input": [TEXT, "refuse refuse"]}
    reply = judged.post("/v1/classify", json=body).json()
    assert judged.post("/classify", json=body).json()["data"] == reply["data"]
    first, second = reply["data"]
    assert (first["label"], second["label"]) == ("answer", "refuse")
    assert first["labels"] == ["answer", "search", "refuse"]
    assert first["num_classes"] == len(first["scores"]) == len(first["probs"]) == 3
    assert first["scores"] == [4.0, 0.0, 0.0]
    assert sum(first["probs"]) == pytest.approx(1)
    chat = {"model": "judge", "messages": [{"role": "user", "content": TEXT}]}
    assert judged.post("/v1/classify", json=chat).json()["data"] == [first]
    value = judged.post("/v1/classify", json={"model": "reward", "input": "value"}).json()
    assert value["data"] == [{"index": 0, "num_classes": 1, "scores": [2.0]}]


@pytest.mark.parametrize("model", ["parrot", "codes"])
def test_a_model_without_a_head_is_not_asked_for_a_score(judged: httpx.Client, model: str) -> None:
    """B04: no hidden vector is ever taken for a score."""
    reply = judged.post("/v1/classify", json={"model": model, "input": TEXT})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_has_no_head")
    assert judged.post("/v1/classify", json={"model": "x", "input": TEXT}).status_code == 404


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
    asked = {"model": "parrot", "messages": [{"role": "user", "content": TEXT}], "stream": True}

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
                body = {"model": "judge", "input": [TEXT] * 8}
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


# --- loading while serving --------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def admin_server(root: Path) -> Iterator[ServerThread]:
    make = partial(fake_llm, "judged-speaks", branches={"judge": make_branch(root, "judge")})
    with ServerThread(make, admin_keys=("boss",), api_keys=("user",)) as server:
        yield server


@pytest.fixture
def admin(admin_server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=admin_server.url, headers=ADMIN, timeout=30) as http:
        yield http


def test_branches_come_and_go(admin: httpx.Client, root: Path) -> None:
    folder = make_branch(root, "tone", options=("calm", "angry"))
    listed = admin.get("/admin/branches").json()["data"]
    assert [card["name"] for card in listed] == ["judge"]
    loaded = admin.post("/admin/branches", json={"name": "tone", "path": folder})
    assert loaded.status_code == 200
    card = loaded.json()
    assert (card["name"], card["options"], card["head"]) == ("tone", ["calm", "angry"], "options")
    assert admin.get("/admin/branches").json()["data"][1] == card
    assert card["weight_bytes"] == BRANCH_BYTES
    assert admin.get("/stats").json()["branch_bytes"] == dict.fromkeys(("judge", "tone"), 3 << 20)
    assert 'weight_bytes{branch="tone",model_name="judged-speaks"} 3.145728e+06' in (
        admin.get("/metrics").text
    )
    body = {"model": "tone", "input": "angry", "questions": [choice("calm", "angry")]}
    (answer,) = admin.post("/v1/decisions", json=body).json()["answers"]
    assert answer["choice"] == "angry"
    assert admin.delete("/admin/branches/tone").json() == {"name": "tone", "unloaded": True}
    assert admin.post("/v1/decisions", json=body).status_code == 404
    gone = admin.delete("/admin/branches/tone")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "branch_not_found")


def test_a_name_is_given_to_another_branch(admin: httpx.Client, root: Path) -> None:
    for options in (("a", "b"), ("c", "d", "e")):
        folder = make_branch(root, f"swap{len(options)}", options=options)
        body = {"name": "swap", "path": folder}
        assert admin.post("/admin/branches", json=body).json()["options"] == list(options)
        asked = {"model": "swap", "input": "x", "questions": [choice(*options)]}
        assert admin.post("/v1/decisions", json=asked).status_code == 200
    assert admin.delete("/admin/branches/swap").status_code == 200


def test_branches_change_under_load(admin_server: ServerThread, root: Path) -> None:
    """Whoever is answered is answered by one of the branches that there were; nobody waits, and
    what is written beside it is what it was."""
    sets = (("calm", "angry"), ("angry", "glad", "calm"))
    folders = [make_branch(root, f"under-load-{len(own)}", options=own) for own in sets]
    stop, failures = threading.Event(), list[str]()
    seen: set[int] = set()

    def check(reply: httpx.Response, path: str) -> None:
        told = reply.json()
        if reply.status_code in (404, 409) or told.get("error", {}).get("param") == "gate.branch":
            codes = ("branch_not_found", "model_not_found", "branch_replaced")
            assert told["error"]["code"] in codes, told
            return
        assert reply.status_code == 200, told
        if path == "classify":
            (entry,) = told["data"]
            assert tuple(entry["labels"]) in sets
            seen.add(len(entry["labels"]))
            return
        assert tuple(told["decision"]["probabilities"]) in sets
        assert told["decision"]["option"] == "calm"
        assert told["choices"][0]["message"]["content"] == "calm calm angry"

    def ask(path: str, body: dict[str, Any]) -> None:
        user = {"Authorization": "Bearer user"}
        with httpx.Client(base_url=admin_server.url, headers=user, timeout=30) as http:
            while not stop.is_set():
                try:
                    check(http.post(f"/v1/{path}", json=body), path)
                except AssertionError as error:
                    failures.append(str(error))
                    return

    gate = {"branch": "mood", "continue_if": ["calm"]}
    said = [{"role": "user", "content": "calm calm angry"}]
    chat = {"model": "judged-speaks", "messages": said, "gate": gate}
    works = (
        ("classify", {"model": "mood", "input": "calm calm angry"}),
        ("chat/completions", chat),
    )
    threads = [threading.Thread(target=ask, args=work) for work in works * 2]
    for thread in threads:
        thread.start()
    with httpx.Client(base_url=admin_server.url, headers=ADMIN, timeout=30) as admin:
        try:
            for turn in range(12):
                body = {"name": "mood", "path": folders[turn % 2]}
                loaded = admin.post("/admin/branches", json=body)
                assert loaded.status_code == 200, loaded.text
                if turn % 3 == 2:
                    assert admin.delete("/admin/branches/mood").status_code == 200
                time.sleep(0.05)
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
        assert not failures, failures[0]
        assert seen == {2, 3}
        wait_until(lambda: admin.get("/admin/requests").json()["data"] == [])
        asked = {"model": "mood", "input": "x", "questions": [choice("calm", "angry")]}
        assert admin.post("/v1/decisions", json=asked).status_code == 404


def test_only_an_admin_key_loads(admin_server: ServerThread, root: Path) -> None:
    body = {"name": "mine", "path": str(root / "judge")}
    with httpx.Client(base_url=admin_server.url) as http:
        assert http.post("/admin/branches", json=body).status_code == 401
        user = {"Authorization": "Bearer user"}
        assert http.post("/admin/branches", json=body, headers=user).status_code == 403
        assert http.get("/admin/branches", headers=user).status_code == 403
        assert http.delete("/admin/branches/judge", headers=user).status_code == 403


def test_admin_is_off_without_a_key(judged: httpx.Client) -> None:
    reply = judged.post("/admin/branches", json={"name": "x", "path": "judge"})
    assert reply.json()["error"]["code"] == "admin_disabled"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "name"),
        ({"name": "x"}, "path"),
        ({"name": "x", "path": ""}, "path"),
        ({"name": "x", "path": 7}, "path"),
        ({"name": "x", "path": "a" * 5000}, "path"),
        ({"name": "x", "path": "{root}/" + "a" * 300}, "path"),
        ({"name": "x", "path": "/etc"}, "path"),
        ({"name": "x", "path": "/"}, "path"),
        ({"name": "x", "path": "{root}/judge/../../.."}, "path"),
        ({"name": "x", "path": "{root}"}, "path"),
        ({"name": "x", "path": "{root}/out"}, "path"),
        ({"name": "x", "path": "{root}/nowhere"}, "path"),
        ({"name": "x", "path": "{root}/judge/branch.json"}, "path"),
        ({"name": "x", "path": "{root}/nul\x00"}, "path"),
        ({"name": "x", "path": "{root}/\ud800"}, "path"),
        ({"name": "x", "path": "{root}/loop"}, "path"),
        ({"name": "x", "path": "{root}/empty"}, "path"),
        ({"name": "x", "path": "{root}/text"}, "path"),
        ({"name": "x", "path": "{root}/deep"}, "path"),
        ({"name": "x", "path": "{root}/large"}, "path"),
        ({"name": "x", "path": "{root}/pipe"}, "path"),
        ({"name": "x", "path": "{root}/numbers"}, "path"),
        ({"name": "x", "path": "{root}/elsewhere"}, "path"),
        ({"name": "", "path": "{root}/judge"}, "name"),
        ({"name": "../x", "path": "{root}/judge"}, "name"),
        ({"name": "a b", "path": "{root}/judge"}, "name"),
        ({"name": "x" * 65, "path": "{root}/judge"}, "name"),
        ({"name": "labels", "path": "{root}/judge"}, "name"),
        ({"name": "judged-speaks", "path": "{root}/judge"}, "name"),
        ({"name": "x", "path": "{root}/judge", "force": True}, "force"),
    ],
)
def test_a_hostile_admin_body_is_a_400(
    admin: httpx.Client, root: Path, body: dict[str, Any], param: str
) -> None:
    _traps(root)
    sent = {k: v.replace("{root}", str(root)) if k == "path" and isinstance(v, str) else v
            for k, v in body.items()}  # fmt: skip
    reply = admin.post(
        "/admin/branches",
        content=json.dumps(sent),
        headers={"Content-Type": "application/json"},
    )
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param, error
    assert "secret" not in error["message"]
    assert [card["name"] for card in admin.get("/admin/branches").json()["data"]] == ["judge"]


def _traps(root: Path) -> None:
    """Folders that nobody should load from."""
    if (root / "empty").exists():
        return
    outside = root.parent / f"{root.name}-outside"
    make_branch(root.parent, outside.name)
    (root / "out").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    for name in ("empty", "text", "deep", "large", "pipe", "numbers"):
        (root / name).mkdir()
    (root / "text/branch.json").write_text("the secret of this file")
    (root / "deep/branch.json").write_text("[" * 200_000)
    (root / "large/branch.json").write_text(" " * 2_000_000)
    os.mkfifo(root / "pipe/branch.json")
    make_branch(root, "numbers")
    os.mkfifo(f"{make_branch(root, 'tensors')}/branch.safetensors")
    make_branch(root, ".")
    found = json.loads((root / "numbers/branch.json").read_text())
    found["scale"] = 10**400
    (root / "numbers/branch.json").write_text(json.dumps(found))
    make_branch(root, "elsewhere", base="other-weights")


def test_a_root_of_ones_own(tmp_path: Path) -> None:
    folder = make_branch(tmp_path, "judge")
    with (
        ServerThread(
            partial(fake_llm, "judged"), admin_keys=("boss",), branch_root=str(tmp_path)
        ) as server,
        httpx.Client(base_url=server.url, headers=ADMIN) as http,
    ):
        reply = http.post("/admin/branches", json={"name": "judge", "path": folder})
        assert reply.status_code == 200
        reply = http.post("/admin/branches", json={"name": "judge", "path": "lockstep"})
        assert reply.json()["error"]["code"] == "path_not_allowed"
        assert "--branch-root" in reply.json()["error"]["message"]


def test_an_engine_that_died_comes_back_with_its_branches(tmp_path: Path) -> None:
    make = partial(fake_llm, "judged-kills", branches={"judge": make_branch(tmp_path, "judge")})
    with (
        ServerThread(make, admin_keys=("boss",), branch_root=str(tmp_path)) as server,
        httpx.Client(base_url=server.url, headers=ADMIN, timeout=30) as http,
    ):
        tone = {"name": "tone", "path": make_branch(tmp_path, "tone", options=("x", "y"))}
        assert http.post("/admin/branches", json=tone).status_code == 200
        died = http.post("/v1/completions", json={"model": "judged-kills", "prompt": [14]})
        assert died.status_code == 503
        wait_until(lambda: http.get("/ready").status_code == 200)
        body = {"model": "tone", "input": "y", "questions": [choice("x", "y")]}
        assert http.post("/v1/decisions", json=body).json()["answers"][0]["choice"] == "y"


def test_a_request_made_for_a_branch_that_was_just_replaced_is_a_409(tmp_path: Path) -> None:
    """The server knows of another branch in a name's place a moment after the engine does."""
    make = partial(fake_llm, "judged", branches={"judge": make_branch(tmp_path, "judge")})
    with ServerThread(make) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        known = server.llm.client.branches
        known["judge"] = replace(known["judge"], tensors="those of the one before")
        gate = {"branch": "judge", "continue_if": ["answer"]}
        for path, body in (
            (
                "decisions",
                {
                    "model": "judge",
                    "input": "x",
                    "questions": [choice("answer", "search", "refuse")],
                },
            ),
            ("classify", {"model": "judge", "input": ["x"]}),
            ("completions", {"model": "judged", "prompt": "x", "gate": gate}),
        ):
            reply = http.post(f"/v1/{path}", json=body)
            assert reply.status_code == 409, reply.text
            error = reply.json()["error"]
            assert error["code"] == "branch_replaced"
            assert error["param"] == ("gate.branch" if "gate" in body else "model")
            known["gone"] = known["judge"]  # and one that the engine has unloaded
            if "gate" in body:
                body["gate"] = {**gate, "branch": "gone"}
            else:
                body["model"] = "gone"
            reply = http.post(f"/v1/{path}", json=body)
            error = reply.json()["error"]
            if "gate" in body:
                assert (reply.status_code, error["param"]) == (400, "gate.branch")
                assert error["code"] == "branch_not_found"
            else:
                assert (reply.status_code, error["param"]) == (404, "model")
                assert error["code"] == "model_not_found"


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
