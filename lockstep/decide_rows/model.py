"""A loaded model as what decides about rows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from lockstep.async_llm import AsyncLLM
from lockstep.decide_rows.rows import Row
from lockstep.decide_rows.run import Decided
from lockstep.decisions import Gated, GatedCompletion
from lockstep.decisions.asking import GateArguments, gated_requests
from lockstep.engine.client import EngineState
from lockstep.requests import LONG_TEXT
from lockstep.types import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Decider:
    """Decides by `gate` and writes by `params`; the model is started already.

    Long rows are tokenised beside the loop, and one at a time: a megabyte takes hundreds of
    megabytes of memory.
    """

    llm: AsyncLLM
    gate: GateArguments
    params: SamplingParams
    _long: asyncio.Lock = field(default_factory=asyncio.Lock, init=False, repr=False)

    def check(self) -> None:
        """Refuse at once what no row could be served with.

        Raises:
            RequestError: naming the field of the gate or of the parameters.
        """
        gated_requests(self.llm.builder, self.llm.branches, "x", self.params, self.gate)

    def ready(self) -> bool:
        """Whether the engine takes requests."""
        return self.llm.client.state is EngineState.READY

    async def __call__(self, row: Row) -> Decided:
        """See `Run.decide`."""
        llm = self.llm
        if row.characters < LONG_TEXT:
            gated, requests = self._requests(row)
        else:
            async with self._long:
                gated, requests = await asyncio.to_thread(self._requests, row)
        (stream,) = await llm.submit(requests, begins=[gated.begins])
        completion = await stream.completion()
        return Decided(GatedCompletion.of(gated, completion), stream.answer.prompt_tokens)

    def _requests(self, row: Row) -> tuple[Gated, list[Request]]:
        builder, branches = self.llm.builder, self.llm.branches
        _, (gated,), requests = gated_requests(builder, branches, row.given, self.params, self.gate)
        return gated, requests
