"""What an operated server knows: who calls, what runs, what it cost, and whether it drains.

`Operations` stands at `app.state.operations`. Every HTTP request passes `frontdoor.py`, which
makes a `Call`; every request to the engine, whichever route or job sends it, passes `admit`
and gets a `Watch`. Nothing else counts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.async_llm import AsyncLLM, Outcome
from lockstep.config import ServerConfig
from lockstep.outputs import Delta
from lockstep.requests import longest_read
from lockstep.server import calls
from lockstep.server.auth import Keyring
from lockstep.server.calls import Call
from lockstep.server.errors import Draining, RequestCancelled
from lockstep.server.limits import Allowance, Allowances
from lockstep.server.metrics import Metrics
from lockstep.server.tracing import Tracer
from lockstep.types import Request, RequestError

prompts_log = logging.getLogger("lockstep.prompts")

DRAIN_RETRY_SECONDS = 5.0
# What clients call the prompt and the length of the answer, by route; elsewhere they have
# names of the route's own, or none.
_FIELDS = {
    "/v1/completions": ("prompt", "max_tokens"),
    "/v1/chat/completions": ("messages", "max_tokens"),
    "/v1/responses": ("input", "max_output_tokens"),
    "/v1/embeddings": ("input", ""),
    "/v1/classify": ("input", ""),
    "/classify": ("input", ""),
}


class Operations:
    """State and bookkeeping of one server.

    Raises:
        ConfigError: a keys file or an endpoint that cannot be used.
    """

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        self.config = config
        self.keyring = Keyring(
            Path(config.keys_file) if config.keys_file else None,
            config.api_keys,
            config.admin_keys,
        )
        self.allowances = Allowances(config)
        self.metrics = Metrics(llm, self._model_name, aliases=config.vllm_metric_names)
        self.tracer = Tracer(config.otlp_endpoint) if config.otlp_endpoint else None
        self.live: dict[str, Watch] = {}  # requests in the engine, by id
        self.metrics.background = lambda: sum(not w.has_client for w in self.live.values())
        self._llm = llm
        self._leaving = False
        llm.doorkeeper = self

    def _model_name(self) -> str:
        return self.config.served_name or self._llm.client.config.model.name

    # --- draining -------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """Whether new requests are turned away."""
        return self.metrics.draining

    @property
    def leaving(self) -> bool:
        """Whether the process is about to end."""
        return self._leaving

    def drain(self, *, leaving: bool = False) -> None:
        """Turn new requests away. `leaving`: the process is about to end; no way back."""
        self.metrics.draining = True
        self._leaving = self._leaving or leaving

    def undrain(self) -> None:
        """Take requests again.

        Raises:
            RequestError: the process is about to end.
        """
        if self._leaving:
            raise RequestError("the server is shutting down", code="shutting_down")
        self.metrics.draining = False

    def refusal(self) -> Draining:
        """What a new request is told while draining."""
        text = "the server is shutting down" if self._leaving else "the server is being drained"
        return Draining(f"{text} and takes no new requests", retry_after=DRAIN_RETRY_SECONDS)

    async def drained(self, seconds: float) -> bool:
        """Wait until no client's request runs; after `seconds` end those that do, with an error.

        What runs behind a reply is not waited for: who sent it off takes it up again.
        """
        deadline = time.monotonic() + seconds
        while self.metrics.in_flight:
            if time.monotonic() >= deadline:
                error = Draining("the server is shutting down", retry_after=DRAIN_RETRY_SECONDS)
                for request_id in list(self.live):
                    self._llm.client.abort(request_id, error)
                return False
            await asyncio.sleep(0.05)
        return True

    def cancel(self, name: str) -> list[str]:
        """End requests in the engine, with an error to whoever waits for them.

        Args:
            name: an engine request's id, the id of the answer that it belongs to, or the
                `x-request-id` of the HTTP request that sent it.

        Returns:
            The ids of what was ended.
        """
        error = RequestCancelled(
            "the server's operator cancelled this request", code="request_cancelled"
        )
        found = [request_id for request_id, watch in self.live.items() if watch.is_called(name)]
        return [each for each in found if self._llm.client.abort(each, error)]

    def close(self) -> None:
        """Send the last traces."""
        if self.tracer is not None:
            self.tracer.close()

    # --- requests to the engine: the doorkeeper's part ----------------------------------------

    def admit(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Hold requests against the server's limits; the longest answer is a default, too.

        Raises:
            RequestError: a prompt or an answer that is too long here.
            Draining: work of the server's own, such as a batch's, while it drains.
        """
        call = calls.current.get()
        if self.draining and (call is None or call.ended):
            raise self.refusal()
        fields = _FIELDS.get(call.path if call is not None else "", ("", ""))
        checked = [self._within_limits(request, *fields) for request in requests]
        if self.config.isolate_keys and call is not None and call.key is not None:
            return [replace(request, salt=call.key.name) for request in checked]
        return checked

    def _within_limits(self, request: Request, prompt: str, output: str) -> Request:
        config, wanted = self.config, request.sampling.max_tokens
        length = longest_read(request)
        if config.max_prompt_tokens and length > config.max_prompt_tokens:
            raise RequestError(
                f"the prompt has {length} tokens, but this server takes "
                f"{config.max_prompt_tokens} at most",
                field=prompt,
                code="prompt_too_long",
            )
        if not config.max_output_tokens:
            return request
        if wanted is None:
            sampling = replace(request.sampling, max_tokens=config.max_output_tokens)
            return replace(request, sampling=sampling)
        if wanted > config.max_output_tokens:
            raise RequestError(
                f"{output or 'max_tokens'} is {wanted}, but this server writes "
                f"{config.max_output_tokens} at most",
                field=output,
                code="max_tokens_too_large",
            )
        return request

    def watch(self, request: Request, submitted: float) -> Watch:
        """Begin the account of a request that the engine has taken."""
        watch = Watch(self, request, submitted, calls.current.get())
        self.live[request.id] = watch
        return watch

    def decode(self, tokens: Sequence[int]) -> str:
        """A prompt as text, for the log."""
        return self._llm.tokenizer.decode(list(tokens), skip_special_tokens=False)

    def allowance(self, call: Call | None) -> Allowance:
        """Whom a request's tokens are charged to."""
        return self.allowances.of(call.key if call is not None else None)


class Watch:
    """The account of one request in the engine, from acceptance to outcome."""

    def __init__(
        self, operations: Operations, request: Request, submitted: float, call: Call | None
    ) -> None:
        self.request = request
        self.call = call
        self.submitted = submitted
        self.generated = 0
        self._operations = operations
        self._metrics = operations.metrics
        # What runs behind a reply, such as a batch, has no client who could be told to wait.
        self._allowance = operations.allowance(call) if self.has_client else None
        self._arrived = submitted
        self._started = 0.0
        self._first = 0.0
        self._last = 0.0
        n = request.sampling.n
        self._firsts = [0.0] * n
        self._lasts = [0.0] * n
        self._counts = [0] * n
        self._cached = 0
        self._texts: list[list[str]] | None = None
        if operations.config.log_prompts:
            self._texts = [[] for _ in range(n)]
        self._accept()

    @property
    def has_client(self) -> bool:
        """Whether somebody waits for it, unlike for a batch's line."""
        return self.call is not None and not self.call.ended

    def is_called(self, name: str) -> bool:
        """Whether an operator may mean this request by `name`."""
        own = self.request.id
        return name in (own, own.rpartition("-")[0]) or (
            self.call is not None and self.call.id == name
        )

    def _accept(self) -> None:
        tokens = longest_read(self.request)
        metrics, call = self._metrics, self.call
        metrics.accepted += 1
        metrics.prompt_tokens += tokens
        metrics.request_prompt_tokens.observe(tokens)
        if self._allowance is not None:
            self._allowance.charge(tokens)
        if call is None:
            return
        if not call.requests:
            call.submitted = self.submitted
        if call.submitted == self.submitted:
            self._arrived = call.began  # the first of its call: text work counts
        call.requests += 1
        call.prompt_tokens += tokens
        if call.key is not None:
            metrics.key_tokens[call.key.name, "prompt"] += tokens

    def progress(self, delta: Delta, started: float) -> None:
        """Take note of a delta's tokens and of the time."""
        count = len(delta.token_ids)
        metrics, choice = self._metrics, delta.choice
        if not self._started and started:
            self._begin(delta, started)
        if count:
            now = time.monotonic()
            last = self._lasts[choice]
            if last:
                metrics.inter_token_latency.observe(now - last)
            else:
                self._firsts[choice] = now
                if not self._first:
                    self._first_token(now)
            for _ in range(count - 1):  # a late reader gets several at once
                metrics.inter_token_latency.observe(0.0)
            self._lasts[choice] = self._last = now
            self._counts[choice] += count
            self._count(count)
        if self._texts is not None:
            self._texts[choice].append(delta.text)
        if delta.finish_reason is not None:
            self._finish(choice, delta.finish_reason.value)

    def _begin(self, delta: Delta, started: float) -> None:
        self._started = started
        self._cached = delta.cached_tokens
        self._metrics.queue_time.observe(max(0.0, started - self.submitted))
        self._metrics.cached_tokens += delta.cached_tokens
        if self.call is not None:
            self.call.cached_tokens += delta.cached_tokens

    def _first_token(self, now: float) -> None:
        self._first = now
        self._metrics.time_to_first_token.observe(now - self._arrived)
        self._metrics.prefill_time.observe(max(0.0, now - self._started))
        if self.call is not None and not self.call.first_token:
            self.call.first_token = now

    def _count(self, tokens: int) -> None:
        self.generated += tokens
        self._metrics.generation_tokens += tokens
        if self._allowance is not None:
            self._allowance.charge(tokens)
        call = self.call
        if call is not None:
            call.generated_tokens += tokens
            if call.key is not None:
                self._metrics.key_tokens[call.key.name, "generation"] += tokens

    def _finish(self, choice: int, reason: str) -> None:
        self._metrics.finishes[reason] += 1
        if self._counts[choice] > 1:
            mean = (self._lasts[choice] - self._firsts[choice]) / (self._counts[choice] - 1)
            self._metrics.time_per_output_token.observe(mean)
        if self.call is not None:
            self.call.finishes.append(reason)

    def ended(self, outcome: Outcome) -> None:
        """Close the account."""
        metrics, now = self._metrics, time.monotonic()
        self._operations.live.pop(self.request.id, None)
        metrics.outcomes[outcome] += 1
        if self.call is not None and outcome is not Outcome.COMPLETED:
            self.call.finishes.append(outcome.value)
        if outcome is Outcome.COMPLETED:
            metrics.latency.observe(now - self._arrived)
            metrics.request_generation_tokens.observe(self.generated)
            if self._first:
                metrics.decode_time.observe(self._last - self._first)
                metrics.inference_time.observe(max(0.0, self._last - self._started))
        if self._texts is not None:
            self._log_texts(outcome)
        tracer = self._operations.tracer
        if tracer is not None and self.call is not None:
            facts: dict[str, str | int] = {
                "gen_ai.response.id": self.request.id,
                "gen_ai.usage.input_tokens": len(self.request.prompt),
                "gen_ai.usage.output_tokens": self.generated,
                "lockstep.cached_tokens": self._cached,
                "lockstep.outcome": outcome.value,
            }
            tracer.phases(self.call, self._phases(now), facts)

    def _phases(self, now: float) -> dict[str, tuple[float, float]]:
        """The phases that there were, each with its beginning and its end."""
        started = max(self._started, self.submitted) if self._started else 0.0
        phases = {"queue": (self.submitted, started or now)}
        if started:
            phases["prefill"] = (started, max(started, self._first or now))
        if self._first:
            phases["decode"] = (max(started, self._first), self._last)
        return phases

    def _log_texts(self, outcome: Outcome) -> None:
        assert self._texts is not None
        fields = {
            "engine_request": self.request.id,
            "outcome": outcome.value,
            "prompt": self._operations.decode(self.request.prompt),
            "answers": ["".join(parts) for parts in self._texts],
        }
        prompts_log.info("prompt and answers", extra={"fields": fields})
