"""Requests that wait for their grammar in the engine's process hold up nobody and are not lost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from lockstep import messages
from lockstep.engine.process import _park, _Parked
from lockstep.text.grammar_matcher import CompiledGrammar
from lockstep.types import Grammar, Request
from tests.engine.harness import request


class Compiling:
    """An engine whose grammars are ready when the test says so."""

    def __init__(self) -> None:
        self.futures: dict[str, Future[CompiledGrammar]] = {}
        self.given_up: list[Future[CompiledGrammar]] = []

    def prepare(self, one: Request) -> Future[CompiledGrammar] | None:
        if one.sampling.grammar is None:
            return None
        return self.futures.setdefault(one.sampling.grammar.source, Future())

    def give_up(self, grammar: Future[CompiledGrammar]) -> None:
        self.given_up.append(grammar)


def submit(name: str, source: str = "") -> messages.Submit:
    grammar = Grammar("regex", source) if source else None
    return messages.Submit(request=request(name, [1], 3, grammar=grammar))


def names(inbox: Sequence[messages.ToEngine]) -> list[str]:
    return [m.request.id for m in inbox if isinstance(m, messages.Submit)]


def test_a_request_waits_alone_until_its_grammar_is_there() -> None:
    engine, parked = Compiling(), dict[str, _Parked]()
    first = _park(engine, [submit("slow", "a"), submit("free"), submit("same", "a")], parked)  # type: ignore[arg-type]
    assert names(first) == ["free"]
    assert names(_park(engine, [submit("other")], parked)) == ["other"]  # type: ignore[arg-type]
    engine.futures["a"].set_exception(ValueError())  # a complaint is told by `submit`
    assert names(_park(engine, [], parked)) == ["slow", "same"]  # type: ignore[arg-type]
    assert not parked
    assert names(_park(engine, [submit("later", "a")], parked)) == ["later"]  # type: ignore[arg-type]


def test_a_parked_request_can_be_cancelled() -> None:
    engine, parked = Compiling(), dict[str, _Parked]()
    assert _park(engine, [submit("gone", "a"), submit("stays", "a")], parked) == []  # type: ignore[arg-type]
    one_choice = messages.Cancel(request="stays", choice=1)
    whole = messages.Cancel(request="gone")
    elsewhere = messages.Cancel(request="running")
    assert _park(engine, [one_choice, whole, elsewhere], parked) == [elsewhere]  # type: ignore[arg-type]
    engine.futures["a"].set_exception(ValueError())
    assert names(_park(engine, [], parked)) == ["stays"]  # type: ignore[arg-type]


def test_a_compilation_that_takes_too_long_is_given_up() -> None:
    engine, parked = Compiling(), dict[str, _Parked]()
    _park(engine, [submit("late", "a")], parked)  # type: ignore[arg-type]
    parked["late"] = replace(parked["late"], until=time.monotonic())
    assert names(_park(engine, [], parked)) == ["late"]  # type: ignore[arg-type]
    assert engine.given_up == [engine.futures["a"]]
