"""Patience: who is to blame when an engine dies, and who only stood by."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.places import Places
from lockstep.server.batches import attempts
from lockstep.server.batches.attempts import ALONE, FULL_QUEUE, IN_COMPANY, Sender


class Engine:
    """Answers b"ok" after a moment; a line in `poison` kills it and all lines that are in it."""

    def __init__(self, poison: set[bytes]) -> None:
        self.poison = poison
        self.up = True
        self.deaths = 0
        self.inside: set[bytes] = set()
        self.most = 0
        self.company: dict[bytes, list[int]] = {}  # lines beside it, at each attempt
        self._death = asyncio.Event()

    async def post(self, path: str, body: bytes, owner: str) -> tuple[int, bytes]:
        if not self.up:
            return 503, b'{"error":{"message":"restarting","code":"engine_unavailable"}}'
        self.inside.add(body)
        self.most = max(self.most, len(self.inside))
        death = self._death
        try:
            await asyncio.sleep(0)
            self.company.setdefault(body, []).append(len(self.inside) - 1)
            await asyncio.sleep(0)
            if body in self.poison and not death.is_set():
                self._die()
            await asyncio.sleep(0)
            return (503, b"{}") if death.is_set() else (200, b"ok")
        finally:
            self.inside.discard(body)

    def _die(self) -> None:
        self.deaths += 1
        self.up = False
        self._death.set()
        self._death = asyncio.Event()
        asyncio.get_running_loop().call_later(0.002, self._restart)

    def _restart(self) -> None:
        self.up = True

    def sender(self, places: int) -> Sender:
        return Sender(self.post, lambda: self.up, Places(places), first_pause=0.0001)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "READY_POLL", 0.0005)
    monkeypatch.setattr(attempts, "LONGEST_PAUSE", 0.001)


async def _all(sender: Sender, lines: list[bytes]) -> list[tuple[int, bytes]]:
    return list(await asyncio.gather(*(sender.answer("/", line, "") for line in lines)))


@given(st.integers(1, 30), st.integers(1, 8), st.sets(st.integers(0, 29), max_size=3))
@settings(max_examples=40, deadline=None)
def test_lines_that_kill_get_an_error_and_bystanders_their_answer(
    count: int, places: int, bad: set[int]
) -> None:
    async def main() -> None:
        lines = [str(number).encode() for number in range(count)]
        poison = {line for number, line in enumerate(lines) if number in bad}
        engine = Engine(poison)
        replies = await _all(engine.sender(places), lines)
        for line, (status, _) in zip(lines, replies, strict=True):
            assert status == (503 if line in poison else 200)
        assert engine.deaths <= len(poison) * (IN_COMPANY + ALONE)
        assert engine.most <= places
        for line in poison:
            assert engine.company[line][IN_COMPANY:] == [0] * ALONE, "its last chances are alone"

    asyncio.run(main())


async def test_an_engine_that_is_away_for_long_fails_no_line() -> None:
    engine = Engine(set())
    engine.up = False
    tasks = asyncio.create_task(_all(engine.sender(2), [b"a", b"b", b"c"]))
    await asyncio.sleep(0.05)
    assert not tasks.done()
    engine.up = True
    assert [status for status, _ in await tasks] == [200] * 3


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [(429, b"{}", FULL_QUEUE), (500, b"{}", IN_COMPANY + ALONE), (503, b"{}", IN_COMPANY + ALONE)],
)
async def test_attempts_are_bounded(status: int, body: bytes, expected: int) -> None:
    calls = 0

    async def post(path: str, sent: bytes, owner: str) -> tuple[int, bytes]:
        nonlocal calls
        calls += 1
        return status, body

    sender = Sender(post, lambda: True, Places(3), first_pause=0.0001)
    assert await sender.answer("/", b"", "") == (status, body)
    assert calls == expected


@pytest.mark.parametrize("status", [200, 400, 404, 413, 422])
async def test_an_answer_is_an_answer(status: int) -> None:
    async def post(path: str, sent: bytes, owner: str) -> tuple[int, bytes]:
        return status, b"x"

    assert await Sender(post, lambda: True, Places(1)).answer("/", b"", "") == (status, b"x")


async def test_being_turned_away_by_a_drain_is_no_failure() -> None:
    left = 3 * (IN_COMPANY + ALONE)

    async def post(path: str, sent: bytes, owner: str) -> tuple[int, bytes]:
        nonlocal left
        left -= 1
        return (200, b"ok") if left == 0 else (503, b'{"error":{"code":"draining"}}')

    sender = Sender(post, lambda: True, Places(1), first_pause=0.0001)
    assert await sender.answer("/", b"", "") == (200, b"ok")


async def test_alone_means_alone_and_places_come_back_when_cancelled() -> None:
    places = Places(3)

    async def hold(alone: bool, seconds: float) -> None:
        async with places.take(alone=alone):
            await asyncio.sleep(seconds)

    crowd = [asyncio.create_task(hold(False, 0.01)) for _ in range(3)]
    await asyncio.sleep(0.001)
    waiting = asyncio.create_task(hold(True, 10))
    await asyncio.sleep(0.002)
    waiting.cancel()
    await asyncio.gather(*crowd, waiting, return_exceptions=True)
    await asyncio.wait_for(hold(True, 0), 1)
    await asyncio.wait_for(asyncio.gather(*(hold(False, 0.001) for _ in range(9))), 1)
