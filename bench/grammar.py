"""What grammars cost: set-up, compilation and masks on SmolLM2's vocabulary, beside a forward pass.

    python -m bench.grammar                      # the library in use, as the engine uses it
    PYTHONPATH=DIR python -m bench.grammar       # and xgrammar, if DIR has it

xgrammar imports torch and is not among the project's dependencies:
`pip install --no-deps --target DIR xgrammar==0.2.9 apache-tvm-ffi`.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from lockstep.text import Tokenizer
from lockstep.text.grammar_matcher import GrammarCompiler
from lockstep.types import Grammar
from lockstep.weights import open_checkpoint

STEP_MS = 14.0  # one decode step of SmolLM2 on two cores, docs/performance.md
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
        "kind": {"enum": ["a", "b", "c"]},
        "address": {
            "type": ["object", "null"],
            "properties": {
                "street": {"type": "string"},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FIELDS = {f"p{i}": {"anyOf": [{"type": "string"}, {"type": "number"}, PERSON]} for i in range(40)}
BIG = {
    "type": "object",
    "properties": FIELDS,
    "required": [f"p{i}" for i in range(0, 40, 2)],
    "additionalProperties": False,
}
TEXT = (
    '{"name":"Ann Lee","age":42,"tags":["x","yy zz"],"kind":"b",'
    '"address":{"street":"Main St 5","zip":"12345"}}'
)
BIG_TEXT = json.dumps({f"p{i}": "abc def" for i in range(0, 40, 2)}, separators=(",", ":"))
CASES = (
    ("schema", Grammar("json_schema", json.dumps(PERSON)), TEXT),
    ("schema of 40 fields", Grammar("json_schema", json.dumps(BIG)), BIG_TEXT),
    ("any object", Grammar("json_object"), TEXT),
    ("regex", Grammar("regex", r"[A-Z][a-z]{2,20} [0-9]{3}-[0-9]{4}"), "Hello 123-4567"),
    ("choice", Grammar("choice", json.dumps([f"option {i}" for i in range(50)])), "option 37"),
)


@dataclass
class Times:
    """Milliseconds to compile with the first mask; microseconds of masks and of tokens taken."""

    compile: float
    masks: list[float]
    takes: list[float]


def timed(work: Callable[..., object], *given: object) -> float:
    began = time.perf_counter()
    work(*given)
    return time.perf_counter() - began


def ours(tokenizer: Tokenizer) -> Iterator[tuple[str, float | Times]]:
    """The library as the engine uses it."""
    compiler = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size)
    yield "set-up", 1e3 * timed(compiler.compile, Grammar("regex", "x"))
    for name, grammar, text in CASES:
        spent = [timed(compiler._compile, grammar) for _ in range(5)]
        state = compiler.compile(grammar).start(tokenizer.eos_ids)
        masks, takes = [], []
        for token in tokenizer.encode(text, add_special_tokens=False):
            masks.append(1e6 * timed(state.compute))
            takes.append(1e6 * timed(state.advance, token))
        assert not state.error
        yield name, Times(1e3 * statistics.median(spent), masks, takes)


def xgrammar(tokenizer: Tokenizer) -> Iterator[tuple[str, float | Times]]:
    """The other library, by its own documentation."""
    import xgrammar as xgr  # type: ignore[import-not-found]

    size = tokenizer.vocab_size
    pieces = [tokenizer.token_bytes(token) for token in range(size)]
    began = time.perf_counter()
    info = xgr.TokenizerInfo(
        pieces,
        vocab_type=xgr.VocabType.RAW,
        vocab_size=size,
        stop_token_ids=list(tokenizer.eos_ids),
    )
    yield "set-up", 1e3 * (time.perf_counter() - began)
    bits = xgr.allocate_token_bitmask(1, size)

    def build(grammar: Grammar) -> Any:
        compiler = xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        if grammar.kind == "regex":
            compiled = compiler.compile_regex(grammar.source)
        elif grammar.kind == "choice":
            texts = map(json.dumps, json.loads(grammar.source))
            compiled = compiler.compile_grammar("root ::= " + " | ".join(texts))
        elif grammar.kind == "json_object":
            compiled = compiler.compile_builtin_json_grammar()
        else:
            compiled = compiler.compile_json_schema(grammar.source)
        matcher = xgr.GrammarMatcher(compiled)
        matcher.fill_next_token_bitmask(bits)
        return matcher

    for name, grammar, text in CASES:
        spent = [timed(build, grammar) for _ in range(5)]
        matcher = build(grammar)
        masks, takes = [], []
        for token in tokenizer.encode(text, add_special_tokens=False):
            masks.append(1e6 * timed(matcher.fill_next_token_bitmask, bits))
            takes.append(1e6 * timed(matcher.accept_token, token))
        yield name, Times(1e3 * statistics.median(spent), masks, takes)


def main() -> None:
    """Print one table a library; the limit beside a mask is the step that it hides behind."""
    console = Console()
    tokenizer = open_checkpoint("smollm2").tokenizer()
    libraries = [("llguidance", ours)]
    if importlib.util.find_spec("xgrammar") is not None:
        libraries.append(("xgrammar", xgrammar))
    for title, rows in libraries:
        table = Table(title=f"{title}, {tokenizer.vocab_size} tokens")
        for column in (
            "grammar",
            "compile, ms",
            "mask, µs",
            "worst mask",
            "token, µs",
            "of a step",
        ):
            table.add_column(column, justify="left" if column == "grammar" else "right")
        for name, found in rows(tokenizer):
            if isinstance(found, float):
                table.add_row(name, f"{found:.1f}", "", "", "", "")
                continue
            mask = statistics.median(found.masks)
            table.add_row(
                name,
                f"{found.compile:.2f}",
                f"{mask:.1f}",
                f"{max(found.masks):.0f}",
                f"{statistics.median(found.takes):.1f}",
                f"{mask / 10 / STEP_MS:.2f}%",
            )
        console.print(table)


if __name__ == "__main__":
    main()
