"""What no request may do: reach files, the network, other processes, logs, headers."""

from __future__ import annotations

import ast
import io
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lockstep import logs, messages
from lockstep.config import ServerConfig
from tests.fuzz.bodies import HELLO, SCHEMA, TRAVERSALS
from tests.fuzz.target import JSON, MODEL, Sent, Target, post

URLS = ["http://remote.example/x", "https://169.254.169.254/latest", "file:///etc/passwd"]
SECRETS = ("sk-secret-user-1", "sk-secret-admin-2", "sk-secret-wrong-3", "sk-secret-query-4")


class Deeds:
    """What this process does while it is watched, by Python's own audit events."""

    def __init__(self) -> None:
        self.watched = False
        self.files: list[str] = []
        self.others: list[str] = []

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.watched:
            return
        if event in ("open", "os.listdir", "os.scandir", "sqlite3.connect"):
            if isinstance(arguments[0], str | bytes):
                name = arguments[0]
                self.files.append(name if isinstance(name, str) else name.decode(errors="replace"))
        elif event.partition(".")[0] in ("socket", "subprocess", "urllib", "ctypes", "pickle") or (
            event in ("exec", "compile", "import", "os.system", "os.exec", "os.posix_spawn")
        ):
            self.others.append(f"{event} {str(arguments)[:200]}")

    @contextmanager
    def watch(self) -> Iterator[None]:
        self.files.clear()
        self.others.clear()
        self.watched = True
        try:
            yield
        finally:
            self.watched = False


DEEDS = Deeds()
sys.addaudithook(DEEDS.hook)  # cannot be taken away again; it does nothing unless it watches


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def target(folder: Path) -> Iterator[Target]:
    made = Target(
        key=SECRETS[0],
        data_dir=str(folder),
        api_keys=SECRETS[:1],
        admin_keys=SECRETS[1:2],
        log_prompts=True,
        max_body_bytes=200_000,
    )
    yield made
    made.close()


def admin() -> tuple[tuple[bytes, bytes], ...]:
    return (JSON, (b"authorization", f"Bearer {SECRETS[1]}".encode()))


def gated(name: str) -> dict[str, Any]:
    return {"branch": name, "continue_if": [name]}


def hostile(names: list[str]) -> list[Sent]:
    """Requests with names of things that are elsewhere, wherever a request has a name."""
    found: list[Sent] = []
    for name in names:
        message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": name}}]}
        schema = {"type": "object", "properties": {"a": {"$ref": name}}}
        chat = {"model": MODEL, "messages": HELLO, "max_tokens": 2}
        part = {"type": "input_file", "file_url": name}
        bodies = [
            ("/v1/chat/completions", {**chat, "model": name}),
            ("/v1/chat/completions", {**chat, "messages": [message]}),
            ("/v1/chat/completions", {**chat, "chat_template_kwargs": {"x": name}}),
            ("/v1/chat/completions", {**chat, "guided_json": schema}),
            ("/v1/chat/completions", {**chat, "guided_json": {"$schema": name, **SCHEMA}}),
            ("/v1/chat/completions", {**chat, "guided_json": {"$id": name, **SCHEMA}}),
            ("/v1/chat/completions", {**chat, "guided_grammar": f"%import {name}\nstart: x"}),
            ("/v1/completions", {"model": MODEL, "prompt": name, "max_tokens": 2}),
            ("/v1/responses", {"model": MODEL, "input": name, "previous_response_id": name}),
            ("/v1/responses", {"model": MODEL, "input": [{"role": "user", "content": [part]}]}),
            ("/v1/decisions", {"model": MODEL, "input": [message], "questions": []}),
            ("/v1/systemone", {"state": {"url": name}, "questions": {"a": {"type": "noul"}}}),
            ("/v1/embeddings", {"model": MODEL, "input": name}),
            ("/v1/completions", {"model": MODEL, "prompt": "a", "gate": gated(name)}),
            ("/admin/branches", {"name": "x", "path": name}),
            ("/admin/branches", {"name": name, "path": "."}),
            (
                "/v1/batches",
                {"input_file_id": name, "endpoint": name, "completion_window": "24h"},
            ),
        ]
        found += [post(path, body, headers=admin()) for path, body in bodies]
        plain = "".join(c if c.isascii() and c > " " and c not in "?#" else "%20" for c in name)
        for path in (
            *("/v1/models/", "/v1/files/", "/v1/batches/", "/v1/responses/", "/page/"),
            *("/", "/v1/", "/admin/"),
        ):
            for end in ("", "/content", "/input_items"):
                found.append(Sent("GET", path + plain + end, headers=admin()))
        found.append(Sent("DELETE", "/v1/files/" + plain, headers=admin()))
        found.append(Sent("DELETE", "/admin/branches/" + plain, headers=admin()))
        found.append(Sent("DELETE", "/v1/responses/" + plain, headers=admin()))
    return found


def test_no_name_reaches_a_file_the_network_or_a_program(target: Target, folder: Path) -> None:
    requests = hostile([*TRAVERSALS, *URLS])
    target.send(requests)  # modules that are loaded on first use are
    with DEEDS.watch():
        answers = target.send(requests)
    assert DEEDS.others == []
    assert [name for name in DEEDS.files if not Path(name).is_relative_to(folder)] == []
    passwd = Path("/etc/passwd").read_text()[:20].encode()
    assert not any(passwd in answer.body for answer in answers)
    target.check_health()


def test_the_watch_would_have_seen_it() -> None:
    import pickle
    import socket

    with DEEDS.watch():
        Path("/etc/passwd").read_bytes()
        with socket.socket() as plug:
            plug.settimeout(0.1)
            assert plug.connect_ex(("127.0.0.1", 9)) != 0
        pickle.loads(b"cbuiltins\nlen\n.")
    assert "/etc/passwd" in DEEDS.files
    assert any(deed.startswith("socket.connect") for deed in DEEDS.others)
    assert any(deed.startswith("pickle.find_class") for deed in DEEDS.others)


def test_an_upload_stays_in_its_folder(target: Target, folder: Path) -> None:
    before = set(folder.parent.iterdir())
    kind = (b"content-type", b"multipart/form-data; boundary=b")
    for name in ("../../escaped", "/tmp/escaped", "..\\escaped", 'a"; filename="/x', "a\tb", "."):
        head = "Content-Disposition: form-data; name="
        form = (
            f'--b\r\n{head}"purpose"\r\n\r\nbatch\r\n'
            f'--b\r\n{head}"file"; filename="{name}"\r\n\r\n{{}}\r\n--b--\r\n'
        ).encode()
        (answer,) = target.send([Sent("POST", "/v1/files", (form,), (kind, admin()[1]))])
        assert answer.status == 200
        file = answer.json()
        assert not set(file["filename"]) & set("/\\\t")
        path = f"/v1/files/{file['id']}/content"
        (content,) = target.send([Sent("GET", path, headers=(admin()[1],))])
        assert content.body == b"{}"
        assert "escaped" not in content.header("content-disposition").partition("filename")[0]
    assert set(folder.parent.iterdir()) == before
    assert {path.name for path in folder.iterdir()} <= {
        *("files", "journals", "tmp", "lock"),
        *("index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm"),
    }


@pytest.mark.parametrize("style", ["console", "json"])
def test_no_key_is_written_down_and_no_line_is_forged(target: Target, style: logs.Format) -> None:
    """Right keys and wrong ones, in headers, queries and paths; ids and paths with line breaks."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logs.JsonFormatter() if style == "json" else logs.ConsoleFormatter())
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG)
    object.__setattr__(target.app.state.operations.config, "access_log", True)
    forged = "x%0a2026-01-01T00:00:00.000Z%20ERROR%20forged"
    requests = []
    for key in SECRETS:
        for header in (b"authorization", b"x-api-key"):
            value = f"Bearer {key}" if header == b"authorization" else key
            shown = (JSON, (header, value.encode()), (b"x-request-id", b"a\nforged=1"))
            requests += [
                post("/v1/completions", {"model": MODEL, "prompt": "a\nforged"}, headers=shown),
                post("/v1/completions", {"model": MODEL}, headers=shown),
                Sent("GET", f"/v1/models/{forged}?key={SECRETS[3]}", headers=shown),
                Sent("GET", f"/{forged}%1b[31m%e2%80%a8", headers=shown),
                Sent("GET", "/admin/requests", headers=shown),
                Sent("GET", "/metrics", headers=shown),
            ]
    try:
        answers = target.send(requests)
        target.check_health()
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        object.__setattr__(target.app.state.operations.config, "access_log", False)
    text = written.getvalue()
    everything = text + repr(target.app.state.operations.config) + repr(target.__dict__["app"])
    for answer in answers:
        everything += answer.body.decode() + repr(answer.headers)
    for key in SECRETS:
        assert key not in everything
    lines = [line for line in text.splitlines() if line]
    assert len(lines) >= len(requests)
    for line in lines:
        if style == "json":
            json.loads(line)
        else:
            assert line[:4].isdigit(), line
            assert line[:2] == "20", line
            assert " ERROR forged" not in line[:60], line
    assert "\x1b" not in text
    assert "\u2028" not in text


def test_what_a_client_sends_makes_no_header(target: Target) -> None:
    odd = b"a\r\nSet-Cookie: a=b"
    headers = (
        *admin(),
        *((name, odd) for name in (b"x-request-id", b"traceparent", b"origin", b"range", b"host")),
    )
    answers = target.send(
        [
            post("/v1/completions", {"model": odd.decode(), "prompt": "x"}, headers=headers),
            Sent("GET", "/v1/models/x%0d%0aSet-Cookie:%20a=b", headers=headers),
            Sent("GET", "/v1/files?after=%0d%0aSet-Cookie:%20a=b", headers=headers),
            Sent("OPTIONS", "/v1/models", headers=headers),
        ]
    )
    for answer in answers:  # `check` looks for line breaks in every header of every answer
        assert not answer.header("set-cookie")
        assert answer.header("x-request-id").startswith("req-")


# --- what the sources say -----------------------------------------------------------------------

_UNPICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
_DANGEROUS = {"recv_pyobj", "send_pyobj", "eval", "exec"}


def sources(repository: Path) -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted((repository / "lockstep").rglob("*.py")):
        yield path, ast.parse(path.read_text())


def test_nothing_here_unpickles_or_evaluates(repository: Path) -> None:
    for path, tree in sources(repository):
        for node in ast.walk(tree):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
                assert not names & _UNPICKLING, where
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in _UNPICKLING, where
            elif isinstance(node, ast.Attribute):
                assert node.attr not in ("recv_pyobj", "send_pyobj"), where
                loads = node.attr == "load" and getattr(node.value, "id", "") in ("torch", "np")
                assert not loads, where
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in _DANGEROUS, where


def test_every_message_between_processes_has_a_type(repository: Path) -> None:
    """A decoder without one would make whatever the bytes say."""
    decoders = [getattr(messages, name) for name in vars(messages) if name.startswith("decode")]
    assert len(decoders) >= 3
    for decode in decoders:
        for payload in (b"", b"\xc1", b"\xc7\x01\x01x", b"\x80", b"\x93\x01\x02\x03", b"\xff" * 40):
            with pytest.raises(msgspec.DecodeError):
                decode(payload)
        kinds = decode.__self__.type
        for kind in getattr(kinds, "__args__", (kinds,)):
            assert issubclass(kind, msgspec.Struct)
            assert not [f for f in msgspec.structs.fields(kind) if f.type is Any], kind
    for path, tree in sources(repository):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("msgpack.Decoder"):
                assert node.args, f"{path}:{node.lineno}"


def test_keys_are_compared_by_nothing_else(repository: Path) -> None:
    """`hmac.compare_digest` alone touches a digest; test_auth.py counts its calls."""
    tree = ast.parse((repository / "lockstep/server/auth.py").read_text())
    compared = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and "sha256" in ast.unparse(node)
    ]
    assert compared == []


def test_secrets_are_in_no_repr() -> None:
    config = ServerConfig(api_keys=("sk-a",), admin_keys=("sk-b",))
    assert "sk-" not in repr(config)
