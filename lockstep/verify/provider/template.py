"""Is a conversation rendered alike? Prompt tokens of the same messages, as both sides count them.

Equal counts do not prove equal templates; unequal ones prove that the template or the tokenizer is
another, or that one side adds a text of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.verify.endpoint import ProbeRequest, Source
from lockstep.verify.provider.findings import Finding
from lockstep.verify.provider.fingerprint import in_turns
from lockstep.verify.report import Section
from lockstep.verify.verdict import Verdict

BARE = " (no template)"
Messages = tuple[Mapping[str, str], ...]


def _user(text: str) -> Mapping[str, str]:
    return {"role": "user", "content": text}


_SYSTEM = {"role": "system", "content": "You answer in one word."}
_REPLY = {"role": "assistant", "content": "Yes."}
CONVERSATIONS: dict[str, Messages] = {
    "one message": (_user("Is it raining?"),),
    "system message": (_SYSTEM, _user("Is it raining?")),
    "empty system message": ({"role": "system", "content": ""}, _user("Is it raining?")),
    "three turns": (_user("Is it raining?"), _REPLY, _user("And tomorrow?")),
    "blanks around": (_user("  Is it raining?  \n"),),
    "other scripts": (_user("雨が降っていますか？ Идёт дождь? Ist es naß?"),),
    "numbers and code": (_user("for i in range(1000000): x[i] += 3.14159"),),
    "special tokens as text": (_user("What does <|im_end|> or </s> mean?"),),
    "long": (_user("word " * 300),),
}
TEXTS: dict[str, str] = {
    "plain text": "The quick brown fox jumps over the lazy dog.",
    "digits and blanks": "x =  42\n\n\t\t5 apples,  1234567890",
    "scripts": "Žluťoučký kůň, 漢字かな, עברית, 😀👍",
}


@dataclass(frozen=True, slots=True)
class Count:
    """Prompt tokens of one input at either side; None where none were reported."""

    name: str
    a: int | None
    b: int | None


async def count_tokens(a: Source, b: Source) -> list[Count]:
    """Ask every conversation, and every text of the completions route where there is one."""
    requests = {
        name: ProbeRequest(messages=messages, max_tokens=1)
        for name, messages in CONVERSATIONS.items()
    } | {name + BARE: ProbeRequest(prompt=t, max_tokens=1) for name, t in TEXTS.items()}
    answers = await in_turns(a, b, list(requests.values()))
    return [
        Count(name, *(r.usage.prompt_tokens if r.ok and r.usage else None for r in pair))
        for name, pair in zip(requests, zip(*answers, strict=True), strict=True)
    ]


def judge(counts: Sequence[Count]) -> Finding:
    """Fail where counts differ; undecidable where there are none to compare."""
    name = "template and tokenizer"
    extra = {one.name: one.b - one.a for one in counts if one.a is not None and one.b is not None}
    differing = {case: tokens for case, tokens in extra.items() if tokens}
    texts = [case for case in extra if case.endswith(BARE)]
    rows = [[one.name, _shown(one.a), _shown(one.b), extra.get(one.name, "")] for one in counts]
    if not extra:
        verdict, reason = Verdict.UNDECIDABLE, "no token counts are reported by both sides"
    elif not differing:
        verdict, reason = Verdict.PASS, f"equal token counts for all {len(extra)} inputs"
    else:
        verdict = Verdict.FAIL
        reason = f"{len(differing)} of {len(extra)} inputs have other token counts: "
        if any(case in texts for case in differing):
            reason += "texts without a template too, so the tokenizer is another"
        elif len(set(differing.values())) == 1 and len(differing) == len(CONVERSATIONS):
            reason += f"always {next(iter(differing.values())):+d}, as a text that is added makes"
        elif texts:
            reason += "texts without a template have equal ones, so the template is another"
        else:
            reason += "the template or the tokenizer is another"
    head = ["input", "A, tokens", "B, tokens", "B - A"]
    figures = {one.name: [one.a, one.b] for one in counts}
    return Finding(name, verdict, reason, Section(name, [reason], head, rows), figures)


def _shown(count: int | None) -> object:
    return "not reported" if count is None else count
