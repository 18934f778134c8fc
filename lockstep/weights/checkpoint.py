"""What every weight format offers, and how a name becomes one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lockstep.text import Tokenizer
from lockstep.types import ModelError
from lockstep.weights.sources import locate

if TYPE_CHECKING:
    import torch


class Checkpoint(ABC):
    """One model's files: configuration, tokenizer and tensors.

    Tensors carry Hugging Face's names and meaning in every format. Files are mapped, not
    read, until a tensor is asked for; they must not change while the checkpoint is in use.

    Attributes:
        name: as it was asked for.
        path: the file or folder.
        format: how tensors are stored.
        config: in the manner of config.json. `rope_theta`, `rope_scaling` and (for models
            with two ropes) `rope_local_base_freq` are present in this older spelling,
            whichever the file uses.
        generation_config: in the manner of generation_config.json; may be empty.
        chat_template: Jinja source, or None.
    """

    format: Literal["gguf", "safetensors"]

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.config: dict[str, Any] = {}
        self.generation_config: dict[str, Any] = {}
        self.chat_template: str | None = None

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; built on first call, then shared.

        Raises:
            ModelError: it is missing, damaged, or of an unsupported kind.
        """

    @abstractmethod
    def tensor_names(self) -> tuple[str, ...]:
        """All names, in the files' order. A tied output matrix is not among them."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the header alone.

        Raises:
            ModelError: no such tensor.
        """

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """A tensor's values on the CPU.

        GGUF: float32, whatever the stored type, newly made. safetensors: as stored, and
        possibly a view of the mapped file, which callers do not write to.

        Raises:
            ModelError: no such tensor, or its bytes cannot be read.
        """

    @abstractmethod
    def weights_hash(self) -> str:
        """A hex digest that differs when the weights differ.

        Over headers, sizes and every byte of every tensor; of checkpoints larger than
        `hashing.WHOLE_BYTES` over samples of every tensor, so that files which differ in a
        few unsampled bytes would share it.
        """


def open_checkpoint(name: str) -> Checkpoint:
    """Opens a model by path, packaged name or hub id; see `sources.locate`.

    A folder is a Hugging Face folder, or holds one GGUF file and no config.json.

    Raises:
        ModelError: nothing there, or files that cannot be a model; names the file.
    """
    path = locate(name)
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise ModelError(f"{path}: holds several GGUF files, name one of them: {names}")
        path = files[0] if files else path
    if path.is_dir():
        from lockstep.weights.folder import FolderCheckpoint

        return FolderCheckpoint(name, path)
    if path.suffix == ".gguf" or _starts_with(path, b"GGUF"):
        from lockstep.weights.gguf_checkpoint import GGUFCheckpoint

        return GGUFCheckpoint(name, path)
    raise ModelError(f"{path}: neither a model folder nor a GGUF file")


def _starts_with(path: Path, magic: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
