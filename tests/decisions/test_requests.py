"""From an input and questions to engine requests: contexts, suffixes, labels."""

from __future__ import annotations

from functools import cache

import pytest

from lockstep.decisions import Choice, Option, Predicate, Score, inquire, inquire_prefix
from lockstep.decisions.render import question_text, render_input
from lockstep.decisions.sources import label_paths, labels_of
from lockstep.engine.loop import _describe
from lockstep.requests import RequestBuilder
from lockstep.text import Tokenizer
from lockstep.types import RequestError
from lockstep.weights import open_checkpoint
from tests.fakes import FakeExecutor

ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@cache
def tokenizer(template: str | None = "") -> Tokenizer:
    made = open_checkpoint("smollm2").tokenizer()
    if template == "":
        return made
    return Tokenizer(made._backend, eos_ids=made.eos_ids, chat_template=template)


def builder(template: str | None = "", max_context: int = 4096) -> RequestBuilder:
    executor = FakeExecutor(vocab_size=49152, max_context=max_context)
    return RequestBuilder(tokenizer(template), _describe(executor, max_context))


def test_all_questions_share_the_context_and_nothing_else() -> None:
    questions = [Predicate("it rains"), Choice("which", ["a", "b"]), Score("how", ["low", "high"])]
    inquiry = inquire(builder(), "Some weather report. " * 20, questions)
    prompts = [request.prompt for request in inquiry.requests()]
    assert len(prompts) == 3
    n = inquiry.context_tokens
    assert len({prompt[:n] for prompt in prompts}) == 1
    assert len({prompt[n] for prompt in prompts} | {prompt[n + 2] for prompt in prompts}) > 1
    assert inquiry.input_tokens == n + sum(len(prompt) - n for prompt in prompts)


def test_a_question_reads_the_same_whatever_is_asked_beside_it() -> None:
    (alone,) = inquire(builder(), "text", [Predicate("it rains")]).requests()
    others = [Choice("which", [str(i) for i in range(40)]), Predicate("it rains"), Predicate("no")]
    beside = inquire(builder(), "text", others)
    (request,) = beside.asked[1].requests()
    assert (request.prompt, request.sampling) == (alone.prompt, alone.sampling)


def test_a_decision_about_a_chat_finds_the_chats_pages() -> None:
    conversation = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris."},
    ]
    made = builder()
    asked = made.encode_chat([*conversation, {"role": "user", "content": "And of Spain?"}])
    context = render_input(made, conversation)
    shared = len(context.ids) - 4  # up to where the next message from the user opens
    assert tuple(asked[:shared]) == context.ids[:shared]


def test_a_question_joins_a_last_message_from_the_user() -> None:
    made = builder(ALTERNATING)
    context = render_input(made, "How are you?")
    text = made.tokenizer.decode(list(context.ids)) + context.before + "Q" + context.after
    assert text == "<user>How are you?\n\nQ</user><assistant>"
    after = render_input(
        made, [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    )
    text = made.tokenizer.decode(list(after.ids)) + after.before + "Q" + after.after
    assert text == "<user>Hi</user><assistant>Ho</assistant><user>Q</user><assistant>"


def test_a_model_without_a_template_reads_plain_text() -> None:
    context = render_input(builder(None), [{"role": "user", "content": "Some text"}])
    assert (context.before, context.after, context.lead) == ("\n\n", "\nAnswer:", " ")
    paths = label_paths(tokenizer(None), ("Yes", "No"), " ")
    assert [tokenizer(None).decode(list(path)) for path in paths] == [" Yes", " No"]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_cannot_show_the_question_is_refused(template: str) -> None:
    with pytest.raises(RequestError, match="does not show a question") as caught:
        render_input(builder(template), "text")
    assert caught.value.code == "chat_template_error"


def test_the_mark_may_stand_in_the_input() -> None:
    text = "about \N{WHITE SQUARE}question\N{WHITE SQUARE} marks"
    context = render_input(builder(), text)
    assert tokenizer().decode(list(context.ids)).endswith(text)


@pytest.mark.parametrize(
    ("count", "first", "last"),
    [(3, "A", "C"), (26, "A", "Z"), (27, "01", "27"), (255, "001", "255")],
)
def test_labels_of_choices(count: int, first: str, last: str) -> None:
    labels = labels_of(Choice("which", [f"option {i}" for i in range(count)]))
    assert (labels[0], labels[-1], len(set(labels))) == (first, last, count)
    paths = label_paths(tokenizer(), labels, "")
    assert len(set(paths)) == count
    assert {len(path) for path in paths} == {1 if count <= 26 else len(first)}


def test_labels_of_levels_are_their_values() -> None:
    assert labels_of(Score("how", ["low", "mid", "high"])) == ("0", "1", "2")
    assert labels_of(Score("how", [f"level {i}" for i in range(11)]))[10] == "10"


def test_many_options_share_their_rows() -> None:
    inquiry = inquire(builder(), "text", [Choice("which", [f"o{i}" for i in range(255)])])
    assert len(list(inquiry.requests())) == 26
    prompt = len(inquiry.asked[0].prompt)
    for request in inquiry.requests():
        assert request.score_from == prompt
        assert len(request.prompt) == prompt + 2
        assert request.sampling.max_tokens == 1


def test_a_text_and_a_boolean_read_differently() -> None:
    question = Choice("which", ["true", True])
    assert question_text(question, ("A", "B")).splitlines()[1:3] == ['A. "true"', "B. true"]
    plain = Choice("which", ["yes", True])
    assert question_text(plain, ("A", "B")).splitlines()[1:3] == ["A. yes", "B. true"]


def test_descriptions_are_told() -> None:
    text = question_text(Predicate("it is spam", true="advertising"), ("Yes", "No"))
    assert "Yes means: advertising" in text
    assert "No means" not in text
    choice = Choice("", [Option("a", "the first"), Option("b")])
    assert question_text(choice, ("A", "B")).splitlines()[:3] == [
        "Choose, for the text above",
        "A. a: the first",
        "B. b",
    ]


@pytest.mark.parametrize(
    ("given", "questions", "field"),
    [
        ("", [Predicate("x")], "input"),
        ([], [Predicate("x")], "input"),
        ("\ud800", [Predicate("x")], "input"),
        ("text", [], "questions"),
        ("text", [Predicate("x")] * 401, "questions"),
        ("text", ["x"], "questions[0]"),
        ("text", "x", "questions"),
        ("word " * 5000, [Predicate("x")], "input"),
    ],
)
def test_what_cannot_be_asked(given: object, questions: object, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        inquire(builder(), given, questions)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_the_rows_of_one_call_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.decisions.inquiry.MAX_PROBES", 60)
    with pytest.raises(RequestError, match="at most 60 are allowed") as caught:
        inquire(builder(), "text", [Choice("x", [f"{i}" for i in range(255)])] * 4)
    assert caught.value.field == "questions[2]"


def test_a_forced_prefix_stands_behind_the_generation_prompt() -> None:
    made = builder()
    chat = [{"role": "user", "content": "Write or skip?"}]
    inquiry = inquire_prefix(made, chat, '{"decision": "', ["write", "skip"])
    (request,) = inquiry.requests()
    ids = made.encode_chat(chat) + tokenizer().encode_inside('{"decision": "')
    assert list(request.prompt) == ids
    assert request.sampling.logprob_token_ids == tuple(
        tokenizer().encode_inside(word)[0] for word in ("write", "skip")
    )


def test_options_with_a_common_first_token_are_scored_whole() -> None:
    inquiry = inquire_prefix(builder(), "Now:", " ", ["the first", "the second", "none"])
    assert {len(sequence) for sequence in inquiry.asked[0].sequences} == {1, 2}
    assert len(list(inquiry.requests())) == 1


def test_an_option_that_begins_with_another_is_refused() -> None:
    with pytest.raises(RequestError, match="begins with") as caught:
        inquire_prefix(builder(), "Now:", "", ["the first", "the"])
    assert caught.value.field == "options[0]"
