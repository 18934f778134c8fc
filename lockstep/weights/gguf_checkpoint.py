"""A GGUF file as a checkpoint with Hugging Face's names, shapes and values."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.text import Tokenizer
from lockstep.text.pretokenizers import word_cut
from lockstep.text.vocabulary import TokenKind, Vocabulary, build
from lockstep.types import ModelError
from lockstep.weights.checkpoint import Checkpoint
from lockstep.weights.dequant import Bytes, dequantize
from lockstep.weights.gguf_config import build_config, family_of
from lockstep.weights.gguf_file import GGUFFile
from lockstep.weights.gguf_names import ROPE_FACTORS, hugging_face_name
from lockstep.weights.hashing import pieces
from lockstep.weights.llama3_rope import scaling_of_factors

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"blk\.(\d+)\.")
_EMBEDDING = "token_embd.weight"


class GGUFCheckpoint(Checkpoint):
    """See `Checkpoint`; `path` is one .gguf file that holds the whole model."""

    format = "gguf"

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name, path)
        self._file = GGUFFile(path)
        metadata = self._file.metadata
        if metadata.get("split.count", 1) not in (0, 1):
            raise ModelError(
                f"{path}: one of {metadata['split.count']} parts of a split model; "
                "merge them first (llama-gguf-split --merge)"
            )
        gguf_name, self._family = family_of(metadata, str(path))
        self._tensors: dict[str, str] = {}  # Hugging Face's name -> the file's
        for stored in self._file.tensors:
            if stored == ROPE_FACTORS:
                continue
            known = hugging_face_name(stored, gguf_name)
            if known is None:
                raise ModelError(f"{path}: tensor {stored!r} is not known for {gguf_name!r}")
            self._tensors[known] = stored
        embedding = self._file.tensors.get(_EMBEDDING)
        if embedding is None or len(embedding.shape) != 2:
            raise ModelError(f"{path}: tensor {_EMBEDDING!r} is missing or no matrix")
        stored_names = self._file.tensors.keys()
        layers = {match[1] for name in stored_names if (match := _LAYER.match(name))}
        biases = {"attention": "blk.0.attn_q.bias", "mlp": "blk.0.ffn_up.bias"}
        self.config = build_config(
            metadata,
            path=str(path),
            vocab_size=embedding.shape[0],
            layers=len(layers),
            tied="output.weight" not in stored_names,
            biases=frozenset(part for part, bias in biases.items() if bias in stored_names),
        )
        if ROPE_FACTORS in stored_names:
            self._take_rope_factors()
        template = metadata.get("tokenizer.chat_template")
        self.chat_template = template if isinstance(template, str) else None
        ends = self._end_ids()
        if ends:
            self.generation_config = {"eos_token_id": ends if len(ends) > 1 else ends[0]}
            if "bos_token_id" in self.config:
                self.generation_config["bos_token_id"] = self.config["bos_token_id"]
        self._tokenizer: Tokenizer | None = None

    def _take_rope_factors(self) -> None:
        """Llama 3's rope scaling, which the file keeps as one factor a frequency."""
        values = dequantize(self._file.rows(ROPE_FACTORS), self._file.tensors[ROPE_FACTORS].kind)
        if self.config["rope_scaling"] is not None:
            raise ModelError(f"{self.path}: both {ROPE_FACTORS!r} and rope.scaling are present")
        try:
            self.config["rope_scaling"] = scaling_of_factors(
                values.reshape(-1), self.config["rope_theta"], self.config["head_dim"]
            )
        except ModelError as error:
            raise ModelError(f"{self.path}: tensor {ROPE_FACTORS!r}: {error}") from None

    def _end_ids(self) -> list[int]:
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        values = (self._file.metadata.get(f"tokenizer.ggml.{key}") for key in keys)
        return list(dict.fromkeys(value for value in values if isinstance(value, int)))

    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            try:
                self._tokenizer = self._build_tokenizer()
            except ModelError as error:
                raise ModelError(f"{self.path}: {error}") from None
        return self._tokenizer

    def _list(self, key: str, kind: type | tuple[type, ...]) -> list[Any]:
        value = self._file.metadata.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise ModelError(f"metadata tokenizer.ggml.{key} is not a list of the right kind")
        return value

    def _build_tokenizer(self) -> Tokenizer:
        metadata = self._file.metadata
        model = metadata.get("tokenizer.ggml.model")
        tokens = self._list("tokens", str)
        if not isinstance(model, str) or not tokens:
            raise ModelError("no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens)")
        if len(tokens) > self.config["vocab_size"]:
            raise ModelError(
                f"tokenizer has {len(tokens)} tokens, the embedding "
                f"{self.config['vocab_size']} rows"
            )
        ids = {
            key: metadata.get(f"tokenizer.ggml.{key}_token_id")
            for key in ("bos", "eos", "eot", "eom", "unknown", "padding")
        }
        for key, token in ids.items():
            if token is not None and not (isinstance(token, int) and 0 <= token < len(tokens)):
                raise ModelError(f"metadata tokenizer.ggml.{key}_token_id is {token!r}")
        pre = metadata.get("tokenizer.ggml.pre")
        pre = pre if isinstance(pre, str) else ""
        starts = metadata.get("tokenizer.ggml.add_bos_token")
        if starts is None:
            # A SentencePiece model starts every text with its start id.
            starts = model == "llama" or word_cut(pre).starts_text
        vocabulary = Vocabulary(
            model=model,
            tokens=tokens,
            pre=pre,
            kinds=self._list("token_type", int),
            scores=self._list("scores", (int, float)),
            merges=self._list("merges", str),
            unknown_id=ids["unknown"],
            add_bos=ids["bos"] if starts else None,
            add_eos=ids["eos"] if metadata.get("tokenizer.ggml.add_eos_token") else None,
            add_space_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        )
        controls = (
            token for token, kind in enumerate(vocabulary.kinds) if kind == TokenKind.CONTROL
        )
        return Tokenizer(
            build(vocabulary),
            eos_ids=self._end_ids(),
            bos_id=ids["bos"],
            special_ids=controls,
            chat_template=self.chat_template,
            template_variables={
                name: tokens[token]
                for name, key in (
                    ("bos_token", "bos"),
                    ("eos_token", "eos"),
                    ("unk_token", "unknown"),
                    ("pad_token", "padding"),
                )
                if (token := ids[key]) is not None
            },
        )

    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def _stored(self, name: str) -> str:
        stored = self._tensors.get(name)
        if stored is None:
            raise ModelError(f"{self.path}: no tensor {name!r}")
        return stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._stored(name)].shape

    def tensor(self, name: str) -> torch.Tensor:
        import torch

        stored = self._stored(name)
        entry = self._file.tensors[stored]
        rows = self._file.rows(stored)
        matrix = len(entry.shape) > 1
        if self._family.permuted and matrix and name.endswith(".q_proj.weight"):
            rows = self._rows_in_halves(rows, self.config["num_attention_heads"], name)
        elif self._family.permuted and matrix and name.endswith(".k_proj.weight"):
            rows = self._rows_in_halves(rows, self.config["num_key_value_heads"], name)
        values = dequantize(rows, entry.kind).reshape(entry.shape)
        if self._family.permuted and name.endswith(("q_proj.bias", "k_proj.bias")):
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            values = values[_halves(values.shape[0], self.config[heads], str(self.path), name)]
        if self._family.norm_offset and name.endswith("norm.weight"):
            values -= np.float32(self._family.norm_offset)
        return torch.from_numpy(values)

    def _rows_in_halves(self, rows: Bytes, heads: int, name: str) -> Bytes:
        moved: Bytes = rows[_halves(rows.shape[0], heads, str(self.path), name)]
        return moved

    def weights_hash(self) -> str:
        digest = hashlib.sha256()
        digest.update(self._file.bytes_at(0, self._file.header_bytes))
        digest.update(json.dumps([self._file.file_bytes, self._file.header_bytes]).encode())
        for entry in self._file.tensors.values():
            for start, count in pieces(entry.size, self._file.file_bytes):
                digest.update(self._file.bytes_at(entry.offset + start, count))
        return digest.hexdigest()


def _halves(rows: int, heads: int, path: str, name: str) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Where each row of a query or key projection lies in a file of the llama architecture.

    llama.cpp rotates adjacent pairs of a head, Hugging Face a head's two halves; files are
    converted by storing row (half h, pair p) of a head at 2p + h. This is the inverse.
    """
    if rows % (2 * heads):
        raise ModelError(f"{path}: tensor {name!r}: {rows} rows do not divide into {heads} heads")
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)
