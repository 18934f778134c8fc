"""Branches that come and go while the server runs."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.branch_fake import make_branch
from tests.server.support import (
    BRANCH_BYTES,
    ServerThread,
    choice,
    fake_llm,
    wait_until,
)

ADMIN = {"Authorization": "Bearer boss"}


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
