"""What the gate asks and what it allows: a YAML file, see docs/verify.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from lockstep.types import LockstepError
from lockstep.verify.canonical import digest

Text = Annotated[str, Meta(min_length=1)]
Positive = Annotated[float, Meta(gt=0)]


class TasksError(LockstepError, ValueError):
    """A tasks file that cannot be used: names the file, the field and what is wrong."""


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One question.

    Attributes:
        prompt: a text to continue, or
        message: what a user says in a conversation. Exactly one of the two.
        answer: what counts as right: of a choice, one of its options; of a generation, what
            the answer must be (or begin with, or match), see `Task.match`.
        options: of a choice.
    """

    prompt: str = ""
    message: str = ""
    answer: str = ""
    options: tuple[str, ...] = ()


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Questions of one kind.

    Attributes:
        kind: "choice": the most probable option, by log-likelihood. "generate": the greedy
            answer, written to its end.
        match: of a generation, with white space at either end left out: "exact", "prefix"
            (the answer begins with it) or "regex" (somewhere in the answer).
        drop: by how much the share of right answers may fall. To rule out a fall of 5% takes
            75 items even where none is lost.
    """

    name: Text
    kind: Literal["choice", "generate"]
    items: Annotated[tuple[Item, ...], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] = 64
    match: Literal["exact", "prefix", "regex"] = "exact"
    drop: Annotated[float, Meta(ge=0, lt=1)] = 0.05


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What else is allowed.

    Attributes:
        kl_mean, kl_max: nats, of the mean and of the largest position.
        flips: share of positions whose most probable token changes.
        late_excess: nats a token; by how much less probable the last third of long answers
            may be to the base model than its own are.
        repetition: by how much the share of repeated four-word runs may grow in long answers.
    """

    kl_mean: Positive = 0.1
    kl_max: Positive = 5.0
    flips: Positive = 0.1
    late_excess: Positive = 0.3
    repetition: Positive = 0.2


class LongForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Long answers: how many tokens, to which prompts, how drawn."""

    prompts: Annotated[tuple[Text, ...], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=48)] = 256
    temperature: Annotated[float, Meta(ge=0)] = 0.7


class Tasks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file.

    Attributes:
        texts: held-out texts, for the divergence.
        confidence: of every interval.
    """

    tasks: Annotated[tuple[Task, ...], Meta(min_length=1)]
    texts: tuple[Text, ...] = ()
    long: LongForm | None = None
    limits: Limits = Limits()
    confidence: Annotated[float, Meta(gt=0.5, lt=1)] = 0.95

    @property
    def hash(self) -> str:
        """What identifies the file, whatever its layout."""
        return digest(msgspec.to_builtins(self))


def load(path: Path) -> Tasks:
    """Read a tasks file.

    Raises:
        TasksError: naming the field and what is wrong with it.
    """
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
        tasks = msgspec.convert(value, Tasks)
        _check(tasks)
    except OSError as error:
        raise TasksError(f"{path} cannot be read: {error}") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise TasksError(f"{path}: {' '.join(str(error).split())}") from None
    return tasks


def _check(tasks: Tasks) -> None:
    names = [task.name for task in tasks.tasks]
    for name in names:
        if names.count(name) > 1:
            raise TasksError(f"two tasks are called {name!r}")
    for task in tasks.tasks:
        for index, item in enumerate(task.items):
            where = f"task {task.name!r}, item {index}"
            if bool(item.prompt) == bool(item.message):
                raise TasksError(f"{where}: give a prompt or a message, exactly one of them")
            if task.kind == "choice" and item.answer not in item.options:
                raise TasksError(f"{where}: the answer {item.answer!r} is not among the options")
            if task.kind == "generate" and (item.options or not item.answer):
                raise TasksError(f"{where}: a generation has an answer and no options")
            if task.match == "regex":
                _compile(where, item.answer)


def _compile(where: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise TasksError(f"{where}: {pattern!r} is no regular expression: {error}") from None


def is_right(task: Task, item: Item, answer: Any) -> bool:
    """Whether an answer counts."""
    found, wanted = str(answer).strip(), item.answer.strip()
    match task.match:
        case "prefix":
            return found.startswith(wanted)
        case "regex":
            return re.search(item.answer, str(answer)) is not None
    return found == wanted
