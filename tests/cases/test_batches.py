"""A batch on the real SmolLM2: the answers are those of the routes, bit for bit."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai

from tests.server.support import wait_until

PROMPTS = ("The capital of France is", "Water boils at", "Once upon a time", "é 你好 🙂", "2 + 2 =")


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
    rows = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies)
    ]
    data = "\n".join(json.dumps(row) for row in rows)
    file = client.files.create(file=("in.jsonl", data.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", 60)
    batch = client.batches.retrieve(batch.id)
    assert batch.error_file_id is None
    text = client.files.content(batch.output_file_id or "").text
    answers = [json.loads(line)["response"]["body"] for line in text.splitlines()]
    assert len(answers) == len(bodies)
    alone += [http.post(url, json=body).json() for body in bodies[4:]]
    for answer, direct in zip(answers, alone, strict=True):
        assert answer["choices"] == direct["choices"], "a batch is company, and moves no bit"
        assert answer["choices"][0]["message"]["content"]
