"""On real weights over HTTP: what is read and not written. Decisions, scores, embeddings."""

from __future__ import annotations

import base64
import math
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import numpy as np
import openai
import pytest
from typesafe_sdk import Choice, Noul, Score, TypeSafeClient

from lockstep.async_llm import AsyncLLM
from tests.decisions.test_docs import blocks
from tests.server.support import ServerThread

TEXT = "I was charged twice for my order and nobody answers my emails. Refund me now!"
QUESTIONS: list[Any] = [
    {"type": "predicate", "instructions": "The message is about billing."},
    {
        "type": "choice",
        "instructions": "What is the tone?",
        "choices": [{"value": "calm"}, {"value": "angry", "description": "upset"}],
    },
    {
        "type": "score",
        "instructions": "How urgent is it?",
        "levels": [{"label": "can wait"}, {"label": "this week"}, {"label": "today"}],
    },
    {
        "type": "choice",
        "instructions": "Which topic?",
        "choices": [{"value": f"topic {i}"} for i in range(40)],
    },
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with ServerThread(lambda: AsyncLLM("smollm2", max_context=4096)) as made:
        yield made


@pytest.fixture
def client(server: ServerThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def http(server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


def test_decisions_add_up_and_do_not_see_each_other(client: openai.OpenAI) -> None:
    def ask(questions: list[Any]) -> list[Any]:
        return client.decisions.create(model="smollm2", input=TEXT, questions=questions).answers

    together = ask(QUESTIONS)
    for answer in together[1:]:
        total = math.fsum(entry.probability for entry in answer.probabilities)
        assert math.isclose(total, 1.0, rel_tol=1e-9)
    assert 0.0 < together[0].probability < 1.0
    assert [ask([question])[0] for question in QUESTIONS] == together
    assert ask(QUESTIONS[::-1])[::-1] == together


def test_the_usage_shows_that_the_input_was_read_once(client: openai.OpenAI) -> None:
    text = "Some other input of this test. " * 40
    first, again = (
        client.decisions.create(model="smollm2", input=text, questions=QUESTIONS[:3]).usage
        for _ in range(2)
    )
    details = first.input_tokens_details
    assert details.cached_tokens + details.cache_write_tokens == first.input_tokens
    assert first.input_tokens < 2 * len(text.split())
    assert again.input_tokens_details.cached_tokens >= again.input_tokens - 3


def test_typesafe_asks_the_same_model(server: ServerThread, client: openai.OpenAI) -> None:
    with TypeSafeClient(base_url=server.url, api_key="none") as typesafe:
        reply = typesafe.system_one(
            TEXT,
            {
                "billing": Noul(instructions="The message is about billing."),
                "tone": Choice(
                    instructions="What is the tone?", criteria={"calm": None, "angry": "upset"}
                ),
                "urgency": Score(
                    instructions="How urgent is it?", criteria=["can wait", "this week", "today"]
                ),
            },
        )
    billing, tone, urgency, _ = client.decisions.create(
        model="smollm2", input=TEXT, questions=QUESTIONS
    ).answers
    assert billing.type == "predicate"
    assert tone.type == "choice"
    assert urgency.type == "score"
    assert reply.nouls["billing"].noul == billing.probability
    assert reply.choices["tone"].confidence == tone.confidence
    assert reply.scores["urgency"].score == urgency.score


def test_pydantic_ai_decides_in_both_shapes(server: ServerThread) -> None:
    from pydantic import BaseModel, Field
    from pydantic_ai import Agent
    from pydantic_ai.models.openai_decisions import OpenAIDecisionsModel
    from pydantic_ai.models.system_one import SystemOneModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.providers.system_one import SystemOneProvider

    class Handling(BaseModel):
        billing: bool = Field(description="Is the message about billing?")
        tone: Literal["calm", "angry"] = Field(description="What is the tone?")

    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    for model in (
        SystemOneModel("smollm2", provider=SystemOneProvider(base_url=server.url)),
        OpenAIDecisionsModel("smollm2", provider=provider),
    ):
        result = Agent(model, output_type=Handling).run_sync(TEXT)
        assert isinstance(result.output, Handling)
        assert result.usage.output_tokens == 2


def test_langchain_decides(server: ServerThread, client: openai.OpenAI) -> None:
    from langchain_openai import decisions

    asked = decisions.OpenAIDecisions(
        model="smollm2", base_url=f"{server.url}/v1", api_key="none"
    ).invoke(
        {
            "input": TEXT,
            "questions": {
                "billing": decisions.Predicate(instructions=QUESTIONS[0]["instructions"]),
                "urgency": decisions.Score(
                    instructions=QUESTIONS[2]["instructions"],
                    levels=[level["label"] for level in QUESTIONS[2]["levels"]],
                ),
            },
        }
    )
    billing, urgency = client.decisions.create(
        model="smollm2", input=TEXT, questions=[QUESTIONS[0], QUESTIONS[2]]
    ).answers
    assert billing.type == "predicate"
    assert urgency.type == "score"
    assert asked.answers["billing"].probability == billing.probability
    assert asked.answers["urgency"].score == urgency.score


def test_scores_are_the_completions_logprobs(http: httpx.Client) -> None:
    texts = [" Paris", " Oslo."]
    body = {"model": "smollm2", "text_1": "The capital of France is", "text_2": texts}
    reply = http.post("/v1/score", json=body | {"return_logprobs": True}).json()
    for entry, text in zip(reply["data"], texts, strict=True):
        echo = {
            "model": "smollm2",
            "prompt": f"{body['text_1']}{text}",
            "max_tokens": 0,
            "echo": True,
            "logprobs": 0,
        }
        choice = http.post("/v1/completions", json=echo).json()["choices"][0]
        whole = choice["logprobs"]["token_logprobs"]
        assert entry["logprobs"] == whole[-entry["tokens"] :]
        assert entry["score"] == math.fsum(entry["logprobs"])
    assert reply["data"][0]["score"] > reply["data"][1]["score"]
    assert "probability" not in reply["data"][0]


def test_scores_of_options_behind_a_conversation(http: httpx.Client) -> None:
    body = {
        "model": "smollm2",
        "context": [{"role": "user", "content": "What is the capital of France?"}],
        "options": ["Paris", "London", "The capital of France is Paris."],
    }
    data = http.post("/v1/score", json=body).json()["data"]
    assert math.isclose(math.fsum(entry["probability"] for entry in data), 1.0)
    assert [entry["index"] for entry in data] == [0, 1, 2]
    ids = http.post("/tokenize", json={"messages": body["context"]}).json()["tokens"]
    again = http.post("/v1/score", json=body | {"context": ids}).json()
    assert again["data"] == data
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 3 * (len(ids) - 1)  # the row that predicts the first token is computed


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "a"}, "text_2"),
        ({"context": "a"}, "options"),
        ({"text_1": "a", "text_2": "b", "context": "c"}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
        ({"text_1": "", "text_2": "b"}, "text_1"),
        ({"context": [], "options": ["b"]}, "context"),
        ({"context": "a", "options": [[70000]]}, "options[0]"),
        ({"context": [1, -1], "options": ["b"]}, "context"),
        ({"context": "a", "options": [7]}, "options[0]"),
        ({"text_1": "word " * 5000, "text_2": "b"}, "text_2"),
    ],
)
def test_scores_that_are_refused(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    reply = http.post("/v1/score", json={"model": "smollm2", **change})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_embeddings_by_openais_client(client: openai.OpenAI) -> None:
    """The client asks for base64 and decodes it; floats are the same numbers."""
    texts = ["A cat sat on the mat.", "A dog lay on the rug.", "The bond market fell."]
    reply = client.embeddings.create(model="smollm2", input=texts)
    floats = client.embeddings.create(model="smollm2", input=texts, encoding_format="float")
    vectors = np.array([entry.embedding for entry in reply.data], np.float32)
    assert [entry.index for entry in reply.data] == [0, 1, 2]
    assert vectors.shape == (3, 576)
    written = np.array([entry.embedding for entry in floats.data], np.float32)
    assert vectors.tobytes() == written.tobytes()
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-6)
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > 10
    alone = [client.embeddings.create(model="smollm2", input=text).data[0] for text in texts]
    assert [entry.embedding for entry in alone] == [entry.embedding for entry in reply.data]


def test_embeddings_of_ids_means_and_few_dimensions(http: httpx.Client) -> None:
    def embed(**body: Any) -> list[Any]:
        reply = http.post("/v1/embeddings", json={"model": "smollm2", **body})
        assert reply.status_code == 200, reply.text
        return [entry["embedding"] for entry in reply.json()["data"]]

    ids = http.post("/tokenize", json={"prompt": TEXT}).json()["tokens"]
    assert embed(input=ids) == embed(input=[ids]) == embed(input=TEXT)
    assert embed(input=TEXT, pooling="mean") != embed(input=TEXT)
    (short,) = embed(input=TEXT, dimensions=8)
    (whole,) = embed(input=TEXT)
    np.testing.assert_allclose(short, np.array(whole[:8]) / np.linalg.norm(whole[:8]), rtol=1e-5)
    (raw,) = embed(input=TEXT, encoding_format="base64")
    assert np.frombuffer(base64.b64decode(raw), "<f4").tolist() == whole


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": ""}, "input[0]"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [1, 49152]}, "input[0]"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": {"a": 1}}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 577}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": ["a", "word " * 5000]}, "input[1]"),
    ],
)
def test_embeddings_that_are_refused(
    http: httpx.Client, change: dict[str, Any], param: str
) -> None:
    reply = http.post("/v1/embeddings", json={"model": "smollm2", **change})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_the_guides_clients(server: ServerThread, capsys: pytest.CaptureFixture[str]) -> None:
    served = blocks("decisions.md", "python server")
    assert len(served) == 2
    for code in served:
        exec(code.replace("http://127.0.0.1:8000", server.url), {})
    assert "'angry'" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="a shell's quotes")
def test_the_guides_commands(server: ServerThread) -> None:
    for code in blocks("decisions.md", "sh"):
        command = shlex.split(code.replace("http://127.0.0.1:8000", server.url))
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert '"probability"' in done.stdout
