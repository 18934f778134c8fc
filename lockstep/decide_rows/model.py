"""A loaded model as what decides about rows."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.async_llm import AsyncLLM
from lockstep.decide_rows.rows import Row
from lockstep.decide_rows.run import Decided
from lockstep.decisions import GatedCompletion
from lockstep.decisions.asking import GateArguments, gated_requests
from lockstep.engine.client import EngineState
from lockstep.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Decider:
    """Decides by `gate` and writes by `params`; the model is started already."""

    llm: AsyncLLM
    gate: GateArguments
    params: SamplingParams

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
        _, (gated,), requests = gated_requests(
            llm.builder, llm.branches, row.given, self.params, self.gate
        )
        (stream,) = await llm.submit(requests, begins=[gated.begins])
        completion = await stream.completion()
        return Decided(GatedCompletion.of(gated, completion), stream.answer.prompt_tokens)
