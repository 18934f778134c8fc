"""What the engine says of one request, until somebody reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lockstep.types import FinishReason, LockstepError, SequenceOutput


class OutputQueue:
    """Outputs of one request. One reader, on the event loop of the writer.

    A reader who comes late gets what has gathered of a choice as one output. So a client, a
    network or a server that does not keep up with the engine costs less for each token, and
    catches up; the answer is the same, cut into fewer pieces.
    """

    def __init__(self) -> None:
        # By choice. Choices are read in the order in which their first unread outputs came.
        self._unread: dict[int, list[SequenceOutput]] = {}
        self._failure: LockstepError | None = None
        self._reader: asyncio.Future[None] | None = None

    def put_nowait(self, item: SequenceOutput | LockstepError) -> None:
        """Add an output; or an error, after which nothing more comes."""
        if isinstance(item, LockstepError):
            self._failure = item
        else:
            self._unread.setdefault(item.choice, []).append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> SequenceOutput | LockstepError:
        """The unread outputs of one choice, as one; the error when there are none left.

        Waits while there is neither.
        """
        while not self._unread:
            if self._failure is not None:
                return self._failure
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        choice = next(iter(self._unread))
        outputs = self._unread.pop(choice)
        if len(outputs) == 1:
            return outputs[0]
        if outputs[-1].finish is FinishReason.ERROR:  # its tokens came before it failed
            self._unread[choice] = [outputs.pop()]
        return joined(outputs)


def joined(outputs: Sequence[SequenceOutput]) -> SequenceOutput:
    """Consecutive outputs of one choice as one."""
    first, last = outputs[0], outputs[-1]
    told = (output.prompt_logprobs for output in outputs)
    gates = (output.gate for output in outputs)
    return SequenceOutput(
        request=first.request,
        choice=first.choice,
        tokens=tuple(token for output in outputs for token in output.tokens),
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
        prompt_logprobs=next((entries for entries in told if entries is not None), None),
        finish=last.finish,
        cached_tokens=last.cached_tokens,
        error=last.error,
        started=last.started,
        pooled=last.pooled,
        scores=last.scores,
        gate=next((gate for gate in gates if gate is not None), None),
    )
