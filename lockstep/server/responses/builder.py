"""A response as it is written: pieces of an answer in, events out.

The whole response is the one that the last event carries, so that streaming and
non-streaming cannot differ.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec import structs

from lockstep.outputs import Delta
from lockstep.server.answers import (
    CallArguments,
    CallStarted,
    Content,
    Decided,
    Finished,
    Piece,
    Tokens,
)
from lockstep.server.answers import Reasoning as Thought
from lockstep.server.replies import ChatLogprob
from lockstep.server.responses import events
from lockstep.server.responses.events import Event
from lockstep.server.responses.objects import (
    AnyItem,
    FunctionCall,
    IncompleteDetails,
    Item,
    ItemStatus,
    Message,
    OutputText,
    Reasoning,
    ReasoningText,
    Response,
    ResponseError,
    ResponseUsage,
    new_id,
)
from lockstep.types import FinishReason


class _Writer:
    """One item under way: the events that it takes, and in the end the item. Mutable."""

    kind: type[Item]

    def __init__(self, index: int, number: Callable[[], int]) -> None:
        self._id = new_id(self.kind)
        self._index = index
        self._number = number
        self._text: list[str] = []

    def open(self) -> list[Event]:
        """The events that begin the item."""
        raise NotImplementedError

    def delta(self, text: str) -> Event:
        """The event that appends `text`."""
        raise NotImplementedError

    def close(self, status: ItemStatus) -> tuple[list[Event], AnyItem]:
        """The events that end the item's content, and the item."""
        raise NotImplementedError

    def _numbered(self) -> dict[str, Any]:
        return {"sequence_number": self._number(), "output_index": self._index}

    def _placed(self) -> dict[str, Any]:
        return {**self._numbered(), "item_id": self._id}

    def _in_part(self) -> dict[str, Any]:
        return {**self._placed(), "content_index": 0}

    def _joined(self) -> str:
        return "".join(self._text)


class _MessageWriter(_Writer):
    kind = Message

    def __init__(self, index: int, number: Callable[[], int]) -> None:
        super().__init__(index, number)
        self._logprobs: list[ChatLogprob] = []

    def open(self) -> list[Event]:
        item = Message(id=self._id, status="in_progress", role="assistant")
        return [
            events.OutputItemAdded(**self._numbered(), item=item),
            events.ContentPartAdded(**self._in_part(), part=OutputText()),
        ]

    def delta(self, text: str, logprobs: Sequence[ChatLogprob] = ()) -> Event:
        self._text.append(text)
        self._logprobs.extend(logprobs)
        return events.OutputTextDelta(**self._in_part(), delta=text, logprobs=tuple(logprobs))

    def close(self, status: ItemStatus) -> tuple[list[Event], AnyItem]:
        part = OutputText(text=self._joined(), logprobs=tuple(self._logprobs))
        ended: list[Event] = [
            events.OutputTextDone(**self._in_part(), text=part.text, logprobs=part.logprobs),
            events.ContentPartDone(**self._in_part(), part=part),
        ]
        return ended, Message(id=self._id, status=status, role="assistant", content=(part,))


class _ReasoningWriter(_Writer):
    kind = Reasoning

    def open(self) -> list[Event]:
        item = Reasoning(id=self._id, status="in_progress")
        return [
            events.OutputItemAdded(**self._numbered(), item=item),
            events.ContentPartAdded(**self._in_part(), part=ReasoningText()),
        ]

    def delta(self, text: str) -> Event:
        self._text.append(text)
        return events.ReasoningTextDelta(**self._in_part(), delta=text)

    def close(self, status: ItemStatus) -> tuple[list[Event], AnyItem]:
        part = ReasoningText(text=self._joined())
        ended: list[Event] = [
            events.ReasoningTextDone(**self._in_part(), text=part.text),
            events.ContentPartDone(**self._in_part(), part=part),
        ]
        return ended, Reasoning(id=self._id, status=status, content=(part,))


class _CallWriter(_Writer):
    kind = FunctionCall

    def __init__(self, index: int, number: Callable[[], int], call: CallStarted) -> None:
        super().__init__(index, number)
        self._call = call

    def open(self) -> list[Event]:
        return [events.OutputItemAdded(**self._numbered(), item=self._item("in_progress"))]

    def delta(self, text: str) -> Event:
        self._text.append(text)
        return events.FunctionCallArgumentsDelta(**self._placed(), delta=text)

    def close(self, status: ItemStatus) -> tuple[list[Event], AnyItem]:
        done = events.FunctionCallArgumentsDone(**self._placed(), arguments=self._joined())
        return [done], self._item(status)

    def _item(self, status: ItemStatus) -> FunctionCall:
        return FunctionCall(
            id=self._id,
            status=status,
            call_id=self._call.id,
            name=self._call.name,
            arguments=self._joined(),
        )


W = TypeVar("W", _MessageWriter, _ReasoningWriter)


class ResponseBuilder:
    """Builds one response. Mutable; owned by whoever reads the pieces.

    Args:
        response: without output yet.
        usage: counts what has been read so far; asked at the end.
        logprobs: the entries of a step's tokens; None when none are wanted. Those of
            reasoning and of calls are dropped: only texts have logprobs.

    Attributes:
        response: as it stands, with the items that are done. Replaced, never changed: an
            event keeps the one that it was given.
    """

    def __init__(
        self,
        response: Response,
        usage: Callable[[], ResponseUsage],
        logprobs: Callable[[Delta], Sequence[ChatLogprob]] | None = None,
    ) -> None:
        self.response = response
        self._usage = usage
        self._logprobs = logprobs
        self._held: list[ChatLogprob] = []  # of tokens whose text has not come yet
        self._number = itertools.count().__next__
        self._writer: _Writer | None = None

    def start(self) -> list[Event]:
        """The events before any output."""
        return [
            events.Created(sequence_number=self._number(), response=self.response),
            events.InProgress(sequence_number=self._number(), response=self.response),
        ]

    def push(self, piece: Piece) -> list[Event]:
        """The events of one piece. The pieces of an item come one after the other."""
        match piece:
            case Tokens(delta=delta):
                if self._logprobs is not None:
                    self._held.extend(self._logprobs(delta))
                return []
            case Content(text=text):
                message, begun = self._use(_MessageWriter)
                entries, self._held = self._held, []
                return [*begun, message.delta(text, entries)]
            case Thought(text=text):
                self._held.clear()
                thoughts, begun = self._use(_ReasoningWriter)
                return [*begun, thoughts.delta(text)]
            case CallStarted():
                return self._begin(_CallWriter(self._index(), self._number, piece))
            case CallArguments(text=text):
                self._held.clear()
                assert isinstance(self._writer, _CallWriter), "arguments of a call that is over"
                return [self._writer.delta(text)]
            case Decided():
                raise AssertionError("responses have no gate")
            case Finished(reason=FinishReason.CANCELLED):
                return self.fail("the request was cancelled")
            case Finished(reason=reason):
                return self._finish(short=reason == FinishReason.LENGTH)

    def fail(self, message: str) -> list[Event]:
        """The events that end a response which nobody can finish."""
        ended = self._end("incomplete")
        self.response = structs.replace(
            self.response, status="failed", error=ResponseError(message=message)
        )
        return [*ended, events.Failed(sequence_number=self._number(), response=self.response)]

    def _finish(self, *, short: bool) -> list[Event]:
        """The events that end a response: the model is done, or ran out of tokens."""
        ended: list[Event] = []
        if self._writer is None:  # an answer without text
            ended += self._begin(_MessageWriter(self._index(), self._number))
        if isinstance(self._writer, _MessageWriter) and self._held:
            ended.append(self._writer.delta("", self._held))
        ended += self._end("incomplete" if short else "completed")
        self.response = structs.replace(
            self.response,
            status="incomplete" if short else "completed",
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if short else None,
            completed_at=None if short else int(time.time()),
            usage=self._usage(),
        )
        last = events.Incomplete if short else events.Completed
        return [*ended, last(sequence_number=self._number(), response=self.response)]

    def _index(self) -> int:
        """Of the next item."""
        return len(self.response.output) + (self._writer is not None)

    def _use(self, kind: type[W]) -> tuple[W, list[Event]]:
        """The writer of the item under way, if it is of this kind, else of a new one."""
        if isinstance(self._writer, kind):
            return self._writer, []
        writer = kind(self._index(), self._number)
        return writer, self._begin(writer)

    def _begin(self, writer: _Writer) -> list[Event]:
        ended = self._end("completed")
        self._writer = writer
        return [*ended, *writer.open()]

    def _end(self, status: ItemStatus) -> list[Event]:
        """Close the item under way, if there is one."""
        if self._writer is None:
            return []
        index = len(self.response.output)
        ended, item = self._writer.close(status)
        self._writer = None
        self.response = structs.replace(self.response, output=(*self.response.output, item))
        done = events.OutputItemDone(sequence_number=self._number(), output_index=index, item=item)
        return [*ended, done]
