"""Names of models: paths, packages, and hub ids against a hub served on this machine."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lockstep.types import ModelError
from lockstep.weights import PACKAGED_MODELS, open_checkpoint, sources
from tests.weights.writers import tiny_tensors, write_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Enough of the hub's HTTP interface for a snapshot of one model."""

    def __init__(self, folder: Path, name: str) -> None:
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.name = name
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        import json

        path = request.path.split("?")[0]
        self.asked.append(path)
        headers = {"X-Repo-Commit": COMMIT}
        if path.startswith(f"/api/models/{self.name}"):
            listing = {
                "id": self.name,
                "sha": COMMIT,
                "siblings": [{"rfilename": file} for file in self.files],
            }
            data, status = json.dumps(listing).encode(), 200
            if "/tree/" in path:
                entries = [
                    {"type": "file", "path": file, "size": len(content), "oid": "0" * 40}
                    for file, content in self.files.items()
                ]
                data = json.dumps(entries).encode()
            headers["Content-Type"] = "application/json"
        elif path.startswith(f"/{self.name}/resolve/") and path.split("/")[-1] in self.files:
            data, status = self.files[path.split("/")[-1]], 200
            headers["ETag"] = f'"{hashlib.sha1(data).hexdigest()}"'
        else:
            data, status = b'{"error": "Repository not found"}', 404
            headers["X-Error-Code"] = "RepoNotFound"
        request.send_response(status)
        for key, value in headers.items():
            request.send_header(key, value)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if body:
            request.wfile.write(data)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = write_folder(tmp_path_factory.mktemp("hub") / "m", tiny_tensors())
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "modeling_code.py").write_text("raise SystemExit")
    hub = Hub(folder, "someone/tiny-model")
    yield hub
    hub.server.shutdown()


def in_fresh_process(name: str, cache: Path, **environment: str) -> str:
    """What opening `name` says; in a process, as the hub's client reads its settings once."""
    code = (
        "import sys\n"
        "from lockstep.weights import open_checkpoint\n"
        "from lockstep.types import ModelError\n"
        "try:\n"
        "    checkpoint = open_checkpoint(sys.argv[1])\n"
        "    print('opened', len(checkpoint.tensor_names()), sorted(\n"
        "        path.name for path in checkpoint.path.iterdir()))\n"
        "except ModelError as error:\n"
        "    print('refused', error)\n"
    )
    plain = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    result = subprocess.run(
        [sys.executable, "-c", code, name],
        env={
            **plain,
            "HF_HOME": str(cache),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    return result.stdout


def test_a_hub_id_is_fetched_and_kept(hub: Hub, tmp_path: Path) -> None:
    said = in_fresh_process("someone/tiny-model", tmp_path, HF_ENDPOINT=hub.url)
    assert said.startswith(f"opened {len(tiny_tensors())} ")
    # Neither pickles nor code are fetched.
    assert "model.safetensors" in said
    assert "tokenizer.json" in said
    assert ".bin" not in said
    assert ".py" not in said
    # Once fetched, no network is needed.
    again = in_fresh_process(
        "someone/tiny-model", tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="1"
    )
    assert again == said


def test_a_model_that_the_hub_lacks(hub: Hub, tmp_path: Path) -> None:
    said = in_fresh_process("someone/other-model", tmp_path, HF_ENDPOINT=hub.url)
    assert said.startswith("refused someone/other-model: ")
    assert "hub" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("offline", ["0", "1"])
def test_no_network(tmp_path: Path, offline: str) -> None:
    said = in_fresh_process(
        "someone/tiny-model", tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE=offline
    )
    assert said.startswith(
        "refused someone/tiny-model: no such path, and the hub cannot be reached"
    )


@pytest.mark.parametrize("name", ["", "no-such-model", "/no/such/folder", "a/b/c", "a b/c"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(ModelError):
        open_checkpoint(name)


@pytest.mark.parametrize("name", ["x\0y", "a" * 5000, "~no-such-user/model", "d/" * 3000])
def test_names_that_no_path_can_have(name: str) -> None:
    with pytest.raises(ModelError, match="cannot be a path") as caught:
        open_checkpoint(name)
    assert len(str(caught.value)) < 300


def test_a_name_that_is_no_text() -> None:
    with pytest.raises(ModelError, match="non-empty string"):
        open_checkpoint(3)  # type: ignore[arg-type]


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(ModelError, match="neither a model folder nor a GGUF file"):
        open_checkpoint(str(path))
    with pytest.raises(ModelError, match=r"config\.json: missing"):
        open_checkpoint(str(tmp_path))


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for model in PACKAGED_MODELS:
        assert not model.installed()
        with pytest.raises(ModelError) as caught:
            open_checkpoint(model.name)
        assert model.install in str(caught.value)


class Package:
    """A package that carries a file in two parts."""

    def __init__(self, folder: Path) -> None:
        self.parts = [folder / "part0", folder / "part1"]
        self.parts[0].write_bytes(b"GG")
        self.parts[1].write_bytes(b"UF")
        self.calls = 0
        self.broken = False

    def assemble(self, output_path: Path) -> Path:
        self.calls += 1
        output_path.write_bytes(b"GG" if self.broken else b"GGUF")
        if self.broken:
            raise ValueError("sha256 did not match")
        return output_path


def test_parts_are_joined_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    package = Package(tmp_path)
    model = PACKAGED_MODELS[1]
    join = lambda: sources._assembled(model, "m.gguf", package.assemble, lambda: package.parts)  # noqa: E731
    package.broken = True
    with pytest.raises(ModelError, match=r"gemma3-270m.*sha256"):
        join()
    kept = tmp_path / "cache" / "lockstep"
    assert list(kept.iterdir()) == []  # nothing half-made is left
    package.broken = False
    assert join() == join() == kept / "m.gguf"
    assert package.calls == 2
    # A file of another size is not taken for the whole.
    (kept / "m.gguf").write_bytes(b"GG")
    assert join().read_bytes() == b"GGUF"
    package.parts[1].unlink()
    with pytest.raises(ModelError, match="gemma3-270m"):
        join()


def test_opening_imports_no_torch() -> None:
    code = (
        "import sys, lockstep.weights, lockstep.text\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "from lockstep.weights import open_checkpoint, PACKAGED_MODELS\n"
        "if PACKAGED_MODELS[0].installed():\n"
        "    checkpoint = open_checkpoint('smollm2')\n"
        "    checkpoint.tokenizer().encode('x'), checkpoint.weights_hash(), checkpoint.config\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[2]
    )


def test_a_misspelt_packaged_name_is_told() -> None:
    with pytest.raises(ModelError, match=r"did you mean smollm2\?"):
        sources.locate("SmolM2")
