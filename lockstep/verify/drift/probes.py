"""The fixed set of questions. A changed set is another set: its digest stands in the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lockstep.verify.canonical import digest
from lockstep.verify.probe import ProbeRequest

ALTERNATIVES = 20  # most that OpenAI's chat route reports
TEXT_TOKENS = 48


class Kind(StrEnum):
    """What is read in the answer to a probe."""

    TOKEN = "token"  # the distribution of its first token
    TOOL = "tool"  # function calls
    JSON = "json"  # an answer that should be a JSON object
    TEXT = "text"  # length, repetition, refusal


@dataclass(frozen=True, slots=True)
class Probe:
    """One question; `name` is unique in its set."""

    name: str
    kind: Kind
    request: ProbeRequest


# Next tokens that no model is quite sure of: a small change of the weights, the template or the
# context moves them, where a sure one stays at probability 1.
_TOKENS = {
    "colour": "Name a colour. Answer with one word.",
    "animal": "Name an animal. Answer with one word.",
    "number": "Pick a number between 1 and 100. Answer with the number only.",
    "city": "Name a city in Europe. Answer with one word.",
    "fruit": "Name a fruit. Answer with one word.",
    "name": "Invent a first name for a character in a novel. Answer with one word.",
    "letter": "Pick a letter of the alphabet. Answer with one letter.",
    "weekday": "Which day of the week is the best one? Answer with one word.",
    "french": "Translate into French, one word: happiness",
    "german": "Translate into German, one word: village",
    "opposite": "What is the opposite of 'ancient'? One word.",
    "sentiment": "Is this review positive or negative? 'It was fine, I suppose.' One word.",
    "truth": "Is a tomato a vegetable? Answer yes or no.",
    "sum": "What is 17 + 26? Answer with the number only.",
    "product": "What is 13 * 7? Answer with the number only.",
    "sequence": "Continue with one number: 1, 1, 2, 3, 5, 8,",
    "code": "Complete with one word of Python: for i in",
    "story": "Continue with one word: Once upon a time there was a",
    "unicode": "Continue with one word: Zürich, München, Köln,",
    "system": "What are you? Answer with one word.",
}
_TEXTS = {
    "tide": "Explain in two sentences why the sea has tides.",
    "list": "List three things to pack for a walk in the rain.",
    "harmless": "How do I kill a Python process that hangs?",
    "email": "Write a short e-mail that moves a meeting to Friday.",
}
_JSON = {
    "person": "Give a JSON object with the keys name and age for a person called Ada, aged 36.",
    "colours": 'Give a JSON object with one key "colours" that lists three colours.',
    "nested": 'Give a JSON object {"point": {"x": 1, "y": 2}} with other numbers.',
}
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city"],
        },
    },
}
_NOTE = {
    "type": "function",
    "function": {
        "name": "save_note",
        "description": "Keep a note.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "tags": {"type": "array"}},
            "required": ["text"],
        },
    },
}
_TOOLS = {
    "weather": "What will the weather be in Zürich for the next 3 days, in celsius?",
    "note": 'Save a note that says: the sign read "no entry", tagged road and sign.',
    "choice": "Please look up the weather in Lima.",
}


def default_probes() -> tuple[Probe, ...]:
    """Thirty questions; a round costs some 600 tokens of answers."""
    probes = [
        Probe(f"token/{name}", Kind.TOKEN, _ask(text, 1, logprobs=ALTERNATIVES))
        for name, text in _TOKENS.items()
    ]
    probes += [
        Probe(f"text/{name}", Kind.TEXT, _ask(text, TEXT_TOKENS, logprobs=5))
        for name, text in _TEXTS.items()
    ]
    object_wanted = {"response_format": {"type": "json_object"}}
    probes += [
        Probe(f"json/{name}", Kind.JSON, _ask(text, 64, extra=object_wanted))
        for name, text in _JSON.items()
    ]
    tools = (_WEATHER, _NOTE)
    probes += [
        Probe(f"tool/{name}", Kind.TOOL, _ask(text, 96, tools=tools, tool_choice="required"))
        for name, text in _TOOLS.items()
    ]
    return tuple(probes)


def probes_digest(probes: tuple[Probe, ...]) -> str:
    """What identifies a set of probes."""
    return digest([[probe.name, probe.kind.value, probe.request.canonical()] for probe in probes])


def _ask(text: str, max_tokens: int, **fields: Any) -> ProbeRequest:
    return ProbeRequest(
        messages=({"role": "user", "content": text},), max_tokens=max_tokens, seed=0, **fields
    )
