"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import SkipValidation

from lockstep.server.protocol.gate import GateBody
from lockstep.server.protocol.generation import GenerationBody
from lockstep.types import RequestError

MAX_PROMPTS = 2048  # of a request, each choice counted


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[str | list[str] | list[int] | list[list[int]], SkipValidation]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    gate: GateBody | None = None

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"suffix": ("",)}

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one an answer.

        Raises:
            RequestError: none, too many, or something else.
        """
        prompt: Any = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list):
            raise RequestError(
                "prompt must be a string, a list of token ids, or a list of either, "
                f"got {type(prompt).__name__}",
                field="prompt",
            )
        if not prompt:
            raise RequestError("prompt must not be empty", field="prompt", code="empty_prompt")
        if not isinstance(prompt[0], str | list):
            return [prompt]  # each id is checked where the prompt is encoded
        if len(prompt) * (self.n or 1) > MAX_PROMPTS:
            raise RequestError(
                f"{len(prompt)} prompts with n={self.n or 1} ask for "
                f"{len(prompt) * (self.n or 1)} answers, at most {MAX_PROMPTS} are allowed",
                field="prompt",
            )
        for index, entry in enumerate(prompt):
            if not isinstance(entry, str | list):
                raise RequestError(
                    f"prompt[{index}] must be a string or a list of token ids, "
                    f"got {type(entry).__name__}",
                    field="prompt",
                )
        return list(prompt)

    def _own_sampling(self) -> dict[str, Any]:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(
                "best_of is not supported by this server unless it equals n",
                field="best_of",
                code="unsupported_parameter",
            )
        values: dict[str, Any] = {}
        wanted = 0 if self.logprobs is None and self.logprob_token_ids else self.logprobs
        if wanted is not None:
            values["logprobs"] = wanted
            if self.echo and self.gate is not None:
                raise RequestError("echo with logprobs cannot stand beside a gate", field="echo")
            if self.echo:
                values["prompt_logprobs"] = wanted
        return values
