"""What the tests of grammars share: states, walks, and whether a text fits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.text import Tokenizer
from lockstep.text.grammar_matcher import GrammarCompiler, GrammarState, has
from lockstep.types import Grammar

ROWS = 49160  # the model's head has a few rows more than SmolLM2's vocabulary
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "nick": {"type": ["string", "null"], "pattern": "^[a-z]{1,6}$"},
        "tags": {"type": "array", "items": {"enum": ["a", "b c", 3, None]}, "maxItems": 3},
    },
    "required": ["name", "nick", "tags"],
    "additionalProperties": False,
}


def start(compiler: GrammarCompiler, grammar: Grammar, stop_ids: Sequence[int]) -> GrammarState:
    return compiler.compile(grammar).start(stop_ids)


def ids_of(words: np.ndarray) -> list[int]:
    return [int(i) for i in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))]


def walk(
    state: GrammarState, tokenizer: Tokenizer, seed: int, most: int = 60
) -> tuple[str, list[int], bool]:
    """Text and tokens of a random walk, and whether it came to the grammar's end."""
    chance = np.random.default_rng(seed)
    taken: list[int] = []
    while len(taken) < most and not state.done:
        words = state.pending().words()
        assert not state.error, state.error
        assert words.any() or state.may_end
        if not words.any() or (state.may_end and chance.random() < 0.3):
            return _text(tokenizer, taken), taken, True
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        # Short tokens more often, so that walks end.
        some = [int(token) for token in chance.choice(allowed, 8)]
        token = min(some, key=lambda t: len(tokenizer.token_bytes(t)))
        if token in tokenizer.eos_ids:
            return _text(tokenizer, taken), taken, True
        taken.append(token)
        state.advance(token)
    return _text(tokenizer, taken), taken, state.done


def _text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, tokens)).decode("utf-8", "replace")


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    state = start(compiler, grammar, tokenizer.eos_ids)
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not has(state.pending().words(), token):
            return False
        state.advance(token)
    return state.done or (state.pending().words() is not None and state.may_end)
