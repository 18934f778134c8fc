"""One request to `/v1/responses` from its body to its last event."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from lockstep.outputs import Delta
from lockstep.server import errors, logprobs
from lockstep.server.answers import PieceStream
from lockstep.server.errors import NotFound
from lockstep.server.generation import Envelope, Service, build_requests, off_loop
from lockstep.server.replies import ChatLogprob, encode
from lockstep.server.responses import items
from lockstep.server.responses.bodies import ResponseBody
from lockstep.server.responses.builder import ResponseBuilder
from lockstep.server.responses.events import Event
from lockstep.server.responses.objects import (
    AnyItem,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseUsage,
)
from lockstep.server.responses.store import ResponseStore, Turn
from lockstep.types import RequestError

log = logging.getLogger("lockstep.server")


class Input:
    """What the model is to read: an earlier conversation, if there is one, and new items.

    Raises:
        NotFound: no such response is stored for this owner.
        RequestError: items that cannot be read.
    """

    def __init__(self, body: ResponseBody, store: ResponseStore, owner: str) -> None:
        self.parent: Turn | None = None
        if body.previous_response_id is not None:
            self.parent = store.turn(owner, body.previous_response_id)
            if self.parent is None:
                raise NotFound(
                    f"there is no stored response {body.previous_response_id!r}: it never was, "
                    "was not finished, or has been forgotten; send the whole conversation instead",
                    field="previous_response_id",
                    code="previous_response_not_found",
                )
        self.items: tuple[AnyItem, ...]
        if isinstance(body.input, str):
            self.items = (items.user_message(body.input),)
        else:
            self.items = items.read(body.input, lambda item: store.item(owner, item))

    def whole(self) -> tuple[AnyItem, ...]:
        """Every item from the conversation's start."""
        before = () if self.parent is None else self.parent.whole()
        return (*before, *self.items)


async def prompt_of(service: Service, body: ResponseBody, given: Input) -> list[int]:
    """Token ids that the model reads.

    Raises:
        RequestError: the chat template's complaint among others.
    """
    whole = given.whole()
    if not whole:
        raise RequestError("input must not be empty", field="input", code="empty_prompt")
    messages = items.conversation(body.instructions, whole)
    builder = service.llm.builder
    try:
        return await off_loop(
            lambda: builder.encode_chat(messages, body.chat_template_kwargs),
            sum(len(message.get("content", "")) for message in messages),
        )
    except RequestError as error:
        raise _about_input(error) from None


def _about_input(error: RequestError) -> RequestError:
    """The error in the words of this route, which has no messages."""
    if error.field != "messages":
        return error
    return RequestError(str(error).replace("messages", "input", 1), field="input", code=error.code)


class Call:
    """One response under construction, whole or streamed."""

    def __init__(
        self,
        service: Service,
        store: ResponseStore,
        owner: str,
        body: ResponseBody,
        given: Input,
        envelope: Envelope,
        pieces: PieceStream,
    ) -> None:
        self._service = service
        self._store = store
        self._owner = owner
        self._body = body
        self._given = given
        self._pieces = pieces
        self._request = pieces.streams[0].answer.request
        self._builder = ResponseBuilder(
            body.response(envelope), self._usage, self._logprobs if body.wants_logprobs else None
        )

    @classmethod
    async def submit(
        cls, service: Service, store: ResponseStore, owner: str, body: ResponseBody
    ) -> Call:
        """Check the body, render the conversation and queue the request."""
        service.check_model(body.model)
        params = body.sampling()
        given = Input(body, store, owner)
        envelope = Envelope.new(service, "resp")
        body.response(envelope)  # complains before anything is computed
        ids = await prompt_of(service, body, given)
        requests = build_requests(
            service, envelope, [ids], params, priority=body.priority, field="input"
        )
        pieces = PieceStream(await service.llm.submit(requests))
        return cls(service, store, owner, body, given, envelope, pieces)

    def cancel(self) -> None:
        """End in the engine what still runs; does nothing after a whole answer."""
        self._pieces.cancel()

    async def whole(self) -> Response:
        """The finished response.

        Raises:
            LockstepError: the engine could not compute it.
        """
        async with aclosing(self._events()) as made:
            async for _ in made:
                pass
        return self._builder.response

    async def stream(self) -> AsyncGenerator[list[Event], None]:
        """Every event, those of one step together; a failure is the last of them."""
        yield self._builder.start()
        try:
            async with aclosing(self._events()) as steps:
                async for made in steps:
                    yield made
        except Exception as error:
            status, reply, _ = errors.describe(error)
            if status >= 500:
                log.error("a streamed response failed: %s", error)
            yield self._builder.fail(reply.error.message)

    async def _events(self) -> AsyncGenerator[list[Event], None]:
        async with aclosing(self._pieces.steps()) as steps:
            async for pieces in steps:
                made = [event for piece in pieces for event in self._builder.push(piece)]
                # Before the client hears of the end: it may go on from it at once.
                if self._builder.response.status in ("completed", "incomplete"):
                    self._keep()
                if made:
                    yield made

    def _keep(self) -> None:
        response = self._builder.response
        if response.store:
            self._store.put(
                self._owner,
                response.id,
                encode(response),
                parent=self._given.parent,
                inputs=self._given.items,
                outputs=response.output,
            )

    def _usage(self) -> ResponseUsage:
        usage = self._pieces.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=cached, cache_write_tokens=self._written(usage.prompt_tokens, cached)
            ),
            output_tokens_details=OutputTokensDetails(
                reasoning_tokens=usage.completion_tokens_details.reasoning_tokens
            ),
        )

    def _written(self, prompt: int, cached: int) -> int:
        """Prompt tokens that later requests can take from the cache: those of whole pages."""
        if not self._service.llm.client.config.cache.prefix_caching:
            return 0
        page = self._service.llm.info.page_tokens
        return max(0, prompt // page * page - cached)

    def _logprobs(self, delta: Delta) -> Sequence[ChatLogprob]:
        tokenizer = self._service.llm.tokenizer
        return logprobs.chat_logprobs(tokenizer, self._request, delta).content
