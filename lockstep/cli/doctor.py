"""`lockstep doctor`: what this machine has, and what will work on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
ENOUGH_MEMORY = 2 << 30
EXIT_NOTHING_WORKS = 1


class Verdict(StrEnum):
    """How a finding bears on running models here."""

    GOOD = "good"
    NOTE = "note"  # something optional is absent
    BAD = "bad"  # nothing runs without it


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    what: str
    verdict: Verdict
    detail: str


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Say what this machine has and what will work; exit status 1 when nothing will."""
    findings = examine()
    if as_json:
        import json

        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    if any(finding.verdict is Verdict.BAD for finding in findings):
        raise typer.Exit(EXIT_NOTHING_WORKS)


def examine() -> list[Finding]:
    """Everything that is looked at, in order."""
    findings: list[Finding] = []
    for look in (_python, _cpu, _memory, _torch, _compiler_and_kernels, _gpu, _server, _models):
        try:
            findings += look()
        except Exception as error:  # one look that fails must not hide the others
            what = look.__name__.strip("_")
            findings.append(Finding(what, Verdict.NOTE, f"{type(error).__name__}: {error}"))
    return findings


def _python() -> list[Finding]:
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return [Finding("Python", Verdict.GOOD, detail)]


def _cpu() -> list[Finding]:
    from lockstep.kernels.cpu import usable_threads

    info = Path("/proc/cpuinfo")
    fields = _fields(info.read_text().split("\n\n", 1)[0]) if info.exists() else {}
    name = fields.get("model name") or platform.processor() or platform.machine()
    present = set(fields.get("flags", fields.get("Features", "")).split())
    flags = [flag for flag in CPU_FLAGS if flag in present]
    cores = f"{usable_threads()} of {os.cpu_count()} cores usable"
    return [Finding("CPU", Verdict.GOOD, f"{name}, {cores}; {' '.join(flags)}")]


def _memory() -> list[Finding]:
    sizes = _fields(Path("/proc/meminfo").read_text())
    free, total = (int(sizes[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
    verdict = Verdict.GOOD if free >= ENOUGH_MEMORY else Verdict.NOTE
    return [Finding("memory", verdict, f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f}")]


def _fields(text: str) -> dict[str, str]:
    """Lines of "key : value"."""
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _torch() -> list[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return [Finding("torch", Verdict.BAD, f"{error}; pip install torch")]
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    return [Finding("torch", Verdict.GOOD, f"{torch.__version__} ({built})")]


def _compiler_and_kernels() -> list[Finding]:
    from lockstep.kernels import cpu
    from lockstep.kernels.cpu.build import find_compiler
    from lockstep.types import LockstepError

    compiler = find_compiler()
    findings = [
        Finding("C++ compiler", Verdict.GOOD, shlex.join(compiler))
        if compiler
        else Finding("C++ compiler", Verdict.NOTE, "none: backend torch serves, at lower speed")
    ]
    works = False
    for name in ("native", "torch"):
        began = time.perf_counter()
        try:
            cpu.make_backend(name)
        except LockstepError as error:
            findings.append(Finding(f"backend {name}", Verdict.NOTE, str(error).splitlines()[0]))
        else:
            works = True
            detail = f"works (built and loaded in {time.perf_counter() - began:.1f} s)"
            findings.append(Finding(f"backend {name}", Verdict.GOOD, detail))
    if not works:
        findings.append(Finding("CPU", Verdict.BAD, "no CPU backend works here"))
    return findings


def _gpu() -> list[Finding]:
    import torch

    version = _version_of("triton")
    if not torch.cuda.is_available():
        return [Finding("GPU", Verdict.NOTE, "none that torch can use; models run on the CPU")]
    names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    shown = "; ".join(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in names)
    if version is None:
        detail = f"{shown}; Triton is missing: pip install '.[cuda]' in Lockstep's folder"
        return [Finding("GPU", Verdict.NOTE, detail)]
    return [Finding("GPU", Verdict.GOOD, f"{shown}; Triton {version}")]


def _server() -> list[Finding]:
    versions = {name: _version_of(name) for name in ("fastapi", "uvicorn")}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        detail = f"{', '.join(missing)} missing: pip install '.[server]' in Lockstep's folder"
        return [Finding("HTTP server", Verdict.NOTE, detail)]
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [Finding("HTTP server", Verdict.GOOD, shown)]


def _models() -> list[Finding]:
    from lockstep.weights import PACKAGED_MODELS

    return [
        Finding(f"model {model.name}", Verdict.GOOD, model.description)
        if model.installed()
        else Finding(f"model {model.name}", Verdict.NOTE, f"not here: {model.install}")
        for model in PACKAGED_MODELS
    ]


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    marks = {
        Verdict.GOOD: "[green]ok[/green]",
        Verdict.NOTE: "[yellow]--[/yellow]",
        Verdict.BAD: "[red]no[/red]",
    }
    table = Table(box=None, show_header=False)
    for finding in findings:
        table.add_row(marks[finding.verdict], finding.what, escape(finding.detail))
    Console().print(table)
