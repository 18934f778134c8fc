"""Compile the C++ sources on first use and keep the library in a cache folder.

The file's name carries a hash over sources, compiler and CPU, so nothing stale is
ever loaded; it is written under a temporary name and renamed, so two processes
may build at once.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lockstep.config import ConfigError, cache_folder

_HERE = Path(__file__).parent
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-fast-math",
    "-ffp-contract=off",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-w",
)
# Chooses the instruction set of the target; the first that the compiler takes is used.
_TARGETS = ("-march=native", "-mcpu=native", "")


class NoCompilerError(ConfigError):
    """No C++ compiler was found: the native form cannot be built."""


@dataclass(frozen=True, slots=True)
class Library:
    """A compiled library.

    Attributes:
        path: the shared object. `compiler`: first line of the compiler's --version.
        sources: 12 hex digits over the sources.
    """

    path: Path
    compiler: str
    sources: str


def find_compiler() -> list[str] | None:
    """The C++ compiler's command: CXX if set, else g++, clang++ or c++; None if absent."""
    named = os.environ.get("CXX")
    candidates = [shlex.split(named)] if named else [["g++"], ["clang++"], ["c++"]]
    for command in candidates:
        if command and shutil.which(command[0]):
            return command
    return None


def _cpu_identity() -> str:
    """Machine, model and instruction set flags: a home folder may be shared by machines."""
    lines = [platform.machine(), platform.system()]
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features", "model name", "CPU part")):
                lines.append(line)
            elif not line and len(lines) > 2:
                break  # the first processor speaks for all
    except OSError:
        lines.append(platform.processor())
    return "\n".join(lines)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"the C++ compiler did not run: {shlex.join(command)}: {error}"
        ) from error


def _compile(compiler: list[str], sources: list[Path], target: Path) -> None:
    """Sources to a shared object at `target`, one compiler process a source."""
    message = ""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        for choice in _TARGETS:
            flags = [*_FLAGS, *([choice] if choice else [])]
            objects = [Path(folder) / f"{source.stem}.o" for source in sources]
            commands = [
                [*compiler, *flags, "-c", str(source), "-o", str(output)]
                for source, output in zip(sources, objects, strict=True)
            ]
            with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as workers:
                results = list(workers.map(_run, commands))
            failed = [result for result in results if result.returncode != 0]
            if failed:
                message = message or failed[0].stderr.strip()
                continue
            output = Path(folder) / target.name
            link = _run([*compiler, "-shared", "-pthread", "-o", str(output), *map(str, objects)])
            if link.returncode != 0:
                message = message or link.stderr.strip()
                continue
            os.replace(output, target)
            return
    raise ConfigError(
        f"compiling the native CPU kernels with {shlex.join(compiler)} failed "
        f"(backend='torch' works without): {message[-2000:]}"
    )


def build_library(folder: Path = _HERE) -> Library:
    """The compiled library of this machine, built if it is not in the cache yet.

    Args:
        folder: where the sources lie (*.cpp, *.h).

    Raises:
        NoCompilerError: without a C++ compiler.
        ConfigError: the compiler fails, or the cache folder cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise NoCompilerError(
            "backend 'native' needs a C++ compiler (g++ or clang++, or set CXX); "
            "install one, or choose backend='torch'"
        )
    version = (_run([*compiler, "--version"]).stdout.splitlines() or ["unknown"])[0]
    sources = sorted(folder.glob("*.cpp"))
    digest = hashlib.sha256()
    for file in [*sources, *sorted(folder.glob("*.h"))]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    source_hash = digest.hexdigest()[:12]
    digest.update("\n".join([*_FLAGS, *compiler, version, _cpu_identity()]).encode())
    cache = cache_folder()
    target = cache / f"kernels-{digest.hexdigest()[:24]}.so"
    if not target.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            _compile(compiler, sources, target)
        except OSError as error:
            raise ConfigError(
                f"cannot write the compiled kernels to {cache} "
                f"(LOCKSTEP_CACHE_DIR names another folder): {error}"
            ) from error
    return Library(path=target, compiler=version, sources=source_hash)
