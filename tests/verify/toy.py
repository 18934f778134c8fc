"""A vendor's server over a toy model whose every property is known.

The next token's distribution is a function of the whole rendered context, so that anything that
changes the context (a template, a truncation) changes it; noise, if asked for, is added to the
logits anew for every request, as batching does on other engines.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from tests.verify.servers import Vendor

TEXT = (
    "the sea moon water pulls tide earth high low rises falls twice day night sun because of "
    "and it moves red green blue one two three north south west east rain coat boots map"
)
END = "<end>"
VOCABULARY = (*TEXT.split(), END)


@dataclass
class Toy:
    """What the server is.

    Attributes:
        weights: another value is another model.
        noise: standard deviation of the logits from request to request.
        template: how a message is rendered; another one is another prompt.
        window: most words of a prompt that the model sees; earlier ones are dropped in silence.
        top_k: a truncation of the distribution that nobody asked for; 0 is none.
        temperature_scale: what the server makes of the temperature.
        reports: whether logprobs are reported.
        tools: whether calls parse, as a share of them.
    """

    weights: int = 1
    noise: float = 0.0
    template: str = "<|{role}|>{content}\n"
    window: int = 100_000
    top_k: int = 0
    temperature_scale: float = 1.0
    reports: bool = True
    tools: float = 1.0
    source: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def vendor(self) -> Vendor:
        return Vendor(self.respond, ("toy",))

    def respond(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        chat = path.endswith("/chat/completions")
        if chat:
            prompt = "".join(
                self.template.format(role=m["role"], content=m["content"] or "")
                for m in body["messages"]
            )
        else:
            prompt = body["prompt"]
        words = prompt.split()
        context = " ".join(words[-self.window :])
        usage = {"prompt_tokens": min(len(words), self.window)}
        if body.get("tools") and body.get("tool_choice") != "none":
            return 200, self.call(body, usage)
        if body.get("response_format"):
            return 200, self.reply(chat, body, [('{"a": 1}', -0.1, [])], "stop", usage)
        needle = re.search(r"code word is (\w+)", context)
        if needle and "code word?" in context:
            entries = [(needle[1], -0.01, [(needle[1], -0.01), ("no", -4.6)])]
            return 200, self.reply(chat, body, entries, "stop", usage)
        return 200, self.reply(chat, body, *self.generate(context, body), usage)

    def generate(
        self, context: str, body: dict[str, Any]
    ) -> tuple[list[tuple[str, float, list[tuple[str, float]]]], str]:
        entries: list[tuple[str, float, list[tuple[str, float]]]] = []
        asked = body.get("logprobs")
        alternatives = body.get("top_logprobs", 0) if asked is True else asked or 0
        temperature = body.get("temperature", 1.0) * self.temperature_scale
        draws = np.random.default_rng(body.get("seed"))
        said = ""
        for _ in range(body.get("max_tokens", 16)):
            logprobs = self.distribution(context + said)
            ranked = np.argsort(-logprobs)
            if temperature == 0:
                chosen = int(ranked[0])
            else:
                scaled = logprobs / temperature
                if self.top_k:
                    scaled[ranked[self.top_k :]] = -np.inf
                if body.get("top_p", 1.0) < 1.0:
                    ahead = np.cumsum(np.exp(logprobs[ranked])) - np.exp(logprobs[ranked])
                    scaled[ranked[ahead >= body["top_p"]]] = -np.inf
                weights = np.exp(scaled - scaled.max())
                chosen = int(draws.choice(len(weights), p=weights / weights.sum()))
            text = said + _word(chosen)
            if VOCABULARY[chosen] == END or any(stop in text for stop in body.get("stop", ())):
                return entries, "stop"
            top = [(_word(int(i)), float(logprobs[i])) for i in ranked[:alternatives]]
            entries.append((_word(chosen), float(logprobs[chosen]), top))
            said += _word(chosen)
        return entries, "length"

    def distribution(self, context: str) -> np.ndarray[Any, Any]:
        """Logprobs float64 [len(VOCABULARY)]."""
        logits = _logits(self.weights, context)
        if self.noise:
            logits = logits + self.source.normal(0, self.noise, len(logits))
        return np.asarray(logits - np.logaddexp.reduce(logits))

    def call(self, body: dict[str, Any], usage: dict[str, int]) -> dict[str, Any]:
        function = body["tools"][0]["function"]
        choice = body.get("tool_choice")
        if isinstance(choice, dict):
            (function,) = [
                tool["function"]
                for tool in body["tools"]
                if tool["function"]["name"] == choice["function"]["name"]
            ]
        arguments = json.dumps(_example(function.get("parameters") or {}))
        if self.source.random() >= self.tools:
            arguments = arguments[:-1]
        called = {"name": function["name"], "arguments": arguments}
        message = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": called}],
        }
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        return {"choices": [choice], "usage": {**usage, "completion_tokens": 9}}

    def reply(
        self,
        chat: bool,
        body: dict[str, Any],
        entries: list[tuple[str, float, list[tuple[str, float]]]],
        finish: str,
        usage: dict[str, int],
    ) -> dict[str, Any]:
        text = "".join(word for word, _, _ in entries)
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        reports = self.reports and body.get("logprobs")
        if chat:
            choice["message"] = {"role": "assistant", "content": text}
            content = [
                {
                    "token": word,
                    "logprob": value,
                    "top_logprobs": [{"token": w, "logprob": p} for w, p in top],
                }
                for word, value, top in entries
            ]
            choice["logprobs"] = {"content": content} if reports else None
        else:
            choice["text"] = text
            if reports:
                choice["logprobs"] = {
                    "tokens": [word for word, _, _ in entries],
                    "token_logprobs": [value for _, value, _ in entries],
                    "top_logprobs": [dict(top) for _, _, top in entries],
                }
        return {
            "choices": [choice],
            "usage": {**usage, "completion_tokens": len(entries)},
            "system_fingerprint": f"toy-{self.weights}",
        }


@lru_cache(maxsize=50_000)
def _logits(weights: int, context: str) -> np.ndarray[Any, Any]:
    raw = hashlib.sha256(f"{weights} {context}".encode()).digest()
    logits = np.random.default_rng(int.from_bytes(raw[:8], "big")).normal(0, 2, len(VOCABULARY))
    logits[-1] -= 2.0
    return logits


def _word(index: int) -> str:
    return " " + VOCABULARY[index]


def _example(schema: dict[str, Any]) -> Any:
    """A value that keeps to a schema."""
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "array":
            return [_example(schema.get("items", {"type": "string"}))]
        case "boolean":
            return True
        case "string":
            return 'Zürich "x"'
        case _:
            properties = schema.get("properties", {})
            return {name: _example(inner) for name, inner in properties.items()}
