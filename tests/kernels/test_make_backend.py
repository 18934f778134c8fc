"""Choosing a backend: what is named must be there, and no choice is silent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch

from lockstep.config import ConfigError, ModelOptions
from lockstep.kernels import cpu, make_backend, tree
from lockstep.kernels.cpu import build, torch_form
from tests.kernels.support import randn

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")


def test_names_resolve() -> None:
    assert make_backend(ModelOptions(device="cpu")).name == "native"
    assert make_backend(ModelOptions(device="cpu", backend="torch", threads=1)).name == "torch"
    assert make_backend(ModelOptions(device="auto", backend="native")).kind == "cpu"
    description = make_backend(ModelOptions(device="cpu", backend="native")).describe()
    assert {"backend", "isa", "compiler", "sources"} <= description.keys()


@without_cuda
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_n01_an_absent_device_is_an_error(device: str) -> None:
    with pytest.raises(ConfigError, match=r"not present.*device='cpu'"):
        make_backend(ModelOptions(device=device))


@without_cuda
def test_n01_triton_without_a_gpu_is_an_error() -> None:
    with pytest.raises(ConfigError, match="not present"):
        make_backend(ModelOptions(backend="triton"))


@pytest.mark.parametrize(
    ("device", "backend", "message"),
    [
        ("cpu", "triton", "runs on CUDA only"),
        ("cuda", "native", "runs on a CPU only"),
        ("meta", "auto", "not supported"),
        ("abacus", "auto", "not a device"),
    ],
)
def test_combinations_that_cannot_be(device: str, backend: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_backend(ModelOptions(device=device, backend=backend))


def test_without_a_compiler_native_refuses_and_auto_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler.*backend='torch'"):
        cpu.make_backend("native", 1)
    chosen = cpu.make_backend("auto", 1)
    assert chosen.name == "torch"
    assert "no C++ compiler" in chosen.describe()["chosen"]


def test_a_failing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit\n'
        "echo internal trouble >&2; exit 1\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("LOCKSTEP_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="internal trouble"):
        cpu.make_backend("auto", 1)
    assert list((tmp_path / "cache").iterdir()) == []  # nothing half-made stays


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    (tmp_path / "one.cpp").write_text(
        '#include "x.h"\n#pragma GCC visibility push(default)\n'
        'extern "C" int one() { return X; }\n#pragma GCC visibility pop\n'
    )
    (tmp_path / "two.cpp").write_text("#include <vector>\nstd::vector<int> two(3);\n")
    (tmp_path / "x.h").write_text("#define X 1\n")
    program = (
        "import ctypes, os, sys; from pathlib import Path\n"
        "os.environ['LOCKSTEP_CACHE_DIR'] = sys.argv[1] + '/cache'\n"
        "from lockstep.kernels.cpu.build import build_library\n"
        "print(ctypes.CDLL(str(build_library(Path(sys.argv[1])).path)).one())\n"
    )

    def build_twice() -> list[str]:
        command = [sys.executable, "-c", program, str(tmp_path)]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        return [process.communicate(timeout=100)[0].strip() for process in processes]

    assert build_twice() == ["1", "1"]
    assert len(list((tmp_path / "cache").iterdir())) == 1  # one library, no leftovers
    (tmp_path / "x.h").write_text("#define X 2\n")
    assert build_twice() == ["2", "2"]  # a changed header is a new library


def test_cache_folder_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOCKSTEP_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="LOCKSTEP_CACHE_DIR"):
        build.build_library()


def test_the_torch_form_refuses_a_tile_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = torch.mm

    def drifting(a: torch.Tensor, b: torch.Tensor, **options: object) -> torch.Tensor:
        out = genuine(a, b)
        out[5] += 1e-6 * out[5].abs()
        return out

    monkeypatch.setattr(torch_form.torch, "mm", drifting)
    ops = torch_form.TorchBackend(1)
    with pytest.raises(ConfigError, match="differently by its place"):
        ops.pack(randn(8, 16))
    with pytest.raises(ConfigError, match="differently by its place"):
        ops.kv_layer(
            torch.zeros(1024), page_stride=1024, offset=0, kv_heads=1, head_dim=16, page_tokens=16
        )


@pytest.mark.parametrize("name", ["native", "torch"])
@pytest.mark.parametrize(
    ("table", "value"), [("BLOCK", {"cpu": {64: 32, 128: 64}}), ("NORM_BLOCK", {"cpu": 32})]
)
def test_a_tree_that_the_forms_were_not_written_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: Literal["native", "torch"], table: str, value: object
) -> None:
    monkeypatch.setattr(tree, table, value)
    with pytest.raises(ConfigError, match=r"kernels/tree\.py asks for"):
        cpu.make_backend(name, 1)


def test_a_pool_outlives_a_fork() -> None:
    """At whatever moment: a worker that falls asleep just then holds a lock."""
    program = (
        "import os, signal, time, torch\n"
        "from lockstep.kernels.cpu import make_backend\n"
        "ops = make_backend('native', 2)\n"
        "w = ops.pack(torch.randn(512, 64)); x = torch.randn(30, 64)\n"
        "before = ops.linear(x, w)\n"
        "for count in range(100):\n"
        "    assert torch.equal(ops.linear(x, w), before)\n"
        "    until = time.perf_counter() + count * 1e-6\n"
        "    while time.perf_counter() < until: pass\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        signal.alarm(30)\n"
        "        os._exit(0 if torch.equal(ops.linear(x, w), before) else 1)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_more_threads_than_the_system_grants_are_an_error() -> None:
    program = (
        "import resource\n"
        "from lockstep.config import ConfigError\n"
        "from lockstep.kernels.cpu import make_backend\n"
        "make_backend('native', 1)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**30,) * 2)\n"
        "try:\n"
        "    make_backend('native', 1000)\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
        "make_backend('native', 2)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True
    )
    assert run.stdout.startswith("threads: the system does not grant 1000; ask for fewer")
