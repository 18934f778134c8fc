"""From the bytes of tokens to text, one token at a time.

The text of a token sequence is defined on bytes: the tokens' bytes are joined and
decoded as UTF-8, each maximal ill-formed part becoming one U+FFFD (Unicode standard,
section 3.9, as Python's "replace" and Rust's `from_utf8_lossy` do). At most three
bytes are ever pending, so a token costs the same wherever it stands, and text that
was given out is never taken back.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes of UTF-8


class ByteVocabulary(Protocol):
    """What the detokeniser needs to know of a vocabulary."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def strips_leading_space(self) -> bool: ...

    def token_bytes(self, token: int) -> bytes: ...


def incomplete_tail(data: bytes) -> bytes:
    """The longest suffix of `data` that a further byte may still complete to a character."""
    for length in range(min(_LONGEST_CHARACTER - 1, len(data)), 0, -1):
        tail = data[-length:]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        if not decoder.decode(tail):
            return tail
    return b""


class Detokenizer:
    """The text of an output as it follows its prompt.

    Joined deltas are what the decoded prompt and output have beyond the decoded prompt. A
    character that the prompt left unfinished belongs to the output when the output
    completes it; if it is never completed, its U+FFFD stays with the prompt.

    Args:
        skip_special_tokens: control tokens have no text.
        shown: control tokens that have theirs all the same.

    Mutable; owned by one stream.
    """

    def __init__(
        self,
        vocabulary: ByteVocabulary,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._vocabulary = vocabulary
        hidden = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._skipped = hidden - shown if shown else hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for token in reversed(prompt):
            tail = self._bytes(token) + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        self._strip_space = vocabulary.strips_leading_space and not tail
        pending = incomplete_tail(tail)
        self._decoder.decode(pending)
        self._prompt_pending = bool(pending)

    def _bytes(self, token: int) -> bytes:
        return b"" if token in self._skipped else self._vocabulary.token_bytes(token)

    def push(self, token: int) -> str:
        """The characters that `token` completes, possibly none."""
        return self._decode(self._bytes(token), final=False)

    def finish(self) -> str:
        """What is left: one U+FFFD for bytes that never became a character."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        text = self._decoder.decode(data, final)
        if not text:
            return ""
        if self._prompt_pending:
            self._prompt_pending = False
            if text[0] == REPLACEMENT:
                text = text[1:]
        if self._strip_space and text:
            self._strip_space = False
            text = text.removeprefix(" ")
        return text
