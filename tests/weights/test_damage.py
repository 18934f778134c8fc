"""Damaged files: every one is opened, or refused by one ModelError that names the file."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.types import ModelError
from lockstep.weights import open_checkpoint
from tests.weights.writers import tiny_tensors, write_folder, write_gguf

Damage = Callable[[bytes], bytes]
QUIET = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def read_all(path: Path) -> None:
    """Opens a checkpoint and asks it for everything."""
    checkpoint = open_checkpoint(str(path))
    checkpoint.weights_hash()
    for name in checkpoint.tensor_names():
        assert tuple(checkpoint.tensor(name).shape) == checkpoint.shape(name)
    checkpoint.tokenizer()


@pytest.fixture(scope="module")
def whole_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    data = write_gguf(path, tiny_tensors()).read_bytes()
    read_all(path)
    return data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_folder(tmp_path_factory.mktemp("folder") / "m", tiny_tensors())
    read_all(path)
    return path


def header_length(data: bytes) -> int:
    """Where the first tensor's bytes begin, nearly: the file is mostly tensors."""
    return data.rindex(b"output_norm.weight") + 64


@QUIET
@given(cut=st.floats(0, 1))
def test_truncated_gguf(whole_gguf: bytes, tmp_path: Path, cut: float) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(whole_gguf[: int(cut * (len(whole_gguf) - 33))])
    with pytest.raises(ModelError, match=r"m\.gguf"):
        read_all(path)


@QUIET
@given(flips=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), min_size=1, max_size=3))
def test_flipped_bytes_in_a_gguf_header(
    whole_gguf: bytes, tmp_path: Path, flips: list[tuple[float, int]]
) -> None:
    data, end = bytearray(whole_gguf), header_length(whole_gguf)
    for where, change in flips:
        data[int(where * end)] ^= change
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    refused_or_read(path)


def refused_or_read(path: Path) -> None:
    complaint = str(path)
    try:
        read_all(path)
    except ModelError as error:
        complaint = str(error)
    assert str(path) in complaint


@QUIET
@given(number=st.integers(0, 2**64 - 1), where=st.floats(0, 1))
def test_absurd_lengths_in_a_gguf_header(
    whole_gguf: bytes, tmp_path: Path, number: int, where: float
) -> None:
    data, end = bytearray(whole_gguf), header_length(whole_gguf)
    struct.pack_into("<Q", data, int(where * end), number)
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    refused_or_read(path)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda data: b"", "cannot be read|not a GGUF|neither"),
        (lambda data: b"GGUX" + data[4:], "not a GGUF file"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "version 1"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "version"),
        (lambda data: data[:16], "truncated"),
        (lambda data: data[:-2000], "truncated: tensor"),
        (lambda data: data[:8] + struct.pack("<Q", 2**60) + data[16:], "truncated|dimensions"),
        (lambda data: data[:16] + struct.pack("<Q", 2**60) + data[24:], "truncated|stands|unknown"),
    ],
)
def test_gguf_damage_is_named(
    whole_gguf: bytes, tmp_path: Path, damage: Damage, complaint: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(damage(whole_gguf))
    with pytest.raises(ModelError, match=complaint) as caught:
        read_all(path)
    assert "m.gguf" in str(caught.value)


def test_unsupported_tensor_type_is_named(whole_gguf: bytes, tmp_path: Path) -> None:
    data = bytearray(whole_gguf)
    name = b"output_norm.weight"
    at = data.index(name) + len(name) + 4 + 8  # after the count of dimensions and one size
    struct.pack_into("<I", data, at, 31)
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"output_norm\.weight.*type 31"):
        read_all(path)


def damaged_folder(folder: Path, tmp_path: Path, file: str, damage: Damage) -> Path:
    copy = tmp_path / "m"
    copy.mkdir(exist_ok=True)
    for source in folder.iterdir():
        data = source.read_bytes()
        (copy / source.name).write_bytes(damage(data) if source.name == file else data)
    return copy


@QUIET
@given(cut=st.floats(0, 0.999))
def test_truncated_safetensors(folder: Path, tmp_path: Path, cut: float) -> None:
    path = damaged_folder(
        folder, tmp_path, "model.safetensors", lambda data: data[: int(cut * len(data))]
    )
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        read_all(path)


@QUIET
@given(flips=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), min_size=1, max_size=3))
def test_flipped_bytes_in_a_safetensors_header(
    folder: Path, tmp_path: Path, flips: list[tuple[float, int]]
) -> None:
    def flip(data: bytes) -> bytes:
        changed = bytearray(data)
        (length,) = struct.unpack_from("<Q", data)
        for where, change in flips:
            changed[int(where * (length + 7))] ^= change
        return bytes(changed)

    refused_or_read(damaged_folder(folder, tmp_path, "model.safetensors", flip))


@QUIET
@given(
    file=st.sampled_from(
        ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
    ),
    data=st.binary(max_size=40),
)
def test_files_of_noise(folder: Path, tmp_path: Path, file: str, data: bytes) -> None:
    refused_or_read(damaged_folder(folder, tmp_path, file, lambda _: data))


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m", tiny_tensors())
    (path / "model.safetensors").unlink()
    torch.save({"weight": torch.ones(2)}, path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        open_checkpoint(str(path))
    # Nor under another name.
    (path / "pytorch_model.bin").rename(path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        open_checkpoint(str(path))


def with_header(change: Callable[[dict[str, object]], None]) -> Damage:
    def apply(data: bytes) -> bytes:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        change(header)
        encoded = json.dumps(header).encode()
        return struct.pack("<Q", len(encoded)) + encoded + data[8 + length :]

    return apply


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda header: header[NORM].update(dtype="Q3"), "model.norm.weight.*'Q3'"),
        (lambda header: header[NORM].update(shape=[63]), "bytes for shape"),
        (lambda header: header[NORM].update(shape=[-64]), "damaged header entry"),
        (lambda header: header[NORM].update(data_offsets=[0]), "damaged header entry"),
        (lambda header: header.update({NORM: 3}), "damaged header entry"),
        (
            lambda header: header[NORM].update(data_offsets=[10**9, 10**9 + 256]),
            "truncated: tensor 'model.norm.weight'",
        ),
    ],
)
def test_safetensors_damage_is_named(
    folder: Path,
    tmp_path: Path,
    change: Callable[[dict[str, object]], None],
    complaint: str,
) -> None:
    path = damaged_folder(folder, tmp_path, "model.safetensors", with_header(change))
    with pytest.raises(ModelError, match=complaint):
        read_all(path)
