"""Rows of a JSON Lines file as examples of one decision.

Every row has an input and what is right about it:

    {"messages": [{"role": "user", "content": "..."}], "label": "search"}       options
    {"input": "...", "question": {"type": "choice", ...}, "label": "blue"}      codes
    {"input": "...", "value": 0.25}                                             value

`group` (a text) is optional: rows of one group are never parted when a file is split. So is
`case` (a text): evaluations tell the figures of each case apart.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.branch import BranchError, HeadKind
from lockstep.decisions.questions import Choice, Option, Predicate, Question, Score
from lockstep.decisions.render import question_text
from lockstep.decisions.sources import labels_of
from lockstep.requests import Conversation
from lockstep.types import RequestError

CODES = ("Yes", "No", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *"0123456789")
"""Options of a head over answer codes: every label of one character, and Yes and No."""

_SHOWN = 10  # bad rows named in one error
_KEYS = {"messages", "input", "label", "value", "question", "group", "case"}


@dataclass(frozen=True, slots=True)
class Example:
    """One row.

    Attributes:
        line: in the file, from 1.
        given: the input, as a door takes it.
        target: index of the right output of the head; of a value head the value itself.
        outputs: indices of the head's outputs that the row's question allows; empty for all.
        question: of a head over codes, else None.
        text: what stands for `{question}` in the suffix; "" where there is none.
        group, case: see above.
    """

    line: int
    given: str | Conversation
    target: int | float
    outputs: tuple[int, ...] = ()
    question: Question | None = None
    text: str = ""
    group: str = ""
    case: str = ""


@dataclass(frozen=True, slots=True)
class Dataset:
    """The examples of a file.

    Attributes:
        options: names of the head's outputs. digest: SHA-256 of the file's bytes.
    """

    path: Path
    head: HeadKind
    options: tuple[str, ...]
    examples: tuple[Example, ...]
    digest: str


def read_rows(path: str | Path, head: HeadKind, options: Sequence[str] = ()) -> Dataset:
    """All rows of a file.

    Args:
        options: of an options head, in the order that thresholds are tried in; by default in
            the order in which labels first appear. Other labels are errors.

    Raises:
        BranchError: the file cannot be read, or rows are bad: names the first of them by line.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BranchError(f"{path}: {error.strerror or error}") from None
    names = _Names(head, options)
    examples: list[Example] = []
    bad: list[str] = []
    for line, row in _lines(data):
        try:
            examples.append(_example(line, row, names))
        except (BranchError, RequestError) as error:
            bad.append(f"{path}:{line}: {error}")
    if bad:
        more = f"\nand {len(bad) - _SHOWN} more bad rows" if len(bad) > _SHOWN else ""
        raise BranchError("\n".join(bad[:_SHOWN]) + more)
    if not examples:
        raise BranchError(f"{path}: has no rows")
    if head == "options" and len(names.options) < 2:
        raise BranchError(f"{path}: every row has the label {names.options[0]!r}: nothing to learn")
    return Dataset(path, head, tuple(names.options), tuple(examples), _digest(data))


def split(examples: Sequence[Example], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices of a larger and a smaller part, both ascending; groups stay whole.

    The smaller part has at least `share` of the rows and of no group only a part. The same
    rows and seed give the same parts.

    Raises:
        BranchError: a part would be empty.
    """
    groups: dict[str, list[int]] = {}
    for index, example in enumerate(examples):
        groups.setdefault(example.group or f"\0{index}", []).append(index)
    order = sorted(groups)
    random.Random(seed).shuffle(order)
    held: list[int] = []
    while order and len(held) < share * len(examples):
        held += groups[order.pop()]
    rest = [index for name in order for index in groups[name]]
    if not held or not rest:
        raise BranchError(
            f"{len(examples)} rows in {len(groups)} groups cannot be split: give more rows, or a "
            "file of their own to calibrate on"
        )
    return sorted(rest), sorted(held)


def majority(examples: Sequence[Example]) -> int:
    """The target that most rows have; of equally frequent ones the first output."""
    counts = Counter(int(example.target) for example in examples)
    return min(counts, key=lambda target: (-counts[target], target))


class _Names:
    """The options so far, and whether more may come."""

    def __init__(self, head: HeadKind, options: Sequence[str]) -> None:
        self.head = head
        fixed = {"options": tuple(options), "codes": CODES, "value": ("value",)}[head]
        self.options = list(fixed)
        self._open = not fixed
        if head != "options" and options:
            raise BranchError(f"options are for an options head, not for {head}")

    def index(self, label: object) -> int:
        if not isinstance(label, str) or not label:
            raise BranchError(f"label must be a non-empty text, got {label!r}")
        if label not in self.options:
            if not self._open:
                raise BranchError(f"label {label!r} is none of {', '.join(self.options)}")
            self.options.append(label)
        return self.options.index(label)


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    for line, row in enumerate(data.split(b"\n"), start=1):
        if row.strip():
            yield line, row


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _example(line: int, data: bytes, names: _Names) -> Example:
    try:
        row = json.loads(data)
    except ValueError as error:
        raise BranchError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise BranchError(f"must be an object, got {type(row).__name__}")
    for key in row:
        if key not in _KEYS:
            raise BranchError(f"unknown key {key!r}; known are {', '.join(sorted(_KEYS))}")
    for key in ("group", "case"):
        if not isinstance(row.get(key, ""), str):
            raise BranchError(f"{key} must be a text, got {row[key]!r}")
    group, case = row.get("group", ""), row.get("case", "")
    given = _given(row)
    wanted, other = ("value", "label") if names.head == "value" else ("label", "value")
    if wanted not in row or other in row:
        raise BranchError(f"rows of a head of kind {names.head} have {wanted}, and no {other}")
    if (names.head == "codes") != ("question" in row):
        raise BranchError("question is for rows of a head over codes, and these need it")
    if names.head == "value":
        value = row["value"]
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise BranchError(f"value must be a finite number, got {value!r}")
        return Example(line, given, float(value), group=group, case=case)
    if names.head == "options":
        return Example(line, given, names.index(row["label"]), group=group, case=case)
    question = _question(row["question"])
    labels = labels_of(question)
    for label in labels:
        if label not in names.options:
            raise BranchError(f"question has {len(labels)} options, more than there are codes for")
    at = _chosen(question, row["label"])
    outputs = tuple(names.options.index(label) for label in labels)
    text = question_text(question, labels)
    return Example(line, given, outputs[at], outputs, question, text, group, case)


def _given(row: Mapping[str, Any]) -> str | Conversation:
    if ("messages" in row) == ("input" in row):
        raise BranchError("a row has either messages or input")
    if "input" in row:
        text = row["input"]
        if not isinstance(text, str) or not text:
            raise BranchError(f"input must be a non-empty text, got {text!r}")
        return text
    messages: Conversation = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise BranchError(f"messages must be a non-empty list, got {messages!r}")
    return messages


def _question(found: object) -> Question:
    """A typed question, in the shape of `POST /v1/decisions`."""
    if not isinstance(found, dict):
        raise BranchError(f"question must be an object, got {found!r}")
    known = {"predicate": set(), "choice": {"choices"}, "score": {"levels"}}
    kind = found.get("type")
    if kind not in known:
        raise BranchError(f"question.type must be predicate, choice or score, got {kind!r}")
    for key in found:
        if key not in {"type", "instructions", *known[kind]}:
            raise BranchError(f"question has an unknown key {key!r}")
    instructions = found.get("instructions", "")
    if kind == "predicate":
        return Predicate(instructions)
    if kind == "choice":
        return Choice(instructions, _entries(found.get("choices"), "choices", "value"))
    return Score(instructions, _entries(found.get("levels"), "levels", "label"))


def _entries(found: object, name: str, key: str) -> list[Option]:
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise BranchError(f"question.{name} must be a list of objects, got {found!r}")
    return [Option(entry.get(key), entry.get("description") or "") for entry in found]


def _chosen(question: Question, label: object) -> int:
    """Which option the label names: by its value; of a predicate true or false."""
    values = [option.value for option in question.options]
    for index, value in enumerate(values):
        if type(value) is type(label) and value == label:
            return index
    raise BranchError(f"label {label!r} is none of {values}")
