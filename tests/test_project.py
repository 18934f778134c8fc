"""The project as a whole: layering, packaging, what the README promises, house rules."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

from lockstep.config import cache_folder

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 600
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".cpp", ".h", ".sh", ".yaml"}


def tracked_files() -> list[Path]:
    """Every file of the checkout that git tracks, or all files where there is no git."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode != 0:
        skip = {".venv", "build", "__pycache__"}
        return [p for p in ROOT.rglob("*") if p.is_file() and not skip & set(p.parts)]
    names = listing.stdout.decode().split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def python(code: str, timeout: float = 60) -> str:
    """Standard output of `code` in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rooms_import_downward_only() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_map_shows_the_layers_that_are_checked() -> None:
    [contract] = [
        entry
        for entry in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
            "contracts"
        ]
        if entry["type"] == "layers"
    ]
    layers = [", ".join(re.split(r" [|:] ", layer)) for layer in contract["layers"]]
    assert f"`{' → '.join(layers)}`" in (ROOT / "docs/architecture.md").read_text("utf-8")


def test_the_layering_check_can_fail(tmp_path: Path) -> None:
    """A copy of the package in which kernels import the engine breaks the contract."""
    for source in (ROOT / "lockstep").rglob("*.py"):
        target = tmp_path / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    tree = tmp_path / "lockstep/kernels/tree.py"
    tree.write_text(tree.read_text() + "\nimport lockstep.engine.scheduler\n")
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "lockstep.kernels" in done.stdout


@pytest.mark.parametrize(
    "module",
    [
        "lockstep",
        "lockstep.async_llm",
        "lockstep.cache",
        "lockstep.cli.main",
        "lockstep.engine.client",
        "lockstep.engine.scheduler",
        "lockstep.llm",
        "lockstep.runner.plan",
        "lockstep.server",
        "lockstep.text",
        "lockstep.verify.compare",
        "lockstep.verify.selftest",
        "lockstep.weights",
    ],
)
def test_imports_no_torch(module: str) -> None:
    loaded = python(
        f"import {module}, sys; print([m for m in ('torch', 'triton') if m in sys.modules])"
    )
    assert loaded.strip() == "[]"


def test_help_is_quick_and_loads_no_torch() -> None:
    code = (
        "import sys\nfrom lockstep.cli.main import main\nsys.argv = ['lockstep', '--help']\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    times = []
    for _ in range(2):
        start = time.perf_counter()
        text = python(code)
        times.append(time.perf_counter() - start)
    for command in ("chat", "generate", "serve", "models", "doctor"):
        assert command in text
    assert min(times) < 5.0  # about 0.6 s alone; importing torch here takes longer than all of it


def test_no_file_is_too_long() -> None:
    lengths = {
        path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines())
        for path in tracked_files()
        if path.suffix in {".py", ".cpp", ".h"}
    }
    assert lengths
    assert not {str(path): n for path, n in lengths.items() if n > MAX_LINES}


def test_no_unfinished_business() -> None:
    marks = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3]) + r")\b")
    found = [
        str(path.relative_to(ROOT))
        for path in tracked_files()
        if path.suffix in TEXT_SUFFIXES and marks.search(path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_nothing_points_outside_the_checkout() -> None:
    """No absolute path of the machine it was written on, and no link that leads nowhere."""
    private = re.compile("/" + r"(work|root|opt)/[a-z]")
    wrong = [
        str(path.relative_to(ROOT))
        for path in tracked_files()
        if path.suffix in TEXT_SUFFIXES and private.search(path.read_text(encoding="utf-8"))
    ]
    assert not wrong
    for page in (path for path in tracked_files() if path.suffix == ".md"):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http://", "https://", "mailto:")):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_public_modules_have_docstrings() -> None:
    bare = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "lockstep").rglob("*.py")
        if ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None
    ]
    assert not bare


def test_readme_commands_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b", readme))
    assert {"demo", "test"} <= named <= targets
    commands = set(re.findall(r"\blockstep (chat|generate|serve|models|doctor)\b", readme))
    text = python("import sys; sys.argv = ['lockstep', '--help']; import lockstep.cli.main as m\n"
                  "try:\n    m.main()\nexcept SystemExit:\n    pass")  # fmt: skip
    assert commands
    assert all(command in text for command in commands)


def test_readme_python_is_valid() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert blocks
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "lockstep":
                names = ", ".join(alias.name for alias in node.names)
                python(f"from lockstep import {names}")


def test_every_dependency_is_explained_and_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        declared += [item for item in extra if not item.startswith("lockstep[")]
    names = {re.match(r"[A-Za-z0-9_.-]+", item).group(0).lower() for item in declared}  # type: ignore[union-attr]
    pins = {
        line.partition("==")[0].lower().replace("_", "-")
        for name in ("constraints.txt", "models.txt")
        for line in (ROOT / name).read_text().splitlines()
        if "==" in line
    }
    page = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8").lower()
    assert not {name for name in names if name.replace("_", "-") not in pins}
    assert not {name for name in names if f"`{name}`" not in page}


@pytest.mark.slow
def test_a_wheel_carries_the_kernels_and_nothing_else(tmp_path: Path) -> None:
    """What `pip install` gives a user: every module, the C++ sources, the typing marker."""
    pytest.importorskip("setuptools")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    tracked = [path for path in tracked_files() if path.is_relative_to(ROOT / "lockstep")]
    for source in tracked:
        target = tmp_path / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    build = "import setuptools.build_meta as b; print(b.build_wheel('.'))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    package = {name for name in held if name.startswith("lockstep/")}
    assert package == {str(path.relative_to(ROOT)) for path in tracked}
    assert any(name.endswith(".cpp") for name in package)
    assert all(name.startswith("lockstep/") or ".dist-info/" in name for name in held)


def test_one_rule_says_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/ada")
    assert cache_folder() == Path("/home/ada/.cache/lockstep")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/ada")
    assert cache_folder() == Path("/var/cache/ada/lockstep")
    monkeypatch.setenv("LOCKSTEP_CACHE_DIR", "/data/kernels")
    assert cache_folder() == Path("/data/kernels")
