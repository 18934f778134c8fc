"""API keys: making, keeping, showing, refusing; which routes ask for one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import ConfigError
from lockstep.server import auth
from lockstep.server.auth import Keyring, fingerprint, new_key, read_keys, shown_secret
from tests.server.support import ServerThread, fake_llm

ASK = {"model": "parrot", "prompt": "hello", "max_tokens": 2}


def test_a_new_key_is_printed_once_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    first = new_key(path, "alice", tokens_per_minute=0)
    second = new_key(path, "root", admin=True, requests_per_minute=7)
    assert first != second
    assert len(first) > 40
    text = path.read_text()
    assert first not in text
    assert second not in text
    assert path.stat().st_mode & 0o777 == 0o600
    alice, root = read_keys(path)
    assert (alice.name, alice.admin, alice.tokens_per_minute) == ("alice", False, 0)
    assert alice.requests_per_minute is None
    assert (root.name, root.admin, root.requests_per_minute) == ("root", True, 7)
    assert alice.sha256 == fingerprint(first)
    for name in ("alice", "", "a b", "x" * 65, 'a"\nadmin = true'):
        with pytest.raises(ConfigError, match="name"):
            new_key(path, name)
    assert len(read_keys(path)) == 2


@pytest.mark.parametrize(
    "text",
    [
        "key = 3",
        "key = [1]",
        "key = " + "[" * 5000,
        "other = 1",
        "[[key]",
        '[[key]]\nname = "a"',
        '[[key]]\nname = "a"\nsha256 = "abc"',
        f'[[key]]\nname = "a"\nsha256 = "{"0" * 64}"\nadmin = 1',
        f'[[key]]\nname = "a"\nsha256 = "{"0" * 64}"\ntokens_per_minute = -1',
        f'[[key]]\nname = "a"\nsha256 = "{"0" * 64}"\nexpires = "never"',
        f'[[key]]\nname = "a"\nsha256 = "{"0" * 64}"\n' * 2,
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        Keyring(path)
    with pytest.raises(ConfigError, match="none"):
        Keyring(tmp_path / "none.toml")


def test_every_comparison_is_made_and_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever key matches, as many comparisons run; with `==` this would not be seen."""
    seen: list[str] = []

    def compare(one: str, other: str) -> bool:
        seen.append(one)
        return one == other

    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    ring = Keyring(None, ["one", "two", "three"])
    for secret, name in (("one", "env-1"), ("three", "env-3"), ("four", None)):
        seen.clear()
        found = ring.find(secret)
        assert (found.name if found else None) == name
        assert len(seen) == 3


def test_the_file_is_read_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "RELOAD_SECONDS", 0.0)
    path = tmp_path / "keys.toml"
    first = new_key(path, "first")
    ring = Keyring(path)
    second = new_key(path, "second")
    assert ring.find(first)
    assert ring.find(second)
    for garbage in (b"broken", b"key = [1]", b"\xff\xfe", b"[" * 5000):
        path.write_bytes(garbage)
        assert ring.find(first), "a file that cannot be read changes nothing"
    path.unlink()
    assert ring.find(first)
    path.write_text("")
    assert ring.find(first) is None
    assert ring.needed, "a file without keys opens nothing"


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_no_header_is_a_surprise(authorization: bytes, other: bytes) -> None:
    secret = shown_secret({b"authorization": authorization, b"x-api-key": other})
    assert secret is None or secret.strip()
    if secret is not None:
        assert Keyring(None, ["right"]).find(secret) is None


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerThread, str]]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    secret = new_key(path, "alice")
    with ServerThread(
        fake_llm, keys_file=str(path), api_keys=("plain",), admin_keys=("boss",)
    ) as server:
        yield server, secret


def ask(server: ServerThread, **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"{server.url}/v1/completions", json=ASK, headers=names)


def test_a_request_shows_its_key_or_gets_401(guarded: tuple[ServerThread, str]) -> None:
    server, secret = guarded
    for key in (secret, "plain", "boss"):
        assert ask(server, authorization=f"Bearer {key}").status_code == 200
        assert ask(server, authorization=f"bearer   {key}").status_code == 200
        assert ask(server, x_api_key=key).status_code == 200
    missing = [ask(server), ask(server, authorization="Basic eDp5"), ask(server, x_api_key="")]
    wrong = [
        ask(server, authorization="Bearer wrong"),
        ask(server, authorization=f"Bearer {secret}x"),
        ask(server, x_api_key=fingerprint(secret)),
    ]
    for replies, code in ((missing, "missing_api_key"), (wrong, "invalid_api_key")):
        for reply in replies:
            assert reply.status_code == 401
            assert reply.headers["www-authenticate"] == "Bearer"
            error = reply.json()["error"]
            assert (error["code"], error["type"]) == (code, "authentication_error")
            assert error["param"] is None


def test_the_openai_client_knows_the_error(guarded: tuple[ServerThread, str]) -> None:
    server, secret = guarded
    for key in (secret, "nothing"):
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
            if key == secret:
                assert client.models.list().data[0].id == "parrot"
                continue
            with pytest.raises(openai.AuthenticationError) as caught:
                client.models.list()
            assert caught.value.code == "invalid_api_key"


def test_which_routes_are_open(guarded: tuple[ServerThread, str]) -> None:
    server, _ = guarded
    for path in ("/health", "/ready", "/", "/page/main.js"):
        assert httpx.get(server.url + path).status_code == 200, path
        headers = {"authorization": "Bearer wrong"}
        assert httpx.get(server.url + path, headers=headers).status_code == 200, path
    closed = ("/metrics", "/stats", "/v1/models", "/openapi.json", "/admin/requests")
    for path in (*closed, "/nothing", "//health", "/health/", "/%2e/health", "/page", "/admin"):
        reply = httpx.get(server.url + path)
        assert reply.status_code == 401, path
    with ServerThread(fake_llm, api_keys=("k",), open_metrics=True) as other:
        assert httpx.get(f"{other.url}/metrics").status_code == 200
        assert httpx.get(f"{other.url}/stats").status_code == 401


def test_admin_routes_need_an_admin_key_or_are_off(guarded: tuple[ServerThread, str]) -> None:
    server, secret = guarded
    for path in ("/admin/requests", "/admin/cache", "/admin/nothing"):
        reply = httpx.get(server.url + path, headers={"authorization": f"Bearer {secret}"})
        assert reply.status_code == 403
        assert reply.json()["error"]["code"] == "admin_key_required"
    boss = {"authorization": "Bearer boss"}
    assert httpx.get(f"{server.url}/admin/requests", headers=boss).status_code == 200
    with ServerThread(fake_llm) as unguarded:
        for headers in ({}, boss):
            reply = httpx.post(f"{unguarded.url}/admin/drain", headers=headers)
            assert reply.status_code == 403
            assert reply.json()["error"]["code"] == "admin_disabled"
        assert httpx.get(f"{unguarded.url}/ready").status_code == 200


def test_a_stored_response_is_its_keys_own(guarded: tuple[ServerThread, str]) -> None:
    server, secret = guarded
    mine, other = (
        httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"})
        for key in (secret, "plain")
    )
    body = {"model": "parrot", "input": "one two"}
    path = f"/v1/responses/{mine.post('/v1/responses', json=body).json()['id']}"
    goes_on = {**body, "previous_response_id": path.rpartition("/")[2]}
    for reply in (
        other.get(path),
        other.get(f"{path}/input_items"),
        other.delete(path),
        other.post("/v1/responses", json=goes_on),
    ):
        assert reply.status_code == 404, reply.text
    assert mine.get(path).status_code == 200
    assert mine.post("/v1/responses", json=goes_on).status_code == 200


def test_keys_do_not_reach_the_engine_process(tmp_path: Path) -> None:
    """The command takes them out of the environment before it starts a child."""
    from lockstep.cli.serve import _keys

    os.environ["LOCKSTEP_API_KEYS"] = " one, ,two "
    assert _keys("LOCKSTEP_API_KEYS") == ("one", "two")
    assert "LOCKSTEP_API_KEYS" not in os.environ


@pytest.mark.parametrize("isolate", [False, True])
def test_keys_share_cached_prefixes_unless_they_are_kept_apart(isolate: bool) -> None:
    body = {"model": "parrot", "prompt": "the same long beginning " * 20, "max_tokens": 1}

    def cached(server: ServerThread, key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).json()
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    with ServerThread(fake_llm, api_keys=("one", "two"), isolate_keys=isolate) as server:
        assert cached(server, "one") == 0
        assert cached(server, "one") > 0
        assert (cached(server, "two") > 0) is not isolate
        assert cached(server, "two") > 0
