"""`gate` over HTTP: the decision with the role, then the very answer of an ungated request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.server.protocol.gate import GateBody
from tests.server.support import ServerThread, fake_llm, smollm2_tokenizer, wait_until

SAID = "I can answer answer this from the documents"
JUDGE = {"branch": "judge", "continue_if": ["answer"]}
CLOSED = {"branch": "judge", "continue_if": ["search"]}
QUESTION = {
    "question": {
        "type": "choice",
        "instructions": "Answer now?",
        "choices": [{"value": "write"}, {"value": "skip"}],
    },
    "continue_if": ["write", "skip"],
}
PREFIX = {"prefix": '{"decision": "', "options": ["write", "skip"], "continue_if": ["write"]}


def chat(http: httpx.Client, **more: Any) -> httpx.Response:
    messages = [{"role": "user", "content": more.pop("said", SAID)}]
    return http.post("/v1/chat/completions", json={"model": "parrot", "messages": messages, **more})


def complete(http: httpx.Client, prompt: Any, **more: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"model": "parrot", "prompt": prompt, **more})


def post_ascii(http: httpx.Client, path: str, body: Any) -> httpx.Response:
    """Also half a surrogate pair, which httpx would not send."""
    headers = {"Content-Type": "application/json"}
    return http.post(path, content=json.dumps(body), headers=headers)


def whole(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def chunks(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    lines = [line for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def choices(reply: dict[str, Any]) -> Any:
    """What a client gets of the answers, without ids."""
    return reply["choices"]


# --- an open gate ---------------------------------------------------------------------------


@pytest.mark.parametrize("gate", [JUDGE, QUESTION], ids=["branch", "question"])
@pytest.mark.parametrize("n", [1, 3])
def test_behind_an_open_gate_stands_the_ungated_answer(
    judged: httpx.Client, gate: dict[str, Any], n: int
) -> None:
    asked = {"n": n, "seed": 5, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    plain, gated = whole(chat(judged, **asked)), whole(chat(judged, gate=gate, **asked))
    assert choices(gated) == choices(plain)
    assert gated["prompt_token_ids"] == plain["prompt_token_ids"]
    assert "decision" not in plain
    told = gated["decision"]
    assert list(told) == ["option", "probabilities", "confidence", "mass", "source"]
    assert told["option"] in gate["continue_if"]
    assert sum(told["probabilities"].values()) == pytest.approx(1)
    assert told["confidence"] == told["probabilities"][told["option"]] * told["mass"]
    assert told["source"] == gate.get("branch", "labels")


def test_the_decision_comes_with_the_role_before_any_content(judged: httpx.Client) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
    got = chunks(chat(judged, gate=JUDGE, **options))
    for index in (0, 1):
        own = [c for c in got if c["choices"] and c["choices"][0]["index"] == index]
        assert own[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert own[0]["decision"]["option"] == "answer"
        assert all("decision" not in chunk for chunk in own[1:])
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in own)
        assert text == SAID
        assert own[-1]["choices"][0]["finish_reason"] == "stop"
    assert got[-1]["choices"] == []
    assert got[-1]["usage"] == whole(chat(judged, gate=JUDGE, n=2))["usage"] | {
        "prompt_tokens_details": got[-1]["usage"]["prompt_tokens_details"]
    }


@pytest.mark.parametrize("gate", [JUDGE, QUESTION, PREFIX], ids=["branch", "question", "prefix"])
@pytest.mark.parametrize("closed", [False, True])
def test_joined_chunks_are_the_whole(
    judged: httpx.Client, gate: dict[str, Any], closed: bool
) -> None:
    best = whole(chat(judged, gate=gate))["decision"]["option"]
    options = [*whole(chat(judged, gate=gate))["decision"]["probabilities"]]
    kept = [o for o in options if (o == best) is not closed]
    gate = {**gate, "continue_if": kept}
    one = whole(chat(judged, gate=gate, n=2, seed=1))
    got = chunks(chat(judged, gate=gate, n=2, seed=1, stream=True))
    assert [c["decision"] for c in got if "decision" in c] == [one["decision"]] * 2
    for choice in one["choices"]:
        own = [c["choices"][0] for c in got if c["choices"][0]["index"] == choice["index"]]
        text = "".join(c["delta"].get("content", "") for c in own)
        assert text == choice["message"]["content"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert (choice["finish_reason"] == "gate") is closed
        assert len(own) == 2 or not closed


# --- a closed gate --------------------------------------------------------------------------


def test_a_closed_gate_writes_nothing(judged: httpx.Client) -> None:
    reply = whole(chat(judged, gate=CLOSED, n=2, logprobs=True))
    for choice in reply["choices"]:
        assert choice["finish_reason"] == "gate"
        assert choice["message"]["content"] == ""
        assert choice["logprobs"]["content"] == []
    assert reply["usage"]["completion_tokens"] == 0
    assert reply["decision"]["option"] == "answer"


def test_a_closed_gates_next_chunk_is_its_end(judged: httpx.Client) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
    got = chunks(chat(judged, gate=CLOSED, **options))
    shape = [
        (c["choices"][0]["index"], "decision" in c, c["choices"][0]["finish_reason"])
        for c in got[:-1]
    ]
    assert sorted(shape[:2] + shape[2:]) == [
        *((0, False, "gate"), (0, True, None)),
        *((1, False, "gate"), (1, True, None)),
    ]
    for index in (0, 1):
        assert [told for i, told, _ in shape if i == index] == [True, False]
    assert got[-1]["usage"]["completion_tokens"] == 0


# --- a forced prefix --------------------------------------------------------------------------


def test_a_prefix_is_part_of_the_reply_which_goes_on_from_it(judged: httpx.Client) -> None:
    gate = {**PREFIX, "continue_if": ["write", "skip"]}
    reply = whole(chat(judged, gate=gate, return_token_ids=True, max_tokens=8))
    begin = '{"decision": "' + reply["decision"]["option"]
    content = reply["choices"][0]["message"]["content"]
    assert content.startswith(begin)
    assert len(content) > len(begin)
    encode = smollm2_tokenizer().encode_inside
    plain = whole(chat(judged, return_token_ids=True, max_tokens=1))["prompt_token_ids"]
    ids = plain + encode('{"decision": "') + encode(reply["decision"]["option"])
    assert reply["prompt_token_ids"] == ids
    ungated = whole(complete(judged, ids, max_tokens=8, return_token_ids=True))["choices"][0]
    assert ungated["text"] == content[len(begin) :]
    assert ungated["token_ids"] == reply["choices"][0]["token_ids"]
    assert reply["usage"]["prompt_tokens"] == len(ids)


def test_offsets_count_what_the_prefix_has_written(judged: httpx.Client) -> None:
    gate = {"prefix": " so", "options": [" be", " it"], "continue_if": [" be", " it"]}
    (choice,) = whole(complete(judged, "Let us", gate=gate, logprobs=1, max_tokens=4))["choices"]
    begin = " so" + choice["decision"]["option"]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[0] == len(begin)
    assert choice["text"][offsets[0] :].startswith(choice["logprobs"]["tokens"][0])
    echoed = whole(complete(judged, "Let us", gate=gate, logprobs=None, max_tokens=4, echo=True))
    assert echoed["choices"][0]["text"] == "Let us" + choice["text"]


def test_a_stop_string_is_not_looked_for_in_the_prefix(judged: httpx.Client) -> None:
    gate = {"prefix": "stop here", "options": [" now", " then"], "continue_if": [" now", " then"]}
    reply = whole(complete(judged, "a b", gate=gate, stop=["here"], max_tokens=3))
    assert reply["choices"][0]["text"].startswith("stop here ")


# --- completions ------------------------------------------------------------------------------


def test_every_prompt_has_a_decision_of_its_own(judged: httpx.Client) -> None:
    prompts = ["answer answer", "search search", "nothing"]
    reply = whole(complete(judged, prompts, gate=JUDGE, n=2, max_tokens=2))
    told = [(c["decision"]["option"], c["finish_reason"] == "gate") for c in reply["choices"]]
    assert told[:4] == [("answer", False)] * 2 + [("search", True)] * 2
    assert told[4:] == [("refuse", True)] * 2  # a third each: the threshold of refuse decides
    assert "decision" not in reply
    one = whole(complete(judged, prompts[0], gate=JUDGE, max_tokens=2))
    assert one["decision"] == reply["choices"][0]["decision"]
    plain = whole(complete(judged, prompts[0], max_tokens=2))["choices"][0]
    assert one["choices"][0]["text"] == plain["text"]


def test_streamed_completions_tell_the_decision_first(judged: httpx.Client) -> None:
    got = chunks(complete(judged, ["answer", "search it"], gate=JUDGE, stream=True, max_tokens=3))
    for index, closed in ((0, False), (1, True)):
        own = [c["choices"][0] for c in got if c["choices"][0]["index"] == index]
        assert own[0]["text"] == ""
        assert "decision" in own[0]
        assert all("decision" not in part for part in own[1:])
        assert (own[-1]["finish_reason"] == "gate") is closed


# --- beside other fields ------------------------------------------------------------------------


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def test_tools_behind_a_gate(judged: httpx.Client) -> None:
    said = f"{CALL}"
    gate = {**QUESTION}
    plain = whole(chat(judged, said=said, tools=[WEATHER]))
    gated = whole(chat(judged, said=said, tools=[WEATHER], gate=gate))
    (call,) = gated["choices"][0]["message"]["tool_calls"]
    (same,) = plain["choices"][0]["message"]["tool_calls"]
    assert call["function"] == same["function"]
    assert gated["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("gate", [JUDGE, QUESTION], ids=["branch", "question"])
def test_a_response_format_behind_a_gate(judged: httpx.Client, gate: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    asked = {"response_format": form, "max_tokens": 60, "seed": 3, "return_token_ids": True}
    plain, gated = whole(chat(judged, **asked)), whole(chat(judged, gate=gate, **asked))
    assert choices(gated) == choices(plain)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "tools"),
    ],
)
def test_a_grammar_cannot_hold_a_reply_that_a_prefix_has_begun(
    judged: httpx.Client, more: dict[str, Any], param: str
) -> None:
    reply = chat(judged, gate=PREFIX, **more)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_answer_codes_take_the_gates_question(judged: httpx.Client) -> None:
    asked = {"type": "predicate", "instructions": "Is it so?"}
    gate = {"question": asked, "branch": "codes", "continue_if": [True]}
    told = whole(chat(judged, gate=gate, said="Yes Yes"))["decision"]
    assert (told["option"], told["source"], told["mass"]) == (True, "codes", 1.0)
    assert list(told["probabilities"]) == ["true", "false"]


def test_a_gate_decides_as_the_decisions_route_does(judged: httpx.Client) -> None:
    told = whole(chat(judged, gate=JUDGE))["decision"]
    values = [{"value": name} for name in ("answer", "search", "refuse")]
    question = {"type": "choice", "instructions": "x", "choices": values}
    body = {"model": "judge", "input": SAID, "questions": [question]}
    (answer,) = judged.post("/v1/decisions", json=body).json()["answers"]
    assert {e["value"]: e["probability"] for e in answer["probabilities"]} == told["probabilities"]
    assert answer["choice"] == told["option"]
    body = {"model": "parrot", "input": SAID, "questions": [QUESTION["question"]]}
    (answer,) = judged.post("/v1/decisions", json=body).json()["answers"]
    told = whole(chat(judged, gate=QUESTION))["decision"]
    assert {e["value"]: e["probability"] for e in answer["probabilities"]} == told["probabilities"]
    assert (answer["confidence"], answer["mass"]) == (told["confidence"], told["mass"])


def test_a_threshold_of_the_gate(judged: httpx.Client) -> None:
    gate = {**JUDGE, "threshold": {"search": 0.01}}
    assert whole(chat(judged, gate=gate))["decision"]["option"] == "search"


def test_usage_counts_what_was_read_once(judged: httpx.Client) -> None:
    words = SAID + " and this is read for the first time"
    gated = whole(chat(judged, said=words, gate=JUDGE))["usage"]
    plain = whole(chat(judged, said=words))["usage"]
    assert gated["prompt_tokens"] == plain["prompt_tokens"] + 1  # the judge's suffix, " ?"
    assert gated["completion_tokens"] == plain["completion_tokens"]
    again = whole(chat(judged, said=words, gate=JUDGE))["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] >= plain["prompt_tokens"] - 5


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gate", "param"),
    [
        ({}, "gate.continue_if"),
        ([], "gate"),
        ("judge", "gate"),
        ({"branch": "judge"}, "gate.continue_if"),
        ({**JUDGE, "continue_if": []}, "gate.continue_if"),
        ({**JUDGE, "continue_if": ["write"]}, "gate.continue_if[0]"),
        ({**JUDGE, "continue_if": [7]}, "gate.continue_if[0]"),
        ({**JUDGE, "continue_if": ["answer"] * 300}, "gate.continue_if"),
        ({**JUDGE, "branch": "nobody"}, "gate.branch"),
        ({**JUDGE, "branch": "reward"}, "gate.branch"),
        ({**JUDGE, "branch": "codes"}, "gate.question"),
        ({**JUDGE, "branch": "../judge"}, "gate.branch"),
        ({**JUDGE, "prefix": "x"}, "gate.prefix"),
        ({**JUDGE, "options": ["a", "b"]}, "gate.options"),
        ({**JUDGE, "unknown": 1}, "gate.unknown"),
        ({**JUDGE, "threshold": {"answer": 2}}, "gate.threshold"),
        ({**JUDGE, "threshold": {"else": 0.5}}, "gate.threshold"),
        ({**JUDGE, "threshold": {"answer": "1"}}, "gate.threshold.answer"),
        ({**PREFIX, "options": ["write"]}, "gate.options"),
        ({**PREFIX, "options": ["go", "go on"]}, "gate.options[1]"),
        ({**PREFIX, "options": ["write", ""]}, "gate.options[1]"),
        ({**PREFIX, "options": ["write", "so " * 300]}, "gate.options[1]"),
        ({**PREFIX, "options": ["write", "\ud800"]}, "gate.options[1]"),
        ({**PREFIX, "prefix": "\ud800"}, "gate.prefix"),
        ({**QUESTION, "question": {"type": "choice"}}, "gate.question.instructions"),
        ({**QUESTION, "question": {"type": "riddle"}}, "gate.question"),
        (
            {**QUESTION, "question": {**QUESTION["question"], "choices": [{"value": 1}] * 2}},
            "gate.question.choices[0].value",
        ),
        (
            {
                **QUESTION,
                "question": {
                    **QUESTION["question"],
                    "choices": [{"value": "true"}, {"value": True}],
                },
                "continue_if": [True],
            },
            "gate.question.choices",
        ),
    ],
)
def test_a_bad_gate_is_a_400_that_names_the_place(
    judged: httpx.Client, gate: Any, param: str
) -> None:
    body = {"model": "parrot", "messages": [{"role": "user", "content": "hi"}], "gate": gate}
    reply = post_ascii(judged, "/v1/chat/completions", body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param, error
    assert set(error) == {"message", "type", "param", "code"}
    body = {"model": "parrot", "prompt": "hi", "gate": gate}
    assert post_ascii(judged, "/v1/completions", body).status_code == 400


def anything() -> st.SearchStrategy[Any]:
    leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    return st.recursive(leaf, lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=6)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.dictionaries(
        st.sampled_from([*GateBody.model_fields, "else"]), anything(), max_size=4
    ).flatmap(lambda odd: st.sampled_from([JUDGE, QUESTION, PREFIX]).map(lambda g: {**g, **odd}))
)
def test_whatever_stands_in_a_gate_the_server_goes_on(
    judged: httpx.Client, gate: dict[str, Any]
) -> None:
    body = {"model": "parrot", "prompt": "hi", "gate": gate, "max_tokens": 2}
    reply = post_ascii(judged, "/v1/completions", body)
    assert reply.status_code in (200, 400), reply.text
    if reply.status_code == 400 and "NaN" not in json.dumps(body):
        assert str(reply.json()["error"]["param"]).startswith("gate")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
    ],
)
def test_what_cannot_stand_beside_a_gate(
    judged: httpx.Client, more: dict[str, Any], param: str
) -> None:
    reply = complete(judged, "hi", gate=JUDGE, **more)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_a_question_that_does_not_fit_is_refused_and_nothing_has_run(judged: httpx.Client) -> None:
    gate = {"prefix": "word " * 600, "options": ["a", "b"], "continue_if": ["a"]}
    reply = chat(judged, gate=gate)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_responses_take_no_gate(judged: httpx.Client) -> None:
    reply = judged.post("/v1/responses", json={"model": "parrot", "input": "hi", "gate": JUDGE})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "gate"
    assert "chat/completions" in reply.json()["error"]["message"]


def test_a_gates_own_text_counts_against_the_servers_limit(tmp_path: Path) -> None:
    with (
        ServerThread(fake_llm, max_prompt_tokens=60) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        gate = {"prefix": "word " * 100, "options": ["a", "b"], "continue_if": ["a"]}
        reply = complete(http, "hi", gate=gate)
        assert reply.json()["error"]["code"] == "prompt_too_long"
        gate["prefix"] = "word"
        assert complete(http, "hi", gate=gate).status_code == 200


# --- clients, metrics, what is left ---------------------------------------------------------------


@pytest.fixture
def judged_client(judged_server: ServerThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{judged_server.url}/v1", api_key="none", max_retries=0, timeout=30
    ) as made:
        yield made


def test_the_openai_client_sends_a_gate_and_reads_the_decision(
    judged_client: openai.OpenAI,
) -> None:
    create = judged_client.chat.completions.create
    messages: Any = [{"role": "user", "content": SAID}]
    reply = create(model="parrot", messages=messages, extra_body={"gate": JUDGE})
    assert reply.choices[0].message.content == SAID
    assert reply.decision["option"] == "answer"  # type: ignore[attr-defined]
    shut = create(model="parrot", messages=messages, extra_body={"gate": CLOSED})
    assert shut.choices[0].finish_reason == "gate"  # type: ignore[comparison-overlap]
    parts = list(create(model="parrot", messages=messages, stream=True, extra_body={"gate": JUDGE}))
    assert parts[0].decision["source"] == "judge"  # type: ignore[attr-defined]
    assert "".join(p.choices[0].delta.content or "" for p in parts) == SAID


def test_gates_are_counted(judged: httpx.Client) -> None:
    def counted(outcome: str) -> float:
        label = f'branch="judge",model_name="parrot",outcome="{outcome}",source="branch"'
        lines = judged.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(f"lockstep:gates_total{{{label}}}")]
        return float(found[0].split()[-1]) if found else 0.0

    before = counted("open"), counted("closed")
    whole(chat(judged, gate=JUDGE, n=3))
    whole(chat(judged, gate=CLOSED, n=3))
    chunks(chat(judged, gate=CLOSED, stream=True))
    assert (counted("open"), counted("closed")) == (before[0] + 1, before[1] + 2)
    text = judged.get("/metrics").text
    assert 'lockstep:request_success_total{finished_reason="gate"' in text


def test_clients_that_leave_a_gated_request_leave_nothing_behind(
    judged: httpx.Client, judged_server: ServerThread
) -> None:
    body = {
        "model": "parrot",
        "messages": [{"role": "user", "content": SAID * 20}],
        "gate": JUDGE,
        "n": 4,
    }
    for stream in (False, True):
        for seconds in (0.002, 0.01, 0.05):
            with suppress(httpx.ReadTimeout):
                judged.post(
                    "/v1/chat/completions",
                    json={**body, "stream": stream},
                    timeout=httpx.Timeout(5, read=seconds),
                )
    wait_until(lambda: judged.get("/stats").json()["running"] == 0)
    stats = judged.get("/stats").json()["engine"]
    assert stats["waiting"] == 0
    assert stats["pages_used"] == 0
    assert whole(chat(judged, gate=JUDGE))["decision"]["option"] == "answer"


def test_lines_of_a_batch_may_have_gates(judged: httpx.Client) -> None:
    lines = [
        {
            "custom_id": f"row-{index}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "parrot",
                "messages": [{"role": "user", "content": said}],
                "gate": JUDGE,
            },
        }
        for index, said in enumerate(["answer it", "search for it", "refuse it refuse"])
    ]
    lines[2]["body"]["gate"] = {**JUDGE, "branch": "nobody"}  # type: ignore[index]
    text = "\n".join(map(json.dumps, lines))
    file = judged.post(
        "/v1/files", files={"file": ("rows.jsonl", text)}, data={"purpose": "batch"}
    ).json()
    body = {
        "input_file_id": file["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    batch = judged.post("/v1/batches", json=body).json()

    def done() -> bool:
        batch.update(judged.get(f"/v1/batches/{batch['id']}").json())
        return batch["status"] == "completed"

    wait_until(done)
    rows = judged.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    found = {row["custom_id"]: row["response"]["body"] for row in map(json.loads, rows)}
    assert found["row-0"]["choices"][0]["message"]["content"] == "answer it"
    assert found["row-1"]["decision"]["option"] == "search"
    assert found["row-1"]["choices"][0]["finish_reason"] == "gate"
    wrong = judged.get(f"/v1/files/{batch['error_file_id']}/content").text.splitlines()
    (error,) = map(json.loads, wrong)
    assert error["response"]["body"]["error"]["param"] == "gate.branch"


# --- functions ------------------------------------------------------------------------------

LOOK = {"type": "function", "function": {"name": "look", "description": "answer", "parameters": {}}}
CALLED = {"name": "look", "arguments": '{"for": "answer"}'}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Can I answer? " + "A long story. " * 6},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": CALLED}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "search for answer"},
]
ITEMS = [
    MESSAGES[0],
    {"type": "function_call", "call_id": "1", **CALLED},
    {"type": "function_call_output", "call_id": "1", "output": "search for answer"},
]


@pytest.mark.parametrize("gate", [JUDGE, QUESTION], ids=["branch", "question"])
def test_a_decision_about_a_chat_with_functions_is_its_gates_and_finds_its_pages(
    judged: httpx.Client, gate: dict[str, Any]
) -> None:
    """In every door: what a conversation with calls says is not lost, and read once."""
    judge = gate.get("branch")
    body = {"model": "parrot", "messages": MESSAGES, "tools": [LOOK], "max_tokens": 1}
    gated = whole(judged.post("/v1/chat/completions", json={**body, "gate": gate}))
    decided = gated["decision"]
    if judge:
        assert decided["probabilities"]["answer"] > 0.99  # it has read tools, calls and results
    question = gate.get("question") or {
        "type": "choice",
        "instructions": "?",
        "choices": [{"value": value} for value in decided["probabilities"]],
    }
    asked = {"model": judge or "parrot", "input": ITEMS, "tools": [LOOK], "questions": [question]}
    told = whole(judged.post("/v1/decisions", json=asked))
    found = {p["value"]: p["probability"] for p in told["answers"][0]["probabilities"]}
    assert found == decided["probabilities"]
    usage = told["usage"]
    read = usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"]
    twice = whole(judged.post("/v1/decisions", json={**asked, "questions": [question] * 2}))
    assert read == twice["usage"]["input_tokens"] - usage["input_tokens"]  # the question alone
    without = whole(judged.post("/v1/decisions", json={**asked, "tools": None}))
    assert without["usage"]["input_tokens"] < usage["input_tokens"]
    if judge:
        own = {"model": judge, "messages": MESSAGES, "tools": [LOOK]}
        (entry,) = whole(judged.post("/v1/classify", json=own))["data"]
        assert dict(zip(entry["labels"], entry["probs"], strict=True)) == found
