"""A Hugging Face folder as a checkpoint: config.json beside safetensors files."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import tokenizers

from lockstep.text import Tokenizer
from lockstep.types import ModelError
from lockstep.weights.checkpoint import Checkpoint
from lockstep.weights.hashing import pieces

if TYPE_CHECKING:
    import torch

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U16": 2, "U32": 4, "U64": 8,
}  # fmt: skip
_MAX_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # of its first byte in the file
    size: int


def _read_json(path: Path, *, required: bool = True) -> Any:
    if not path.is_file():
        if required:
            raise ModelError(f"{path}: missing")
        return None
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from None


def _read_object(path: Path, *, required: bool = True) -> dict[str, Any]:
    value = _read_json(path, required=required)
    if value is None and not required:
        return {}
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return value


def read_directory(path: Path) -> dict[str, _Entry]:
    """The tensors of one safetensors file, from its header, checked against its size.

    Raises:
        ModelError: missing, truncated, or a header that does not fit the file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise ModelError(f"{path}: truncated: {size} bytes are no safetensors file")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(_MAX_HEADER, size - 8):
                raise ModelError(
                    f"{path}: truncated or no safetensors file: header of {length} bytes, "
                    f"the file has {size}"
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: damaged header: {error}") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path}: damaged header: not an object")
    entries = {}
    for name, value in header.items():
        if name != "__metadata__":
            entries[name] = _entry(path, name, value, base=8 + length, size=size)
    return entries


def _whole(numbers: Any) -> TypeGuard[list[int]]:
    return isinstance(numbers, list) and all(
        isinstance(number, int) and not isinstance(number, bool) and number >= 0
        for number in numbers
    )


def _entry(path: Path, name: str, value: Any, *, base: int, size: int) -> _Entry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(value, dict):
        raise ModelError(f"{where}: damaged header entry")
    dtype, shape, offsets = (value.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise ModelError(f"{where}: dtype {dtype!r} is not supported")
    if not _whole(shape) or not _whole(offsets) or len(offsets) != 2:
        raise ModelError(f"{where}: damaged header entry")
    start, end = offsets
    if end - start != prod(shape) * _ITEM_BYTES[dtype]:
        raise ModelError(f"{where}: {end - start} bytes for shape {shape} of {dtype}")
    if base + end > size:
        raise ModelError(
            f"{path}: truncated: tensor {name!r} needs bytes up to {base + end}, "
            f"the file has {size}"
        )
    return _Entry(path, dtype, tuple(shape), base + start, end - start)


class FolderCheckpoint(Checkpoint):
    """See `Checkpoint`; `path` is a folder with config.json and safetensors files."""

    format = "safetensors"

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name, path)
        self.config = _old_rope_spelling(_read_object(path / "config.json"))
        self.generation_config = _read_object(path / "generation_config.json", required=False)
        self._tokenizer_config = _read_object(path / "tokenizer_config.json", required=False)
        self.chat_template = self._find_template()
        self._entries = self._directory()
        self._tokenizer: Tokenizer | None = None
        self._open: dict[Path, Any] = {}

    def _directory(self) -> dict[str, _Entry]:
        index = self.path / _INDEX
        if not index.is_file():
            single = self.path / _SINGLE
            if not single.is_file():
                raise ModelError(f"{self.path}: neither {_SINGLE} nor {_INDEX} is there")
            return read_directory(single)
        weight_map = _read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in weight_map.values()
        ):
            raise ModelError(f"{index}: weight_map must map tensor names to file names")
        shards = {}
        for file in dict.fromkeys(weight_map.values()):
            if not (self.path / file).is_file():
                raise ModelError(f"{self.path / file}: missing shard named by {_INDEX}")
            shards[file] = read_directory(self.path / file)
        for name, file in weight_map.items():
            if name not in shards[file]:
                raise ModelError(f"{self.path / file}: tensor {name!r} is missing")
        return {name: shards[file][name] for name, file in weight_map.items()}

    def _find_template(self) -> str | None:
        file = self.path / "chat_template.jinja"
        if file.is_file():
            try:
                return file.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(f"{file}: cannot be read: {error}") from None
        template = self._tokenizer_config.get("chat_template")
        if template is None:
            old = _read_object(self.path / "chat_template.json", required=False)
            template = old.get("chat_template")
        if isinstance(template, list):  # named templates: the default one is for chat
            named = {
                entry.get("name"): entry.get("template")
                for entry in template
                if isinstance(entry, Mapping)
            }
            template = named.get("default")
        return template if isinstance(template, str) else None

    def _special_tokens(self) -> dict[str, str]:
        """`bos_token` and its like, by name."""
        found: dict[str, str] = {}
        mapped = _read_object(self.path / "special_tokens_map.json", required=False)
        for source in (mapped, self._tokenizer_config):
            for key, value in source.items():
                if isinstance(value, Mapping):
                    value = value.get("content")
                if key.endswith("_token") and isinstance(value, str):
                    found[key] = value
        return found

    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = self._build_tokenizer()
        return self._tokenizer

    def _build_tokenizer(self) -> Tokenizer:
        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{file}: missing; other tokenizer files are not read")
        try:
            backend = tokenizers.Tokenizer.from_str(file.read_text("utf-8"))
        except Exception as error:
            # tokenizers raises plain Exception for anything that it cannot read.
            raise ModelError(f"{file}: not a tokenizer: {error}") from None
        backend.no_truncation()
        backend.no_padding()
        names = self._special_tokens()
        ends = _end_ids(self.generation_config) or _end_ids(self.config)
        if (token := backend.token_to_id(names.get("eos_token", ""))) is not None:
            ends.append(token)
        start = names.get("bos_token")
        specials = (backend.token_to_id(name) for name in names.values())
        try:
            return Tokenizer(
                backend,
                eos_ids=ends,
                bos_id=None if start is None else backend.token_to_id(start),
                special_ids=(token for token in specials if token is not None),
                chat_template=self.chat_template,
                template_variables=names,
            )
        except ModelError as error:
            raise ModelError(f"{self.path}: {error}") from None

    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def _find(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise ModelError(f"{self.path}: no tensor {name!r}")
        return entry

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def tensor(self, name: str) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        entry = self._find(name)
        try:
            if entry.file not in self._open:
                self._open[entry.file] = safe_open(str(entry.file), framework="pt")
            tensor: torch.Tensor = self._open[entry.file].get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{entry.file}: tensor {name!r} cannot be read: {error}") from None
        return tensor

    def weights_hash(self) -> str:
        digest = hashlib.sha256()
        digest.update(json.dumps(self.config, sort_keys=True).encode())
        total = sum(entry.size for entry in self._entries.values())
        for name, entry in self._entries.items():
            digest.update(json.dumps([name, entry.dtype, entry.shape, entry.start]).encode())
            with entry.file.open("rb") as file:
                for start, count in pieces(entry.size, total):
                    file.seek(entry.start + start)
                    digest.update(file.read(count))
        return digest.hexdigest()


def _end_ids(config: Mapping[str, Any]) -> list[int]:
    value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _old_rope_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with `rope_parameters` spelled as the entries that it replaced.

    Newer files hold one record of base and scaling, or one for each kind of layer.
    """
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict):
        return config
    config = {key: value for key, value in config.items() if key != "rope_parameters"}
    local = parameters.get("sliding_attention")
    if isinstance(local, dict) and "rope_theta" in local:
        if local.get("rope_type", "default") != "default":
            raise ModelError(f"config.json: rope of sliding layers is {local!r}, not plain")
        config["rope_local_base_freq"] = local["rope_theta"]
    full = parameters.get("full_attention")
    record = dict(full if isinstance(full, dict) else parameters)
    if "rope_theta" in record:
        config["rope_theta"] = record.pop("rope_theta")
    if "partial_rotary_factor" in record:
        config["partial_rotary_factor"] = record.pop("partial_rotary_factor")
    scaling = None if record.get("rope_type", "default") == "default" else record
    if config.get("rope_scaling") not in (None, scaling):
        raise ModelError(
            f"config.json: rope_scaling {config['rope_scaling']!r:.200} and rope_parameters "
            f"{parameters!r:.200} differ; only one of them may stand there"
        )
    config["rope_scaling"] = scaling
    return config
