"""One request to `/v1/responses` from its body to its last event."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace

from lockstep.outputs import Delta
from lockstep.server import errors, logprobs
from lockstep.server.answers import PieceStream
from lockstep.server.conversation import prepare, submit_turn
from lockstep.server.errors import NotFound
from lockstep.server.generation import Envelope, Service, off_loop
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
    pack,
)
from lockstep.server.responses.store import ResponseStore
from lockstep.server.responses.store import Turn as StoredTurn
from lockstep.text.turn import Turn
from lockstep.types import RequestError

log = logging.getLogger("lockstep.server")


# Read in whole at every turn; what no model reads (old reasoning, ids) counts as well.
MAX_CONVERSATION_BYTES = 32 * 1024 * 1024

# Fields that this route calls otherwise than chat completions do.
_OWN_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


class Input:
    """What the model is to go on from: an earlier conversation, if there is one, and new items.

    Attributes:
        packed: the new items as the store keeps them.

    Raises:
        NotFound: no such response is stored for this owner.
        RequestError: items that cannot be read.
    """

    def __init__(self, body: ResponseBody, store: ResponseStore, owner: str) -> None:
        self.parent: StoredTurn | None = None
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
        self.packed = checked(lambda: pack(self.items), "input")
        length = len(self.packed) + (0 if self.parent is None else self.parent.length)
        if length > MAX_CONVERSATION_BYTES:
            raise RequestError(
                f"the conversation has {length} bytes, at most {MAX_CONVERSATION_BYTES} are "
                "allowed",
                field="input",
                code="conversation_too_large",
            )

    def turn(self, body: ResponseBody) -> Turn:
        """The same as a chat.

        Raises:
            RequestError: items or tools that make no conversation.
        """
        before = () if self.parent is None else self.parent.whole()
        whole = (*before, *self.items)
        if not whole:
            raise RequestError("input must not be empty", field="input", code="empty_prompt")
        functions = body.functions()
        return Turn(
            messages=items.messages_of(body.instructions, whole),
            functions=functions,
            choice=body.choice(functions),
            effort=body.reasoning.effort if body.reasoning is not None else None,
            template_arguments=body.chat_template_kwargs,
        )


def checked(written: Callable[[], bytes], field: str = "") -> bytes:
    """What is to be stored and said back, as JSON.

    Raises:
        RequestError: text that is not valid Unicode.
    """
    try:
        return written()
    except UnicodeEncodeError:
        raise RequestError(
            f"{field or 'the request'} has a lone surrogate: it is not valid Unicode", field=field
        ) from None


@contextmanager
def _own_words() -> Iterator[None]:
    """Errors name fields as this route does."""
    try:
        yield
    except RequestError as error:
        name = _OWN_NAMES.get(error.field)
        if name is None:
            raise
        message = str(error).replace(error.field, name, 1)
        raise RequestError(message, field=name, code=error.code) from None


async def count(service: Service, store: ResponseStore, owner: str, body: ResponseBody) -> int:
    """How many tokens the model would read.

    Raises:
        RequestError: what cannot be served.
    """
    service.check_model(body.model)
    sampling = body.sampling()
    with _own_words():
        turn = Input(body, store, owner).turn(body)
        prepared = await off_loop(lambda: prepare(service, turn, sampling), turn.length())
    return len(prepared.ids)


class Call:
    """One response under construction, whole or streamed."""

    def __init__(
        self,
        service: Service,
        keep: Callable[[Response], None],
        response: Response,
        pieces: PieceStream,
        *,
        wants_logprobs: bool,
    ) -> None:
        self._service = service
        self._keep = keep
        self._pieces = pieces
        self._request = pieces.streams[0].answer.request
        self._builder = ResponseBuilder(
            response, self._usage, self._logprobs if wants_logprobs else None
        )

    @classmethod
    async def submit(
        cls, service: Service, store: ResponseStore, owner: str, body: ResponseBody
    ) -> Call:
        """Check the body, render the conversation and queue the request.

        Raises:
            RequestError: what cannot be served; nothing has run.
        """
        service.check_model(body.model)
        sampling = body.sampling()
        envelope = replace(Envelope.new(service, ""), id=f"resp_{uuid.uuid4().hex}")
        response = body.response(envelope)
        checked(lambda: encode(response))
        given = Input(body, store, owner)

        def keep(finished: Response) -> None:
            store.put(
                owner,
                finished.id,
                encode(finished),
                parent=given.parent,
                inputs=given.packed,
                outputs=finished.output,
            )

        with _own_words():
            pieces = await submit_turn(
                service,
                envelope,
                given.turn(body),
                sampling,
                priority=body.priority,
                field="input",
            )
        return cls(service, keep, response, pieces, wants_logprobs=body.wants_logprobs)

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
                response = self._builder.response
                if response.store and response.status in ("completed", "incomplete"):
                    self._keep(response)  # before the client hears of it, and goes on from it
                if made:
                    yield made

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
