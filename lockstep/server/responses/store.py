"""Finished responses and the conversations behind them, for a while and up to a size.

The store lives in the server's memory: another server process does not see it, and it is
empty after a restart. Whoever needs more sends the whole conversation each time.

A conversation is a list of turns, each pointing at the one before it, so that a chain of
n responses is kept once and not n times. A turn lives as long as a stored response reaches
it: a response that has been forgotten leaves its turn to those that were built on it, and
a chain never breaks in the middle.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.server.responses.objects import AnyItem, pack, unpack

# What an entry or a turn weighs beside its data: objects, keys, places in the tables.
OVERHEAD_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is kept.

    Attributes:
        responses: number of responses.
        total_bytes: of all responses and turns as JSON, with `OVERHEAD_BYTES` each.
        seconds: how long a response is kept after it was last used.
    """

    responses: int = 10_000
    total_bytes: int = 256 * 1024 * 1024
    seconds: float = 24 * 3600.0


class Turn:
    """What one response adds to a conversation: its input, then its output. Immutable.

    Args:
        parent: the turn before it.
        inputs, outputs: items, packed.

    Attributes:
        length: bytes of the whole conversation up to its end.
    """

    __slots__ = ("_inputs", "_outputs", "length", "parent", "references")

    def __init__(self, parent: Turn | None, inputs: bytes, outputs: bytes) -> None:
        self.parent = parent
        self.references = 0  # responses and later turns that reach this one; the store counts
        self._inputs = inputs
        self._outputs = outputs
        before = parent.length if parent is not None else 0
        self.length: int = before + len(inputs) + len(outputs)

    @property
    def size(self) -> int:
        """Bytes that this turn takes, those before it not counted."""
        return len(self._inputs) + len(self._outputs) + OVERHEAD_BYTES

    def inputs(self) -> tuple[AnyItem, ...]:
        """All items that the model read for this turn: those before it, then its input."""
        before = () if self.parent is None else self.parent.whole()
        return (*before, *unpack(self._inputs))

    def outputs(self) -> tuple[AnyItem, ...]:
        """The items that the model wrote."""
        return unpack(self._outputs)

    def whole(self) -> tuple[AnyItem, ...]:
        """Every item of the conversation up to the end of this turn."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return tuple(
            item
            for one in reversed(turns)
            for data in (one._inputs, one._outputs)
            for item in unpack(data)
        )


@dataclass(slots=True)
class _Entry:
    reply: bytes
    turn: Turn
    items: tuple[str, ...]  # ids of its output
    used: float


class _Shelf:
    """What one owner has, least recently used first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, _Entry] = OrderedDict()
        self.by_item: dict[str, str] = {}  # an output item's response
        self.size = 0

    def put(self, response_id: str, entry: _Entry) -> None:
        self.entries[response_id] = entry
        for item in entry.items:
            self.by_item[item] = response_id
        self.size += len(entry.reply) + OVERHEAD_BYTES
        turn: Turn | None = entry.turn
        while turn is not None:  # one that is reached for the first time is paid for
            turn.references += 1
            if turn.references > 1:
                return
            self.size += turn.size
            turn = turn.parent

    def forget(self, response_id: str) -> None:
        entry = self.entries.pop(response_id)
        for item in entry.items:
            del self.by_item[item]
        self.size -= len(entry.reply) + OVERHEAD_BYTES
        turn: Turn | None = entry.turn
        while turn is not None:  # one that nothing reaches any more lets go of the one before
            turn.references -= 1
            if turn.references:
                return
            self.size -= turn.size
            turn = turn.parent


class ResponseStore:
    """Responses by owner and id.

    When it is full, the owner who has most loses what it used least recently, so that one
    owner's traffic does not push out another's few responses.

    Not thread-safe: used from the server's event loop only.

    Args:
        clock: seconds that never run backwards.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._shelves: dict[str, _Shelf] = {}

    def __len__(self) -> int:
        self._expire()
        return sum(len(shelf.entries) for shelf in self._shelves.values())

    @property
    def total_bytes(self) -> int:
        """Bytes held, as `Limits.total_bytes` counts them."""
        return sum(shelf.size for shelf in self._shelves.values())

    def put(
        self,
        owner: str,
        response_id: str,
        reply: bytes,
        *,
        parent: Turn | None,
        inputs: bytes,
        outputs: Sequence[AnyItem],
    ) -> None:
        """Keep a finished response; others may be forgotten for it.

        One that alone is larger than the store is not kept.

        Args:
            owner: who may read it; the same for everybody when there are no keys.
            reply: the response as `GET` answers it.
            parent: of the response that it continues, as `turn` gave it.
            inputs: items, packed.
        """
        turn = Turn(parent, inputs, pack(outputs))
        if len(reply) + OVERHEAD_BYTES + turn.size > self._limits.total_bytes:
            return
        entry = _Entry(reply, turn, tuple(item.id for item in outputs), self._clock())
        self._shelves.setdefault(owner, _Shelf()).put(response_id, entry)
        self._expire()
        while (excess := len(self) - self._limits.responses) > 0 or (
            self.total_bytes > self._limits.total_bytes
        ):
            self._forget_one_of(
                max(
                    self._shelves,
                    key=lambda name: (
                        len(self._shelves[name].entries) if excess > 0 else self._shelves[name].size
                    ),
                )
            )

    def reply(self, owner: str, response_id: str) -> bytes | None:
        """The response as JSON, or None when this owner has no such response."""
        entry = self._use(owner, response_id)
        return None if entry is None else entry.reply

    def turn(self, owner: str, response_id: str) -> Turn | None:
        """Where the conversation stands after a response; None as for `reply`."""
        entry = self._use(owner, response_id)
        return None if entry is None else entry.turn

    def item(self, owner: str, item_id: str) -> AnyItem | None:
        """An output item of a stored response of this owner, by its id."""
        shelf = self._shelves.get(owner)
        response_id = None if shelf is None else shelf.by_item.get(item_id)
        turn = None if response_id is None else self.turn(owner, response_id)
        if turn is None:
            return None
        return next((item for item in turn.outputs() if item.id == item_id), None)

    def delete(self, owner: str, response_id: str) -> bool:
        """Forget a response; False when this owner has no such response."""
        if self._use(owner, response_id) is None:
            return False
        self._forget(owner, response_id)
        return True

    def _use(self, owner: str, response_id: str) -> _Entry | None:
        self._expire()
        shelf = self._shelves.get(owner)
        entry = None if shelf is None else shelf.entries.get(response_id)
        if shelf is not None and entry is not None:
            entry.used = self._clock()
            shelf.entries.move_to_end(response_id)
        return entry

    def _expire(self) -> None:
        """Forget what has not been used for too long."""
        oldest_allowed = self._clock() - self._limits.seconds
        for owner in list(self._shelves):
            entries = self._shelves[owner].entries
            while entries and next(iter(entries.values())).used < oldest_allowed:
                self._forget_one_of(owner)

    def _forget_one_of(self, owner: str) -> None:
        self._forget(owner, next(iter(self._shelves[owner].entries)))

    def _forget(self, owner: str, response_id: str) -> None:
        shelf = self._shelves[owner]
        shelf.forget(response_id)
        if not shelf.entries:
            del self._shelves[owner]
