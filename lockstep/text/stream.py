"""The one builder of answer text, for streamed and whole answers alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.text.detokenizer import Detokenizer
from lockstep.text.stops import StopMatcher
from lockstep.text.tokenizer import Tokenizer
from lockstep.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one push adds to an answer.

    Attributes:
        text: characters to send now. Joined over all pushes they are the answer's text.
        token_offsets: for each token taken, the offset in the whole answer (in characters)
            at which its first complete character starts; never decreasing.
        stopped: the stop string that matched, or the id of the client's stop token that
            ended the sequence; None otherwise.
        tokens: how many of the pushed tokens belong to the answer. Fewer than were pushed
            only when a stop string matched before the last of them.
    """

    text: str = ""
    token_offsets: tuple[int, ...] = ()
    stopped: str | int | None = None
    tokens: int = 0


class TextStream:
    """Turns one choice's tokens into text: detokenises, finds stop strings.

    The result depends on the tokens only, not on how they are cut into pushes. A stop
    string that completes within the first `min_tokens` tokens is ordinary text. An end
    token or a client's stop token that ends the sequence shows no text of its own unless
    `include_stop_str_in_output`.

    Args:
        shown: control tokens that have text though `skip_special_tokens` hides the others.

    Mutable; owned by one answer. After a match or a finish, further pushes add nothing.

    Attributes:
        stopped: as `TextDelta.stopped`, once set. When it is a string, the caller cancels
            the sequence; the answer's finish reason is `FinishReason.STOP`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt_ids,
            skip_special_tokens=params.skip_special_tokens,
            shown=shown,
        )
        self._stops = StopMatcher(params.stop)
        self._held = ""  # decoded, not yet sent
        self._sent = 0  # characters sent
        self._count = 0  # tokens taken
        self._closed = False
        self.stopped: str | int | None = None

    @property
    def closed(self) -> bool:
        """True once a stop string matched or the sequence finished."""
        return self._closed

    def push(self, tokens: Sequence[int], finish: FinishReason | None = None) -> TextDelta:
        """Takes the next tokens; `finish` is set when the last of them ends the sequence."""
        if self._closed:
            return TextDelta()
        start = self._sent
        sent: list[str] = []
        offsets: list[int] = []
        for index, token in enumerate(tokens):
            offsets.append(self._sent + len(self._held))
            self._count += 1
            ends = finish is FinishReason.STOP and index == len(tokens) - 1
            if ends and self._hides(token):
                continue
            sent.append(self._take(self._detokenizer.push(token)))
            if self._closed:
                break
        if finish is not None and not self._closed:
            sent.append(self._take(self._detokenizer.finish()))
            if not self._closed:
                sent.append(self._release(len(self._held)))
                self._closed = True
        text = "".join(sent)
        if self._closed:  # what lay behind the end is gone
            end = start + len(text)
            offsets = [min(offset, end) for offset in offsets]
        return TextDelta(
            text=text,
            token_offsets=tuple(offsets),
            stopped=self.stopped,
            tokens=len(offsets),
        )

    def _hides(self, token: int) -> bool:
        """Whether `token`, which ended the sequence, shows no text; notes a client's stop token."""
        if token in self._params.stop_token_ids:
            self.stopped = token
        elif token not in self._tokenizer.eos_ids:
            return False
        return not self._params.include_stop_str_in_output

    def _take(self, piece: str) -> str:
        """Adds decoded characters; returns those that may be sent."""
        if not piece:
            return ""
        before = self._sent + len(self._held)
        self._held += piece
        match = self._stops.push(piece)
        if match is not None and self._count >= self._params.min_tokens:
            end = match.end if self._params.include_stop_str_in_output else match.start
            self.stopped = match.stop
            self._closed = True
            assert self._sent <= end <= before + len(piece)
            return self._release(end - self._sent)
        return self._release(len(self._held) - self._stops.held())

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._sent += len(text)
        return text
