"""Where the probabilities of a question's options come from.

A source turns an input and a question into engine requests, and their completions into
scores. `LabelSource` reads the trunk's own head at the answer position, `branches.BranchSource`
a branch's head. `prefix_options` is the first reading behind a given beginning of a reply.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from string import ascii_uppercase
from typing import Protocol

from lockstep.decisions.decision import OptionScores
from lockstep.decisions.questions import Choice, Question
from lockstep.decisions.render import Context, Given, question_text, render_input, suffix_ids
from lockstep.options import Path, Probe, hidden_by, probe_params, probes, read, shortest
from lockstep.outputs import GenerationError
from lockstep.requests import RequestBuilder
from lockstep.text import Tokenizer
from lockstep.types import Completion, Request, RequestError


class Asked(Protocol):
    """One question on its way: the requests that answer it, and how to read their completions."""

    @property
    def question(self) -> Question:
        """What is asked; `scores` are of its options."""
        ...

    @property
    def prompt(self) -> tuple[int, ...]:
        """Ids up to where the answer begins; the first `context_tokens` are the input's."""
        ...

    @property
    def context_tokens(self) -> int: ...

    @property
    def count(self) -> int:
        """How many requests there are."""
        ...

    def requests(self) -> Iterator[Request]:
        """The requests, made as they are asked for."""
        ...

    def scores(self, completions: Sequence[Completion]) -> OptionScores:
        """What the completions of `requests()`, in their order, say about the options.

        Raises:
            GenerationError: one was cancelled before its end.
        """
        ...


@dataclass(frozen=True, slots=True)
class AskedTokens:
    """A question that the trunk's own head answers. See `Asked`.

    Attributes:
        sequences: what stands for each option. probes: which requests show their logprobs.
        source, priority: as in `OptionScores` and `Request`.
    """

    builder: RequestBuilder
    question: Question
    prompt: tuple[int, ...]
    context_tokens: int
    sequences: tuple[Path, ...]
    probes: tuple[Probe, ...]
    source: str
    priority: int = 0

    @property
    def count(self) -> int:
        """One request a probe."""
        return len(self.probes)

    def requests(self) -> Iterator[Request]:
        """One request a probe, made as they are asked for: many options have long prompts."""
        return map(self._request, self.probes)

    def _request(self, probe: Probe) -> Request:
        return self.builder.build(
            (*self.prompt, *probe.path),
            probe_params(probe.path, probe.wanted),
            priority=self.priority,
            score_from=len(self.prompt) if probe.path else 1,
        )

    def check(self) -> None:
        """Raise what making the longest request would raise."""
        self._request(max(self.probes, key=lambda probe: len(probe.path)))

    def scores(self, completions: Sequence[Completion]) -> OptionScores:
        """What the completions of `requests()`, in their order, say about the options.

        Raises:
            GenerationError: one was cancelled before its end.
        """
        rows = []
        for probe, completion in zip(self.probes, completions, strict=True):
            before = completion.prompt_logprobs or ()
            entries = [entry for entry in before if entry is not None]
            rows.append([*entries, *completion.logprobs])
            if len(rows[-1]) <= len(probe.path):
                raise GenerationError("a question was cancelled", [completion])
        return OptionScores(read(self.sequences, self.probes, rows), self.source)


class Source(Protocol):
    """A way to answer questions."""

    def context(self, builder: RequestBuilder, given: Given, *, field: str) -> Context:
        """What all questions about an input share.

        Raises:
            RequestError: empty, no text or conversation, or the template's complaint.
        """
        ...

    def ask(
        self, builder: RequestBuilder, context: Context, question: Question, *, priority: int = 0
    ) -> Asked:
        """The requests that answer `question`.

        Raises:
            RequestError: the question does not fit, or this source cannot answer it.
        """
        ...


class LabelSource:
    """The trunk's own head over labels: Yes and No, letters for options, digits for levels.

    More options than there are letters (or levels than digits) are numbered with equally many
    digits. Labels that begin with the same token are scored as sequences.
    """

    def context(self, builder: RequestBuilder, given: Given, *, field: str) -> Context:
        """See `Source`."""
        return render_input(builder, given, field=field)

    def ask(
        self, builder: RequestBuilder, context: Context, question: Question, *, priority: int = 0
    ) -> Asked:
        """See `Source`."""
        labels = labels_of(question)
        prompt = [*context.ids, *suffix_ids(builder, context, question_text(question, labels))]
        sequences = label_paths(builder.tokenizer, labels, context.lead)
        return probe_options(
            builder,
            question,
            prompt,
            sequences,
            len(context.ids),
            source="labels",
            priority=priority,
        )


def labels_of(question: Question) -> tuple[str, ...]:
    """What the model is told to answer with, for each option."""
    count = len(question.options)
    if question.kind == "predicate":
        return "Yes", "No"
    if question.kind == "choice" and count <= len(ascii_uppercase):
        return tuple(ascii_uppercase[:count])
    # Levels count from 0, as their values do; options from 1, as people do.
    first = 0 if question.kind == "score" else 1
    width = len(str(first + count - 1))
    return tuple(f"{number:0{width}d}" for number in range(first, first + count))


@lru_cache(maxsize=1024)
def label_paths(tokenizer: Tokenizer, labels: tuple[str, ...], lead: str) -> tuple[Path, ...]:
    """Ids of each label as the answer's beginning.

    Raises:
        RequestError: the vocabulary cannot tell the labels apart.
    """
    paths = [tuple(tokenizer.encode_inside(lead + label)) for label in labels]
    hidden = hidden_by(paths)
    if hidden is not None or not all(paths):
        raise RequestError(
            "the model's vocabulary cannot tell the labels of these options apart",
            code="labels_not_distinct",
        )
    return tuple(shortest(paths))


def probe_options(
    builder: RequestBuilder,
    question: Question,
    prompt: Sequence[int],
    sequences: Sequence[Path],
    context_tokens: int,
    *,
    source: str,
    priority: int = 0,
) -> AskedTokens:
    """What shows the logprob of each sequence behind `prompt`.

    Raises:
        RequestError: too long for the model.
    """
    asked = AskedTokens(
        builder,
        question,
        tuple(prompt),
        context_tokens,
        tuple(sequences),
        tuple(probes(sequences)),
        source,
        priority,
    )
    asked.check()
    return asked


MAX_OPTION_TOKENS = 256
"""Of a text that may follow a beginning; comparing long ones takes the square of their length."""


def option_paths(tokenizer: Tokenizer, options: Sequence[str]) -> list[Path]:
    """Ids of texts that may follow a beginning, each tokenised apart from it.

    Raises:
        RequestError: no text, a long one, or one that begins with another.
    """
    paths = [tuple(tokenizer.encode_inside(option)) for option in options]
    for index, path in enumerate(paths):
        if not path:
            raise RequestError(f"options[{index}] must not be empty", field=f"options[{index}]")
        if len(path) > MAX_OPTION_TOKENS:
            raise RequestError(
                f"options[{index}] has {len(path)} tokens, at most {MAX_OPTION_TOKENS} are allowed",
                field=f"options[{index}]",
            )
    hidden = hidden_by(paths)
    if hidden is not None:
        short, long = hidden
        raise RequestError(
            f"options[{long}] ({options[long]!r}) begins with options[{short}] "
            f"({options[short]!r}): end both with what would follow them",
            field=f"options[{long}]",
        )
    return paths


def prefix_options(
    builder: RequestBuilder,
    context: Sequence[int],
    prefix: str,
    options: Sequence[str],
    *,
    priority: int = 0,
) -> AskedTokens:
    """Requests that show how a reply that begins with `prefix` goes on: with which option.

    Where the options' first tokens differ, these alone count; else the whole options do.

    Args:
        context: ids up to where the reply begins.
        prefix: tokenised apart from the context, and the options apart from it, as ids that
            the same sequence may go on from.

    Raises:
        RequestError: as `prefix_question` and `option_paths`.
    """
    question = prefix_question(prefix, options)
    paths = option_paths(builder.tokenizer, options)
    ahead = builder.tokenizer.encode_inside(prefix) if prefix else []
    return probe_options(
        builder,
        question,
        [*context, *ahead],
        shortest(paths),
        len(context),
        source="prefix",
        priority=priority,
    )


def prefix_question(prefix: str, options: Sequence[str]) -> Choice:
    """The choice between texts that may follow `prefix`.

    Raises:
        RequestError: what is no text, no list of them, fewer than 2 options, or one twice.
    """
    if isinstance(options, str) or not isinstance(options, Sequence):
        raise RequestError(f"options must be a list of texts, got {options!r}", field="options")
    for name, value in (("prefix", prefix), *((f"options[{i}]", o) for i, o in enumerate(options))):
        if not isinstance(value, str):
            raise RequestError(f"{name} must be a string, got {value!r}", field=name)
    try:
        return Choice(prefix, list(options))
    except RequestError as error:
        raise _as_options(error) from None


def _as_options(error: RequestError) -> RequestError:
    """A choice's complaint in the words of prefix and options."""
    field = error.field.replace("choices", "options", 1).removesuffix(".value")
    field = "prefix" if field == "instructions" else field
    text = str(error).replace(error.field, field, 1)
    return RequestError(text, field=field, code=error.code)
