"""What the Python doors' calls about decisions mean: arguments to inquiries and gated requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, cast

from lockstep.branch import Branch
from lockstep.decisions.branches import BranchSource, find_branch, own_question
from lockstep.decisions.gates import Gated, GateSpec, gate_chat, gate_prompt
from lockstep.decisions.inquiry import Inquiry, inquire
from lockstep.decisions.questions import Choice, Predicate, Question, Score, Value
from lockstep.requests import (
    CHAT_DEFAULTS,
    COMPLETION_DEFAULTS,
    Conversation,
    Params,
    RequestBuilder,
    Tools,
    is_one_conversation,
    spread_params,
)
from lockstep.text.turn import Turn, functions_of
from lockstep.types import Request, RequestError


class GateArguments(TypedDict, total=False):
    """Keyword arguments of `decide_then_write`; see `GateSpec`."""

    continue_if: Iterable[Value] | Value
    question: Question | None
    branch: str
    prefix: str | None
    options: Sequence[str]
    threshold: Mapping[Any, float]


def is_one_question(questions: object) -> bool:
    """Whether `questions` is one question, or a branch's own, and not a list of them."""
    return questions is None or isinstance(questions, Predicate | Choice | Score)


def ask(
    builder: RequestBuilder,
    branches: Mapping[str, Branch],
    given: str | Conversation,
    questions: Question | Sequence[Question] | None,
    branch: str,
    tools: Tools = None,
) -> Inquiry:
    """The inquiry of `LLM.decide`.

    Raises:
        RequestError: as `inquire`; no branch of this name; no question where one is needed.
    """
    asked = given if isinstance(given, str) else Turn(given, functions_of(tools))
    if not branch:
        if questions is None:
            raise RequestError("questions must be given where no branch has one", field="questions")
        batch = [questions] if is_one_question(questions) else questions
        return inquire(builder, asked, cast("Sequence[Question]", batch))
    found = find_branch(branches, branch)
    if questions is None:
        questions = own_question(found)
    batch = [questions] if is_one_question(questions) else questions
    source = BranchSource(branch, found)
    return inquire(builder, asked, cast("Sequence[Question]", batch), source=source)


def gated_requests(
    builder: RequestBuilder,
    branches: Mapping[str, Branch],
    given: str | Conversation | Sequence[str] | Sequence[Conversation],
    params: Params,
    gate: GateArguments,
    tools: Tools = None,
) -> tuple[bool, list[Gated], list[Request]]:
    """Whether `given` is one prompt or conversation, and for each its gate and its request.

    Raises:
        RequestError: a prompt, a parameter or a gate that cannot be served.
    """
    if "continue_if" not in gate:
        raise RequestError("continue_if must be given", field="continue_if")
    spec, functions = GateSpec(**gate), functions_of(tools)
    one = isinstance(given, str) or is_one_conversation(given)
    batch = cast("Sequence[str | Conversation]", [given] if one else given)
    chats = [not isinstance(own, str) for own in batch] if isinstance(batch, Sequence) else []
    default = CHAT_DEFAULTS if any(chats) else COMPLETION_DEFAULTS
    own_params = spread_params(params, default, batch)
    gated, requests = [], []
    for own, each in zip(batch, own_params, strict=True):
        spec.check_writer(each)
        if isinstance(own, str):
            field = "prompt"
            made = gate_prompt(builder, spec, branches, builder.encode(own))
        else:
            field = "messages"
            made = gate_chat(builder, spec, branches, builder.chat(Turn(own, functions)))
        gated.append(made)
        requests.append(builder.build(made.prompt, each, gate=made.gate, field=field))
    return one, gated, requests
