"""A batch on the real SmolLM2: the answers are those of the routes, bit for bit."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.server.support import wait_until

PROMPTS = ("The capital of France is", "Water boils at", "Once upon a time", "é 你好 🙂", "2 + 2 =")


OTHERS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The sea is", "max_tokens": 4, "logprobs": 2, "seed": 3},
    "/v1/responses": {"input": "Say hello.", "max_output_tokens": 4, "temperature": 0},
    "/v1/embeddings": {"input": ["a cat", "a dog"]},
    "/v1/score": {"context": "The capital of France is", "options": [" Paris", " London"]},
    "/v1/decisions": {
        "input": "I was charged twice.",
        "questions": [{"type": "predicate", "instructions": "It is about billing."}],
    },
}
VOLATILE = ("id", "created", "created_at", "completed_at", "usage", "output")


def run(client: openai.OpenAI, url: str, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies)
    ]
    data = "\n".join(json.dumps(row) for row in rows)
    file = client.files.create(file=("in.jsonl", data.encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint=url,  # type: ignore[arg-type]
        completion_window="24h",
    )
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", 60)
    batch = client.batches.retrieve(batch.id)
    assert batch.error_file_id is None
    text = client.files.content(batch.output_file_id or "").text
    return [json.loads(line)["response"]["body"] for line in text.splitlines()]


def test_a_batch_gives_what_the_routes_give(client: openai.OpenAI, http: httpx.Client) -> None:
    bodies: list[dict[str, Any]] = [
        {
            "model": "smollm2",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 12,
            "temperature": temperature,
            "seed": 7,
            "logprobs": True,
            "top_logprobs": 2,
            "return_token_ids": True,
        }
        for prompt in PROMPTS
        for temperature in (0, 0.9)
    ]
    url = "/v1/chat/completions"
    alone = [http.post(url, json=body).json() for body in bodies[:4]]
    answers = run(client, url, *bodies)
    assert len(answers) == len(bodies)
    alone += [http.post(url, json=body).json() for body in bodies[4:]]
    for answer, direct in zip(answers, alone, strict=True):
        assert answer["choices"] == direct["choices"], "a batch is company, and moves no bit"
        assert answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("url", OTHERS)
def test_every_kind_of_route_in_a_batch(
    client: openai.OpenAI, http: httpx.Client, url: str
) -> None:
    body = {"model": "smollm2", **OTHERS[url]}
    (answer,) = run(client, url, body)
    direct = http.post(url, json=body).json()
    assert _plain(answer) == _plain(direct)
    if url == "/v1/responses":
        said = [reply["output"][0]["content"][0]["text"] for reply in (answer, direct)]
        assert said[0] == said[1] != ""


def _plain(reply: dict[str, Any]) -> dict[str, Any]:
    """Without ids, times and what the prefix cache changes; a response's output holds ids."""
    return {name: value for name, value in reply.items() if name not in VOLATILE}
