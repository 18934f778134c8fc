"""What a `Grammar` says, as the Lark that llguidance reads; and what is refused.

docs/structured-output.md has what each kind accepts and which limits hold;
`grammar_matcher` runs what is made here.

A grammar of kind "ebnf" is llguidance's Lark: lower-case rules, upper-case terminals, "text",
/regex/, | * + ? {m,n}, `<name>` for a control token, and `%json {schema}` for a JSON value,
which `json_rule` writes:

    start: "<tool_call>\\n" call "\\n</tool_call>"
    call: %json {"type": "object", ...}
"""

from __future__ import annotations

import json
import re
from typing import Any

from lockstep.text.grammar_schema import check_schema
from lockstep.types import Grammar, RequestError

MAX_SOURCE_BYTES = 64 * 1024  # of a regex, a list of choices, or an EBNF from a client
MAX_EBNF_BYTES = 512 * 1024  # with the schemas of all tools in it
MAX_CHOICES = 4096
MAX_RULES = 500  # definitions of an EBNF: the library follows a chain of them by recursion

# Between the parts of a JSON text: nothing, a space, or a line break with its indentation.
# Unbounded space would let a small model write blanks until max_tokens.
WHITESPACE = " |\\n[ \\t]{0,32}"
OPTIONS = '%llguidance {"no_forcing": true}'  # without it masks leave out allowed tokens
_ATTRIBUTES = re.compile(r"^[ \t]*[?!]?[a-z_][\w-]*\s*\[([^\]]*)\]\s*:", re.MULTILINE)
_DEFINITION = re.compile(r"^[ \t]*[?!]?[A-Za-z_][\w-]*\s*(\[[^\]]*\])?\s*:", re.MULTILINE)


def json_rule(schema: Any) -> str:
    """`schema` as a term of an EBNF, to stand after "name: ".

    Raises:
        SchemaError: as `check_schema`.
    """
    check_schema(schema)
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return "%json " + json.dumps(
        {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}, ensure_ascii=False
    )


def literal(text: str) -> str:
    """`text` as a term of an EBNF: these characters and no others."""
    return json.dumps(text, ensure_ascii=False)


def check_ebnf(source: str) -> None:
    """Refuse what only a client's EBNF can hold and the engine would not do as written.

    Raises:
        RequestError: naming it.
    """
    _check_size("ebnf", source, MAX_SOURCE_BYTES)
    if "x-guidance" in source or "%llguidance" in source:
        raise RequestError("grammar: options of the grammar library are not taken", field="grammar")
    for match in _ATTRIBUTES.finditer(source):
        for name in ("temperature", "stop", "max_tokens"):
            if re.search(rf"\b{name}\b", match[1]):
                raise RequestError(
                    f"grammar: the rule attribute {name!r} is not supported", field="grammar"
                )
    position = source.find("%json")
    while position >= 0:
        start = position + len("%json")
        try:
            schema, _ = json.JSONDecoder().raw_decode(source[start:].lstrip())
        except (ValueError, RecursionError):
            schema = True  # the library names the line and column
        check_schema(schema)
        position = source.find("%json", start)


def from_gbnf(source: str) -> str:
    """A grammar in llama.cpp's GBNF ("root ::= ...") as an EBNF of ours.

    Raises:
        RequestError: it is malformed or too large.
    """
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    _check_size("ebnf", source, MAX_SOURCE_BYTES)
    try:
        return any_to_lark(source).replace("%llguidance {}", "")
    except (GbnfToLarkError, ValueError, RecursionError) as error:
        raise RequestError(f"grammar: not a GBNF grammar: {error}", field="grammar") from None


def to_lark(grammar: Grammar) -> str:
    """The grammar as llguidance reads it.

    Raises:
        RequestError: too large or malformed; the message names the node, entry or limit.
    """
    # Loaded with the first grammar: most processes never see one.
    from llguidance import regex_to_lark

    source = grammar.source
    limit = MAX_EBNF_BYTES if grammar.kind == "ebnf" else MAX_SOURCE_BYTES
    if grammar.kind != "json_schema":  # it counts its own
        _check_size(grammar.kind, source, limit)
    match grammar.kind:
        case "json_object":
            return f"start: {json_rule({'type': 'object'})}\n{OPTIONS}\n"
        case "json_schema":
            try:
                schema = json.loads(source)
            except (ValueError, RecursionError) as error:
                raise RequestError(
                    f"grammar: the schema is not JSON ({error})", field="grammar"
                ) from None
            return f"start: {json_rule(schema)}\n{OPTIONS}\n"
        case "regex":
            if not source:
                raise RequestError("grammar: the regular expression is empty", field="grammar")
            # \d and \w are ASCII, as in the patterns of a JSON Schema.
            return f"start: /{regex_to_lark(source, 'dw')}/\n{OPTIONS}\n"
        case "choice":
            texts = "|".join(_quoted(text) for text in _choices(source))
            return f"start: /{texts}/\n{OPTIONS}\n"
        case "ebnf":
            rules = len(_DEFINITION.findall(source))
            if rules > MAX_RULES:
                raise RequestError(
                    f"grammar: {rules} definitions, at most {MAX_RULES} are allowed",
                    field="grammar",
                )
            return f"{source}\n{OPTIONS}\n"


def _check_size(kind: str, source: str, limit: int) -> None:
    size = len(source.encode("utf-8", "surrogatepass"))  # `Grammar` refuses lone surrogates
    if size > limit:
        raise RequestError(
            f"grammar: {kind} of {size} bytes, at most {limit} are allowed", field="grammar"
        )


def _choices(source: str) -> list[str]:
    try:
        texts = json.loads(source)
    except ValueError:
        texts = None
    if (
        not isinstance(texts, list)
        or not 0 < len(texts) <= MAX_CHOICES
        or not all(isinstance(text, str) and text for text in texts)
    ):
        raise RequestError(
            f"grammar: a choice is a list of 1 to {MAX_CHOICES} non-empty texts", field="grammar"
        )
    return texts


def _quoted(text: str) -> str:
    """A regular expression for exactly this text."""
    return re.sub(r"[^\w ]", lambda found: f"\\x{{{ord(found[0]):x}}}", text, flags=re.ASCII)
