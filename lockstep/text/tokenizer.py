"""`Tokenizer`: a vocabulary's ids, bytes, special tokens and chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from lockstep.text.chat import ChatTemplate
from lockstep.text.detokenizer import Detokenizer
from lockstep.types import ModelError, RequestError

# Tokens that end a turn or a document, by convention of the families that use them. A file
# may name only one of the ids at which its model stops; these stop it as well when the
# vocabulary marks them as special.
_END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
)
_WORD_BOUNDARY = "\u2581"  # SentencePiece's mark for a space


def _byte_level_table() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 byte values (Radford et al. 2019)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if chr(byte) not in table)
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF = _byte_level_table()


def common_beginning(a: str, b: str) -> int:
    """How many characters two texts begin with in common."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a.startswith(b[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


class _ByteRules:
    """How a token's name in the vocabulary stands for bytes, read off the decoder."""

    def __init__(self, decoder: Mapping[str, Any]) -> None:
        steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
        self.byte_level = False
        self.byte_fallback = False
        self.strips_leading_space = False
        self.replacements: list[tuple[str, str]] = []
        for step in steps:
            kind = step.get("type")
            if kind == "ByteLevel":
                self.byte_level = True
            elif kind == "ByteFallback":
                self.byte_fallback = True
            elif kind == "Replace" and isinstance(step.get("pattern", {}).get("String"), str):
                self.replacements.append((step["pattern"]["String"], step["content"]))
            elif kind == "Metaspace":
                self.replacements.append((step.get("replacement", _WORD_BOUNDARY), " "))
                self.strips_leading_space = step.get("prepend_scheme", "always") != "never"
            elif kind == "Strip" and step.get("content") == " " and step.get("stop") == 0:
                self.strips_leading_space = step.get("start", 0) > 0
            elif kind != "Fuse":
                raise ModelError(f"tokenizer: decoder step {kind!r} is not supported")

    def to_bytes(self, piece: str, *, added: bool) -> bytes:
        if self.byte_level:
            # Added tokens are written as text, not in GPT-2's stand-ins.
            if added or any(character not in _BYTE_OF for character in piece):
                return piece.encode("utf-8", "replace")
            return bytes(_BYTE_OF[character] for character in piece)
        if self.byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece[5] == ">":
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                pass
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        return piece.encode("utf-8", "replace")


class Tokenizer:
    """Text to token ids and back, for one model.

    Args:
        backend: the vocabulary and its algorithm; its decoder says how names stand for bytes.
        eos_ids: end ids that the model's files name; conventional turn-end and document-end
            tokens of the vocabulary are added to them.
        bos_id: the id that starts a sequence, if the model has one.
        special_ids: control tokens besides those that `backend` marks as special.
        chat_template: Jinja source, or None.
        template_variables: further names for the template, e.g. `{"bos_token": "<bos>"}`.

    Raises:
        ModelError: the decoder has a step whose meaning is unknown.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        special_ids: Iterable[int] = (),
        chat_template: str | None = None,
        template_variables: Mapping[str, str] | None = None,
    ) -> None:
        if backend.decoder is None:
            raise ModelError("tokenizer: it has no decoder, so that ids cannot become text")
        self._backend = backend
        self._rules = _ByteRules(json.loads(backend.decoder.__getstate__()))
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        marked = (token for token, entry in added.items() if entry.special)
        self._special = frozenset(marked) | frozenset(special_ids)
        # Texts are cut at these before anything else is done to them, so what stands on one
        # side of such a token has the same ids whatever stands on the other.
        self._borders = {
            token: entry.content
            for token, entry in added.items()
            if token in self._special
            and not (entry.lstrip or entry.normalized or entry.single_word)
        }
        self._bytes: dict[int, bytes] = {}
        ends = (backend.token_to_id(name) for name in _END_TOKENS)
        self._eos = tuple(dict.fromkeys([*eos_ids, *(end for end in ends if end in self._special)]))
        self.bos_id = bos_id
        self.chat_template = chat_template
        self._chat = None
        if chat_template is not None:
            self._chat = ChatTemplate(chat_template, template_variables or {})

    @property
    def vocab_size(self) -> int:
        """Number of ids with a token; a model's own vocabulary may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence: those that the model's files name come first."""
        return self._eos

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens, which `skip_special_tokens` hides."""
        return self._special

    def save(self, path: Path) -> None:
        """Write it as a `tokenizer.json` that Hugging Face's libraries read."""
        self._backend.save(str(path))

    @property
    def strips_leading_space(self) -> bool:
        """Whether a text's first space is an artefact of encoding (SentencePiece's prefix)."""
        return self._rules.strips_leading_space

    def token_id(self, name: str) -> int | None:
        """The id of the token that is called `name` in the vocabulary, if there is one."""
        return self._backend.token_to_id(name)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it become their ids.

        What a vocabulary has no token for (SmolLM2 lacks a few control characters) becomes
        its unknown token or, where the model has none, nothing; as in every engine.

        Args:
            add_special_tokens: add what the model wants around every text (often a start id).
        """
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError(f"text cannot be encoded: {error}", field="prompt") from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are no UTF-8 become U+FFFD, see `detokenizer`."""
        detokenizer = Detokenizer(self, (), skip_special_tokens=skip_special_tokens)
        return "".join([*(detokenizer.push(token) for token in ids), detokenizer.finish()])

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for in running text.

        Special tokens give their name's bytes; ids without a token give none.
        """
        data = self._bytes.get(token)
        if data is None:
            name = self._backend.id_to_token(token) if token >= 0 else None
            added = token in self._added
            data = b"" if name is None else self._rules.to_bytes(name, added=added)
            self._bytes[token] = data
        return data

    def token_text(self, token: int) -> str:
        """The token as a logprob entry shows it: its text in the middle of a sentence.

        A token whose bytes are no whole characters is written `bytes:\\xe2\\x80`, so that
        different tokens keep different texts and none is empty unless it has no bytes.
        """
        data = self.token_bytes(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Id sequences of each word, as it stands after other text with and without a space."""
        sequences = (
            tuple(self.encode_inside(form))
            for word in words
            for form in (word, " " + word.lstrip(" "))
        )
        return tuple(dict.fromkeys(ids for ids in sequences if ids))

    def encode_inside(self, text: str) -> list[int]:
        """Ids of `text` as it stands inside a text, without an encoder's leading space."""
        if not self.strips_leading_space:
            return self.encode(text, add_special_tokens=False)
        # After a line break no tokenizer of this kind joins what follows to what precedes.
        anchor = self.encode("\n", add_special_tokens=False)
        ids = self.encode("\n" + text, add_special_tokens=False)
        return ids[len(anchor) :] if ids[: len(anchor)] == anchor else ids

    def encode_beside(self, text: str, other: str, ids: Sequence[int]) -> list[int]:
        """`encode(text, add_special_tokens=False)` for a text that begins like another one.

        What both have in common, up to a control token, is not tokenised again.

        Args:
            ids: those of `other`.
        """
        shared = common_beginning(text, other)
        marks = [self._borders[token] for token in set(ids) & self._borders.keys()]
        cut = len(text) if shared == len(text) and other.startswith(tuple(marks), shared) else -1
        if cut < 0:
            cut = max((text.rfind(mark, 0, shared) for mark in marks), default=-1)
        if 2 * cut > len(other):  # else there is more to tokenise than to be spared
            behind = self.encode(other[cut:], add_special_tokens=False)
            before = len(ids) - len(behind)
            if list(ids[before:]) == behind:
                return [*ids[:before], *self.encode(text[cut:], add_special_tokens=False)]
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation, by the model's chat template.

        Args:
            messages: `{"role": ..., "content": ...}`; content is a string or a list of
                `{"type": "text", "text": ...}` parts.
            tools: JSON schemas of callable functions, handed to the template.
            add_generation_prompt: end with the opening of the assistant's turn.
            kwargs: further variables for the template; those above win over them.

        Raises:
            RequestError: no chat template, malformed messages, or the template's own
                complaint in its words.
        """
        if self._chat is None:
            raise RequestError(
                "this model has no chat template: use text completion instead",
                field="messages",
                code="no_chat_template",
            )
        return self._chat.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of `render_chat`'s text; the template writes start tokens itself."""
        text = self.render_chat(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
        )
        return self.encode(text, add_special_tokens=False)
