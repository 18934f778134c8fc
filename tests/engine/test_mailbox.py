"""What is read from an output queue, whenever it is read, is what was put in."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.engine.mailbox import OutputQueue, joined
from lockstep.types import FinishReason, LockstepError, SequenceOutput, TokenLogprob

ENDS = [FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.ERROR]


def outputs(choice: int, lengths: list[int], finish: FinishReason) -> list[SequenceOutput]:
    """Those of one choice: so many tokens in each, and how the last one ends."""
    made, token = [], 0
    for index, length in enumerate(lengths):
        tokens = tuple(range(token, token + length))
        token += length
        last = index == len(lengths) - 1
        made.append(
            SequenceOutput(
                "r",
                choice,
                tokens,
                tuple(TokenLogprob(each, -float(each), 1) for each in tokens),
                prompt_logprobs=(None,) if index == 0 else None,
                finish=finish if last else None,
                cached_tokens=7,
                error="broken" if last and finish is FinishReason.ERROR else "",
                started=1.5,
                pooled=(b"x",) if last else (),
            )
        )
    return made


choices = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.sampled_from(ENDS)),
    min_size=1,
    max_size=4,
)


@given(choices=choices, fails=st.booleans(), data=st.data())
async def test_reads_hold_what_was_put_in(
    choices: list[tuple[list[int], FinishReason]], fails: bool, data: st.DataObject
) -> None:
    whole = [outputs(choice, *each) for choice, each in enumerate(choices)]
    waiting = [list(own) for own in whole]
    queue, unread = OutputQueue(), 0
    read: list[SequenceOutput | LockstepError] = []
    while any(waiting):
        own = data.draw(st.sampled_from([own for own in waiting if own]))
        queue.put_nowait(own.pop(0))
        unread += 1
        if data.draw(st.booleans()):
            read.append(await queue.get())
    error = LockstepError("gone")
    if fails:
        queue.put_nowait(error)
    while queue._unread:
        read.append(await queue.get())
    for choice, own in enumerate(whole):
        parts = [each for each in read if isinstance(each, SequenceOutput)]
        parts = [each for each in parts if each.choice == choice]
        assert joined(parts) == joined(own)
        assert parts[0].prompt_logprobs == (None,)
        assert all(each.started == 1.5 and each.cached_tokens == 7 for each in parts)
        assert all(each.finish is None for each in parts[:-1])
        if own[-1].finish is FinishReason.ERROR:  # what was written before it is not lost
            assert parts[-1] == own[-1]
    if fails:
        assert await queue.get() is error
        assert await queue.get() is error


async def test_a_late_reader_gets_all_of_a_choice_at_once() -> None:
    queue = OutputQueue()
    first, second = outputs(0, [1, 1, 1], FinishReason.STOP), outputs(1, [1, 1], FinishReason.STOP)
    for output in (first[0], second[0], first[1], second[1], first[2]):
        queue.put_nowait(output)
    assert await queue.get() == joined(first)
    assert await queue.get() == joined(second)


async def test_a_reader_waits_and_may_give_up() -> None:
    queue = OutputQueue()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.get(), 0.01)
    (output,) = outputs(0, [1], FinishReason.STOP)
    reader = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.put_nowait(output)
    assert await reader is output
