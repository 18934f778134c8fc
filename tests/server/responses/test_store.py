"""The store keeps to its bounds, forgets in the right order, and no chain breaks."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lockstep.server.responses.objects import (
    AnyItem,
    FunctionCall,
    InputText,
    Message,
    OutputText,
    pack,
)
from lockstep.server.responses.store import OVERHEAD_BYTES, Limits, ResponseStore, Turn

EVERYBODY = ""


def said(name: str, text: str = "hello") -> Message:
    return Message(id=f"msg_{name}", role="user", content=(InputText(text=text),))


def answered(name: str, text: str = "hi") -> Message:
    return Message(id=f"out_{name}", role="assistant", content=(OutputText(text=text),))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def put(store: ResponseStore, name: str, *, parent: str = "", owner: str = EVERYBODY) -> None:
    store.put(
        owner,
        name,
        b"{}",
        parent=store.turn(owner, parent) if parent else None,
        inputs=pack([said(name)]),
        outputs=[answered(name)],
    )


def texts(items: tuple[AnyItem, ...]) -> list[str]:
    return [item.id for item in items]


def test_a_chain_is_read_from_its_start() -> None:
    store = ResponseStore(Limits())
    put(store, "a")
    put(store, "b", parent="a")
    put(store, "c", parent="b")
    put(store, "d", parent="a")  # a second answer to the same beginning
    turn = store.turn(EVERYBODY, "c")
    assert turn is not None
    assert texts(turn.inputs()) == ["msg_a", "out_a", "msg_b", "out_b", "msg_c"]
    assert texts(turn.outputs()) == ["out_c"]
    other = store.turn(EVERYBODY, "d")
    assert other is not None
    assert texts(other.inputs()) == ["msg_a", "out_a", "msg_d"]


def test_items_come_back_as_they_were() -> None:
    items: list[AnyItem] = [
        said("a", "\ud7ff \U0001f642\n"),
        FunctionCall(id="fc_1", call_id="call_1", name="f", arguments='{"a": 1}'),
    ]
    turn = Turn(None, pack(items), pack([answered("a")]))
    assert list(turn.inputs()) == items
    assert turn.outputs() == (answered("a"),)


def test_a_chain_outlives_the_responses_that_it_is_made_of() -> None:
    store = ResponseStore(Limits())
    put(store, "a")
    put(store, "b", parent="a")
    assert store.delete(EVERYBODY, "a")
    assert store.reply(EVERYBODY, "a") is None
    assert store.item(EVERYBODY, "out_a") is None
    turn = store.turn(EVERYBODY, "b")
    assert turn is not None
    assert texts(turn.inputs()) == ["msg_a", "out_a", "msg_b"]
    assert store.delete(EVERYBODY, "b")
    assert not store.delete(EVERYBODY, "b")
    assert store.total_bytes == 0


def test_the_least_recently_used_goes_first() -> None:
    store = ResponseStore(Limits(responses=2))
    put(store, "a")
    put(store, "b")
    assert store.reply(EVERYBODY, "a") is not None
    put(store, "c")
    assert store.reply(EVERYBODY, "b") is None
    assert store.reply(EVERYBODY, "a") is not None


def test_time_runs_out_for_what_nobody_uses() -> None:
    clock = Clock()
    store = ResponseStore(Limits(seconds=10), clock)
    put(store, "a")
    put(store, "b")
    clock.now = 9
    assert store.reply(EVERYBODY, "a") is not None
    clock.now = 11
    assert store.reply(EVERYBODY, "b") is None
    assert store.reply(EVERYBODY, "a") is not None
    clock.now = 22
    assert len(store) == 0
    assert store.total_bytes == 0


def test_owners_see_their_own_only() -> None:
    store = ResponseStore(Limits())
    put(store, "a", owner="alice")
    assert store.reply("bob", "a") is None
    assert store.turn("bob", "a") is None
    assert store.item("bob", "out_a") is None
    assert not store.delete("bob", "a")
    assert store.item("alice", "out_a") == answered("a")


def test_one_owner_cannot_push_out_anothers_few() -> None:
    store = ResponseStore(Limits(responses=5))
    put(store, "mine", owner="alice")
    for number in range(50):
        put(store, f"r{number}", owner="bob")
    assert store.reply("alice", "mine") is not None
    assert store.reply("bob", "r49") is not None
    assert len(store) == 5


def test_what_is_larger_than_the_store_leaves_the_others_alone() -> None:
    store = ResponseStore(Limits(total_bytes=20 * OVERHEAD_BYTES))
    put(store, "a")
    store.put(EVERYBODY, "b", b"x" * 20 * OVERHEAD_BYTES, parent=None, inputs=b"[]", outputs=[])
    assert store.reply(EVERYBODY, "b") is None
    assert store.reply(EVERYBODY, "a") is not None


def test_a_store_of_size_zero_keeps_nothing() -> None:
    store = ResponseStore(Limits(responses=0))
    put(store, "a")
    assert store.reply(EVERYBODY, "a") is None
    assert store.total_bytes == 0


class Driver(RuleBasedStateMachine):
    """Puts, uses, deletes and lets time pass, beside a model that keeps every conversation."""

    LIMITS = Limits(responses=6, total_bytes=30 * OVERHEAD_BYTES, seconds=20)

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = ResponseStore(self.LIMITS, self.clock)
        self.conversations: dict[tuple[str, str], list[str]] = {}  # that were ever put
        self.held: list[tuple[str, Turn, list[str]]] = []  # by requests that still run

    owners = st.sampled_from(["alice", "bob"])
    numbers = st.integers(0, 10**6)

    def pick(self, owner: str, number: int) -> str | None:
        names = [name for who, name in self.conversations if who == owner]
        return names[number % len(names)] if names else None

    @rule(owner=owners, number=numbers, size=st.integers(0, 6000), chained=st.booleans())
    def put(self, owner: str, number: int, size: int, chained: bool) -> None:
        before = self.pick(owner, number) if chained else None
        parent = None if before is None else self.store.turn(owner, before)
        known = self.conversations[owner, before] if before and parent else []
        self._put(owner, parent, known, size)

    def _put(self, owner: str, parent: Turn | None, known: list[str], size: int) -> None:
        name = f"r{len(self.conversations)}"
        self.store.put(
            owner,
            name,
            json.dumps(name).encode(),
            parent=parent,
            inputs=pack([said(name, "x" * size)]),
            outputs=[answered(name)],
        )
        self.conversations[owner, name] = [*known, f"msg_{name}", f"out_{name}"]

    @rule(owner=owners, number=numbers)
    def hold(self, owner: str, number: int) -> None:
        """A request starts on a conversation; its response is put later, if ever."""
        name = self.pick(owner, number)
        turn = None if name is None else self.store.turn(owner, name)
        if name is not None and turn is not None:
            self.held.append((owner, turn, self.conversations[owner, name]))

    @precondition(lambda self: self.held)
    @rule(size=st.integers(0, 100))
    def put_held(self, size: int) -> None:
        owner, turn, known = self.held.pop(0)
        self._put(owner, turn, known, size)

    @rule(owner=owners, number=numbers)
    def delete(self, owner: str, number: int) -> None:
        name = self.pick(owner, number)
        if name is not None:
            self.store.delete(owner, name)
            assert self.store.reply(owner, name) is None

    @rule(seconds=st.integers(0, 12))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @invariant()
    def within_bounds(self) -> None:
        assert len(self.store) <= self.LIMITS.responses
        assert 0 <= self.store.total_bytes <= self.LIMITS.total_bytes

    @invariant()
    def what_is_there_is_whole(self) -> None:
        """Looking uses a response, so only what the store says it has is looked at."""
        reached: dict[int, Turn] = {}
        expected = 0
        for owner, shelf in self.store._shelves.items():
            for name, entry in shelf.entries.items():
                assert json.loads(entry.reply) == name
                items: Any = entry.turn.whole()
                assert [item.id for item in items] == self.conversations[owner, name]
                expected += len(entry.reply) + OVERHEAD_BYTES
                turn: Turn | None = entry.turn
                while turn is not None:
                    reached[id(turn)] = turn
                    turn = turn.parent
        assert self.store.total_bytes == expected + sum(turn.size for turn in reached.values())


TestDriver = Driver.TestCase
TestDriver.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
