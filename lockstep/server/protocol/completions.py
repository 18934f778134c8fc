"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Any, ClassVar

from lockstep.server.protocol.generation import GenerationBody
from lockstep.types import RequestError

MAX_PROMPTS = 2048  # of a request, each choice counted


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"suffix": ("",)}

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one an answer.

        Raises:
            RequestError: none, or too many.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt must not be empty", field="prompt", code="empty_prompt")
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        if len(self.prompt) * (self.n or 1) > MAX_PROMPTS:
            raise RequestError(
                f"{len(self.prompt)} prompts with n={self.n or 1} ask for "
                f"{len(self.prompt) * (self.n or 1)} answers, at most {MAX_PROMPTS} are allowed",
                field="prompt",
            )
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]

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
            if self.echo:
                values["prompt_logprobs"] = wanted
        return values
