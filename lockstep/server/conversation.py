"""From a conversation to running requests: what chat completions and responses share.

A conversation becomes prompt ids by the model's chat template, a grammar if its answer is
to be held to a form, and the form in which the answer is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from lockstep.decisions import Gated, GateSpec, gate_chat
from lockstep.server.answers import CallCount, PieceStream
from lockstep.server.generation import Envelope, Service, build_requests, off_loop
from lockstep.text.answer import AnswerFormat
from lockstep.text.tools.constrain import constrain
from lockstep.text.tools.prompting import check_calls
from lockstep.text.turn import Turn
from lockstep.types import RequestError, SamplingParams


@dataclass(frozen=True, slots=True)
class Prepared:
    """A turn ready to be submitted.

    Attributes:
        ids: the prompt.
        form: how the answer is read.
        sampling: the client's, with the grammar that the turn needs.
        shown: control tokens that are part of the answer's text.
        gated: what decides whether there is an answer; its prompt is the beginning of `ids`.
    """

    ids: list[int]
    form: AnswerFormat
    sampling: SamplingParams
    shown: frozenset[int]
    gated: Gated | None = None


async def submit_turn(
    service: Service,
    envelope: Envelope,
    turn: Turn,
    sampling: SamplingParams,
    *,
    priority: int = 0,
    field: str = "messages",
    gate: GateSpec | None = None,
) -> PieceStream:
    """Check a turn, render it and queue its request.

    Args:
        gate: decides whether there is an answer.
        sampling: with the grammar of a response format, if there is one.
        field: what the client calls the conversation, for errors.

    Raises:
        RequestError: what cannot be served; nothing has run.
    """

    async def attempt(*, loose: bool) -> PieceStream:
        prepared = await off_loop(
            lambda: prepare(service, turn, sampling, loose=loose, gate=gate),
            turn.length() + (0 if gate is None else gate.length()),
        )
        gates = [prepared.gated] if prepared.gated is not None else []
        requests = build_requests(
            service,
            envelope,
            [gates[0].prompt if gates else prepared.ids],
            prepared.sampling,
            priority=priority,
            field=field,
            gates=gates,
        )
        streams = await service.llm.submit(
            requests, shown=prepared.shown, begins=[own.begins for own in gates]
        )
        count = _counter(service, prepared.form)
        return PieceStream(streams, prepared.form, count, gates, service.decided.count_gate)

    try:
        return await attempt(loose=False)
    except RequestError as error:
        # Whether a schema can be kept shows when the engine compiles it, e.g. a pattern that
        # looks ahead. One that nobody asked to be kept is no reason to refuse the request.
        if error.field != "tools" or all(f.strict for f in turn.callable()):
            raise
        return await attempt(loose=True)


def _counter(service: Service, form: AnswerFormat) -> CallCount | None:
    """Who counts the calls of an answer; nobody where no call is read."""
    if form.tools is None:
        return None
    return partial(service.tool_calls.count, form.tools.name)


def prepare(
    service: Service,
    turn: Turn,
    sampling: SamplingParams,
    *,
    loose: bool = False,
    gate: GateSpec | None = None,
) -> Prepared:
    """Render a turn and settle how its answer is written and read.

    Args:
        loose: as `constrain`.
        gate: as `submit_turn`.

    Raises:
        RequestError: calls without results, the template's complaint, an effort that it
            does not know, a schema that cannot be kept.
    """
    check_calls(turn.messages)
    builder = service.builder
    tokenizer, dialect = builder.tokenizer, builder.dialect
    chat = builder.chat(turn)
    ids = list(chat.ids)
    functions, choice = turn.callable(), dialect.settle(turn.choice)
    form = dialect.answer(tokenizer, ids, functions, choice)
    grammar = constrain(form, choice, sampling.grammar, dialect.control_ids, loose=loose)
    if functions and grammar is not None and not (sampling.stop or sampling.stop_token_ids):
        # Calls cannot go wrong, so they are told of while they are written. Beside a
        # response format, content may begin like a call; a client's stop may cut one off.
        form = replace(form, eager=choice.mode == "required" or sampling.grammar is None)
    if grammar is not sampling.grammar:
        sampling = replace(sampling, grammar=grammar)
    gated = None
    if gate is not None:
        gate.check_writer(sampling)
        gated = gate_chat(builder, gate, service.branches, chat)
    return Prepared(ids, form, sampling, dialect.shown(form), gated)
