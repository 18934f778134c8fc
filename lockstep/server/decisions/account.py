"""From an inquiry to decisions, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.decisions import Decision, Inquiry
from lockstep.server.generation import Service, off_loop
from lockstep.server.running import complete
from lockstep.types import Completion


@dataclass(frozen=True, slots=True)
class Account:
    """Tokens of one call.

    Attributes:
        input_tokens: of the input, once, and of every question.
        read_tokens: of these, computed in this call. An input that is read once for all
            questions makes this at most `input_tokens`.
        output_tokens: positions at which the model, or a branch, was asked.
    """

    input_tokens: int
    read_tokens: int
    output_tokens: int

    @property
    def cached_tokens(self) -> int:
        """Input tokens that some earlier call has left in the cache."""
        return max(0, self.input_tokens - self.read_tokens)


async def answer(
    service: Service,
    make: Callable[[], Inquiry],
    characters: int,
    temperature: float | None = None,
) -> tuple[list[Decision], Account]:
    """Make an inquiry, run it, read its decisions.

    Args:
        make: tokenises; runs beside the event loop when there is much text.
        temperature: see `Inquiry.decisions`.

    Raises:
        RequestError, EngineUnavailable, GenerationError: as `running.complete`.
    """
    inquiry = await off_loop(make, characters)
    completions = await complete(service.llm, inquiry.requests())
    decisions = inquiry.decisions(completions, temperature)
    for decision in decisions:
        service.decided.count(decision)
    return decisions, _account(inquiry, completions)


def _account(inquiry: Inquiry, completions: Sequence[Completion]) -> Account:
    read = begin = 0
    for asked in inquiry.asked:  # the other probes of a question read what its first one did
        read += len(asked.prompt) - min(len(asked.prompt), completions[begin].cached_tokens)
        begin += asked.count
    return Account(inquiry.input_tokens, read, len(completions))
