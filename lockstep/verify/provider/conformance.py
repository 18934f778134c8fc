"""Are functions called as they were declared? The same cases at both sides, several times each.

Every attempt passes or fails; attempts of one case at temperature 1 with different seeds count as
independent. The two-sided test of B against A is McNemar's, on attempts paired by case and seed
(exact, sign test). What a rate of failures comes to in an agent is shown as 1 - (1 - p)^n.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema

from lockstep.verify.endpoint import ProbeRequest, Reading, Source
from lockstep.verify.provider.findings import Finding, passing
from lockstep.verify.provider.fingerprint import in_turns
from lockstep.verify.report import Section
from lockstep.verify.statistics import clopper_pearson, percent, sign_test
from lockstep.verify.verdict import Verdict

ATTEMPTS = 4  # a case
CALLS = (10, 50, 100)  # of an agent


def _function(name: str, properties: dict[str, Any], required: Sequence[str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


_BOOK = _function(
    "book_table",
    {
        "name": {"type": "string"},
        "guests": {"type": "integer", "minimum": 1},
        "when": {"enum": ["lunch", "dinner"]},
    },
    ["name", "guests", "when"],
)
_TAG = _function(
    "tag",
    {"text": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
    ["text", "tags"],
)
_MOVE = _function(
    "move",
    {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
            "required": ["x", "y"],
        }
    },
    ["point"],
)
_NOW = _function("now", {}, [])
TOOLS = (_BOOK, _TAG, _MOVE, _NOW)
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


@dataclass(frozen=True, slots=True)
class Case:
    """A question and the function that must be called, or "" for none."""

    name: str
    text: str
    choice: str | dict[str, Any]
    wanted: str = ""


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


CASES = (
    Case("types and enums", "A table for Ada, 4 people, dinner.", _named("book_table"), "*"),
    Case("quotes and accents", 'Tag the text: she said "naïve" in Zürich.', _named("tag"), "tag"),
    Case("nested object", "Go to x = 3.5, y = -2.", _named("move"), "move"),
    Case("no arguments", "What time is it?", _named("now"), "now"),
    Case("required", "Book lunch for 2, name Grace.", "required", "*"),
    Case("none", "Book a table for Ada, 4 people, dinner.", "none"),
)


def failure(case: Case, reading: Reading) -> str:
    """What is wrong with an attempt; "" if nothing is."""
    if not reading.ok:
        return reading.error
    if case.choice == "none":
        return "a call though tool_choice is none" if reading.tool_calls else ""
    if not reading.tool_calls:
        return f"no call; finish_reason {reading.finish!r}"
    for call in reading.tool_calls:
        if call.name not in SCHEMAS or case.wanted not in ("*", call.name):
            return f"a call of {call.name!r}"
        try:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        except (ValueError, RecursionError) as error:
            return f"arguments that are no JSON: {error}"
        except jsonschema.ValidationError as error:
            return f"arguments against the schema: {error.message}"
    return ""


@dataclass(frozen=True, slots=True)
class Attempts:
    """Failures by case, "" for those that passed; attempt i of A and of B had the same seed.

    Attributes:
        unread: pairs left out, because one of the two met a limit of requests or no server.
    """

    a: dict[str, list[str]]
    b: dict[str, list[str]]
    unread: Sequence[str] = ()


async def call_functions(
    a: Source,
    b: Source,
    *,
    attempts: int = ATTEMPTS,
    progress: Callable[[], None] = lambda: None,
) -> Attempts:
    """Ask every case of both sides."""
    unread: list[str] = []
    found = Attempts({}, {}, unread)
    for case in CASES:
        requests = [
            ProbeRequest(
                messages=({"role": "user", "content": case.text},),
                max_tokens=128,
                temperature=1.0,
                seed=seed,
                tools=TOOLS,
                tool_choice=case.choice,
            )
            for seed in range(attempts)
        ]
        left, right = await in_turns(a, b, requests)
        pairs = list(zip(left, right, strict=True))
        whole = [pair for pair in pairs if not any(map(passing, pair))]
        unread += [one.error for pair in pairs for one in pair if passing(one)][
            : len(pairs) - len(whole)
        ]
        found.a[case.name] = [failure(case, one) for one, _ in whole]
        found.b[case.name] = [failure(case, other) for _, other in whole]
        progress()
    return found


def compound(p: float, calls: int) -> float:
    """The chance that at least one of so many independent calls fails."""
    return float(1.0 - (1.0 - p) ** calls)


def judge(found: Attempts, alpha: float) -> Finding:
    """Fail where one side fails more often than chance, or either side fails every time."""
    name = "function calls"
    pairs = [
        (one, other)
        for case in found.a
        for one, other in zip(found.a[case], found.b[case], strict=True)
    ]
    total = len(pairs)
    if not total or len(found.unread) > total:
        reason = f"{len(found.unread)} attempts could not be read: {found.unread[0]}"
        return Finding(name, Verdict.UNDECIDABLE, reason, Section(name, [reason]))
    failed = {"A": sum(bool(x) for x, _ in pairs), "B": sum(bool(y) for _, y in pairs)}
    only = {
        "A": sum(bool(x) and not y for x, y in pairs),
        "B": sum(bool(y) and not x for x, y in pairs),
    }
    rows: list[list[object]] = []
    for case in found.a:
        cells: list[object] = [case]
        for side in (found.a, found.b):
            wrong = [one for one in side[case] if one]
            cells += [f"{len(wrong)} of {len(side[case])}", wrong[0] if wrong else ""]
        rows.append(cells)
    rates = {side: clopper_pearson(count, total) for side, count in failed.items()}
    worse = "A" if only["A"] > only["B"] else "B"
    better = "B" if worse == "A" else "A"
    p_value = min(1.0, 2 * sign_test(only[worse], only[better]))
    shown = ", ".join(f"{s} {failed[s]} of {total} ({rates[s]})" for s in failed)
    if found.unread:
        shown += f"; {len(found.unread)} attempts could not be read: {found.unread[0]}"
    if all(failed[side] == total for side in failed):
        verdict, reason = Verdict.UNDECIDABLE, f"neither side calls functions: {pairs[0][0]}"
    elif p_value <= alpha:
        verdict, reason = Verdict.FAIL, f"{worse} fails more often (p = {p_value:.2g}): {shown}"
    else:
        verdict, reason = Verdict.PASS, f"no difference found; failed: {shown}"
    text = [
        reason,
        "What this comes to in an agent that makes n calls, with failures independent: "
        + "; ".join(_agent(side, failed[side] / total, rates[side].high) for side in failed),
    ]
    head = ["case", "A failed", "for example", "B failed", "for example"]
    figures = {
        "failed": failed,
        "attempts": total,
        "p_value": p_value,
        "agent": {s: {str(n): compound(failed[s] / total, n) for n in CALLS} for s in failed},
    }
    return Finding(name, verdict, reason, Section(name, text, head, rows), figures)


def _agent(side: str, p: float, high: float) -> str:
    parts = [
        f"n = {n}: {percent(compound(p, n))} (at most {percent(compound(high, n))})" for n in CALLS
    ]
    return f"{side}: {', '.join(parts)}"
