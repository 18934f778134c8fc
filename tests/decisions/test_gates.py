"""Gates as the engine is told of them: one prompt, what stands behind it, when it opens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from lockstep.branch import Branch
from lockstep.decisions import (
    BranchSource,
    Choice,
    Decision,
    GateSpec,
    Option,
    Predicate,
    Score,
    gate_chat,
    gate_prompt,
    inquire,
    own_question,
)
from lockstep.decisions.branches import reading
from lockstep.decisions.decision import OptionScores, decide
from lockstep.decisions.render import branch_suffix_ids, context_ids
from lockstep.text.tools import Function
from lockstep.text.turn import Turn
from lockstep.types import GateOutcome, RequestError, SamplingParams
from tests.decisions.test_requests import ALTERNATING, builder, tokenizer

CHAT = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Spain?"},
]
JUDGE = Branch(
    base="b",
    base_name="smollm2",
    fork=1,
    exit=3,
    adapt="suffix",
    rank=2,
    scale=1.0,
    targets=("q_proj",),
    head="options",
    options=("answer", "search", "refuse"),
    suffix="<|im_start|>judge\n",
    thresholds={"answer": 0.8},
    temperature=2.0,
)


def branch(**changes: Any) -> Branch:
    return replace(JUDGE, **changes)


CODES = branch(
    head="codes", options=("Yes", "No", "A", "B", "C"), suffix="<q>{question}</q>", thresholds={}
)
VALUE = branch(head="value", options=("value",), thresholds={})
BRANCHES = {"judge": JUDGE, "codes": CODES, "reward": VALUE}
QUESTION = Choice("Answer now?", ["answer", "search"])
LOOK = Function("look", "Looks.", {"type": "object", "properties": {"c": {"type": "string"}}})
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"c": "Oslo"}'}}
CALLED = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
]
# Knows functions, as models that were taught to call them do.
NATIVE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_gate(spec: GateSpec, messages: Any = CHAT, template: str | None = "") -> Any:
    made = builder(template)
    chat = made.chat(Turn(messages))
    return gate_chat(made, spec, BRANCHES, chat), list(chat.ids), made


def test_a_question_stands_as_it_does_in_a_decision_and_the_answer_as_in_a_chat() -> None:
    gated, ids, made = chat_gate(GateSpec(["answer"], question=QUESTION))
    (asked,) = inquire(made, CHAT, [QUESTION]).requests()
    (probe,) = gated.gate.probes
    assert (*gated.prompt, *probe.suffix) == asked.prompt
    assert probe.wanted == asked.sampling.logprob_token_ids
    opened, closed = gated.gate.headers
    assert closed is None
    assert [*gated.prompt, *opened] == ids
    assert len(opened) < 10
    assert gated.source == "labels"


def test_a_branch_reads_what_it_was_trained_on() -> None:
    gated, ids, made = chat_gate(GateSpec("answer", branch="judge"))
    assert list(gated.prompt) == context_ids(made, CHAT)
    assert gated.gate.probes[0].suffix == tuple(branch_suffix_ids(tokenizer(), JUDGE))
    assert (gated.gate.branch, gated.gate.branch_key) == ("judge", JUDGE.key)
    assert gated.gate.outputs == (0, 1, 2)
    assert gated.gate.thresholds == (0.8, None, None)
    assert gated.gate.temperature == 2.0
    assert [*gated.prompt, *gated.gate.headers[0]] == ids
    assert gated.gate.headers[1:] == (None, None)
    told = gated.decision(GateOutcome(1, (-2.0, -0.5, -3.0), (0.2, 0.7, 0.1), 1.0))
    assert isinstance(told, Decision)
    assert (told.value, told.source, told.confidence) == ("search", "judge", 0.7)


def test_answer_codes_answer_any_question_that_fits() -> None:
    gated, _, made = chat_gate(GateSpec(["b"], question=Choice("?", ["a", "b"]), branch="codes"))
    assert gated.gate.outputs == (2, 3)
    text = made.tokenizer.decode(list(gated.gate.probes[0].suffix), skip_special_tokens=False)
    assert text.startswith("<q>Choose, for the text above: ?\nA. a\nB. b\n")
    yes, _, _ = chat_gate(GateSpec([True], question=Predicate("It is."), branch="codes"))
    assert yes.gate.outputs == (0, 1)


def test_a_forced_prefix_is_part_of_the_reply() -> None:
    spec = GateSpec(["write"], prefix='{"decision": "', options=["write", "skip"])
    gated, ids, made = chat_gate(spec)
    assert list(gated.prompt) == ids
    ahead = tuple(made.tokenizer.encode_inside('{"decision": "'))
    assert gated.gate.headers == ((*ahead, *made.tokenizer.encode_inside("write")), None)
    assert gated.begins[0] == '{"decision": "write'
    assert [len(path) for path in gated.gate.sequences] == [1, 1]


def test_a_prompt_goes_on_as_it_stands() -> None:
    made = builder()
    ids = made.encode("Once upon a time")
    gated = gate_prompt(made, GateSpec(["search"], question=QUESTION), {}, ids)
    assert list(gated.prompt) == ids
    assert gated.gate.headers == (None, ())
    judged = gate_prompt(made, GateSpec(["answer"], branch="judge"), BRANCHES, ids)
    assert list(judged.prompt) == ids
    assert judged.gate.headers == ((), None, None)


def test_thresholds_of_the_gate_take_the_place_of_all_others() -> None:
    question = Choice("?", [Option("a", threshold=0.9), Option("b"), "c"])
    made = builder()
    ids = made.encode("text")

    def thresholds(**given: float) -> Any:
        spec = GateSpec(["a"], question=question, threshold=given)
        return gate_prompt(made, spec, {}, ids).gate.thresholds

    assert thresholds() == (0.9, None, None)
    assert thresholds(b=0.2) == (None, 0.2, None)


def test_booleans_and_texts_are_told_apart() -> None:
    made = builder()
    ids = made.encode("text")
    both = Choice("?", ["true", True, False])

    def open_(question: Any, *values: str | bool) -> list[bool]:
        spec = GateSpec(values, question=question)
        headers = gate_prompt(made, spec, {}, ids).gate.headers
        return [header is not None for header in headers]

    assert open_(both, True) == [False, True, False]
    assert open_(both, "true") == [True, False, False]
    assert open_(Predicate("x"), "true") == [True, False]
    assert open_(Score("how", ["low", "high"]), "high") == [False, True]


def test_white_space_that_a_template_trims_does_not_part_them() -> None:
    messages = [{"role": "user", "content": "How are you?  \n"}]
    gated, ids, made = chat_gate(GateSpec(["answer"], question=QUESTION), messages, ALTERNATING)
    assert [*gated.prompt, *gated.gate.headers[0]] == ids
    (asked,) = inquire(made, messages, [QUESTION]).requests()
    assert (*gated.prompt, *gated.gate.probes[0].suffix) == asked.prompt


def test_a_template_that_shows_the_conversation_otherwise_is_refused() -> None:
    long = [{"role": "user", "content": "word " * 300}, {"role": "assistant", "content": "b"}]
    forgets = (
        "{% for m in messages if loop.last or m.role == 'user' %}{{ m.content }}{% endfor %}"
        "{% if not add_generation_prompt %}."
        "{% endif %}"
    )
    turned = "{% for m in messages | reverse %}{{ m.content }}{% endfor %}"
    with pytest.raises(RequestError) as caught:
        chat_gate(GateSpec(["answer"], question=QUESTION), long, turned)
    assert (caught.value.field, caught.value.code) == ("messages", "chat_template_error")
    with pytest.raises(RequestError) as caught:
        chat_gate(GateSpec(["answer"], branch="judge"), long, forgets)
    assert (caught.value.field, caught.value.code) == ("messages", "chat_template_error")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"continue_if": []}, "continue_if"),
        ({"continue_if": ["answer"]}, "question"),
        ({"continue_if": 3, "branch": "judge"}, "continue_if"),
        ({"continue_if": ["write"], "branch": "judge"}, "continue_if[0]"),
        ({"continue_if": ["answer"], "branch": "juge"}, "branch"),
        ({"continue_if": ["answer"], "branch": "judge", "question": QUESTION}, "question"),
        ({"continue_if": ["value"], "branch": "reward"}, "branch"),
        ({"continue_if": ["a"], "branch": "codes"}, "question"),
        (
            {"continue_if": ["a"], "branch": "codes", "question": Choice("?", list("abcd"))},
            "question",
        ),
        ({"continue_if": ["a"], "prefix": "x", "options": ["go", "go on"]}, "options[1]"),
        ({"continue_if": ["a"], "prefix": "x", "options": ["a"]}, "options"),
        ({"continue_if": ["a"], "prefix": "x", "options": ["a", "a"]}, "options[1]"),
        ({"continue_if": ["a"], "prefix": "x", "options": ["a", ""]}, "options[1]"),
        ({"continue_if": ["a"], "prefix": "x", "options": "ab"}, "options"),
        ({"continue_if": ["a"], "prefix": "x", "options": 3}, "options"),
        ({"continue_if": ["a"], "prefix": "x", "options": iter("ab")}, "options"),
        ({"continue_if": ["a"], "prefix": 3, "options": ["a", "b"]}, "prefix"),
        ({"continue_if": ["a"], "options": ["a", "b"], "branch": "judge"}, "options"),
        ({"continue_if": ["a"], "prefix": "x", "branch": "judge"}, "prefix"),
        (
            {"continue_if": ["answer"], "branch": "judge", "threshold": {"answer": 1.5}},
            "threshold",
        ),
        (
            {"continue_if": ["answer"], "branch": "judge", "threshold": {"answer": float("nan")}},
            "threshold",
        ),
        ({"continue_if": ["answer"], "branch": "judge", "threshold": {"x": 0.5}}, "threshold"),
        ({"continue_if": ["answer"], "branch": "judge", "threshold": [0.5]}, "threshold"),
    ],
)
def test_what_is_wrong_with_a_gate_is_named(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat_gate(GateSpec(**arguments))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("params", "field"),
    [(SamplingParams(max_tokens=0), "max_tokens"), (SamplingParams(prompt_logprobs=1), "prompt_")],
)
def test_what_cannot_stand_beside_a_gate(params: SamplingParams, field: str) -> None:
    gated, _, made = chat_gate(GateSpec(["answer"], branch="judge"))
    with pytest.raises(RequestError) as caught:
        made.build(gated.prompt, params, gate=gated.gate)
    assert caught.value.field.startswith(field)


def test_a_question_that_does_not_fit_behind_the_prompt_is_refused_with_the_numbers() -> None:
    made = builder(max_context=60)
    ids = made.encode("word " * 40)
    gated = gate_prompt(made, GateSpec(["answer"], question=QUESTION), {}, ids)
    with pytest.raises(RequestError) as caught:
        made.build(gated.prompt, SamplingParams(), gate=gated.gate)
    assert caught.value.code == "context_length_exceeded"
    assert "60" in str(caught.value)


@pytest.mark.parametrize("options", [("true", "false"), ("No", "Yes"), ("false", "true")])
def test_a_branch_of_two_truths_answers_predicates(options: tuple[str, str]) -> None:
    how = reading(tokenizer(), branch(options=options, thresholds={}), Predicate("Is it so?"))
    assert [options[index].lower() in ("true", "yes") for index in how.outputs] == [True, False]


def test_thresholds_of_a_branch_are_tried_in_its_own_order() -> None:
    question = Choice("?", ["refuse", "search", "answer"])
    how = reading(tokenizer(), branch(thresholds={"answer": 0.3, "refuse": 0.3}), question)
    assert how.outputs == (2, 1, 0)
    scores = OptionScores(
        (math.log(0.35), math.log(0.3), math.log(0.35)), "judge", 1.0, how.thresholds, how.order
    )
    assert decide(question, scores).value == "answer"
    own = Choice("?", [Option("refuse", threshold=0.3), "search", "answer"])
    how = reading(tokenizer(), branch(thresholds={"answer": 0.3}), own)
    scores = OptionScores(scores.logprobs, "judge", 1.0, how.thresholds, how.order)
    assert decide(own, scores).value == "refuse"


@pytest.mark.parametrize("template", ["", NATIVE], ids=["written out", "native"])
@pytest.mark.parametrize("messages", [CALLED, CALLED[:2], CHAT], ids=["result", "call", "plain"])
def test_a_decision_about_a_chat_with_functions_reads_what_its_gate_reads(
    template: str, messages: Any
) -> None:
    made = builder(template)
    turn = Turn(messages, [LOOK])
    chat = made.chat(turn)
    assert "look" in chat.text
    for spec, source in (
        (GateSpec(["answer"], question=QUESTION), None),
        (GateSpec(["answer"], branch="judge"), BranchSource("judge", JUDGE)),
    ):
        gated = gate_chat(made, spec, BRANCHES, chat)
        question = QUESTION if source is None else own_question(JUDGE)
        (asked,) = inquire(made, turn, [question], source=source).requests()
        (probe,) = gated.gate.probes
        assert (*gated.prompt, *probe.suffix) == asked.prompt
        assert next(filter(None, gated.gate.headers)) == chat.ids[len(gated.prompt) :]
