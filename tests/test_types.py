"""Records refuse on construction what nothing behind them could use, by name and value."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.text.grammar import check_ebnf, from_gbnf
from lockstep.types import MAX_LOGIT_BIAS_ENTRIES, Grammar, RequestError, SamplingParams


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"temperature": 1e7}, r"temperature must be in \[0, 1e\+06\], got 10000000.0"),
        ({"logit_bias": [1]}, r"logit_bias must map token ids to numbers, got \[1\]"),
        (
            {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS_ENTRIES + 1), 0.0)},
            "logit_bias has 1025 entries, at most 1024 are allowed",
        ),
        ({"logit_bias": {1: 101.0}}, r"logit_bias must be in \[-100, 100\], got 101.0"),
    ],
)
def test_a_refusal_names_field_value_and_limit(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint) as caught:
        SamplingParams(**values)
    assert caught.value.field == next(iter(values))


@pytest.mark.parametrize("kind", ["regex", "choice", "json_schema", "ebnf"])
def test_a_grammar_of_half_a_surrogate_pair_is_refused(kind: Any) -> None:
    """Before it reaches an engine, which hashes grammars as UTF-8."""
    with pytest.raises(RequestError, match="lone surrogate at character 1") as caught:
        Grammar(kind, "a\ud800b")
    assert caught.value.field == "grammar"


def test_checks_before_a_grammar_leave_surrogates_to_it() -> None:
    check_ebnf('start: "\ud800"')
    for source in ('start: "\ud800"', from_gbnf('root ::= "\ud800"')):
        with pytest.raises(RequestError, match="lone surrogate"):
            Grammar("ebnf", source)
