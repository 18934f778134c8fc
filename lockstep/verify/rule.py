"""The rule of a comparison: everything that decides its verdict, fixed before the first request.

A rule is a YAML file, see docs/verify.md. Its hash is over what it means, so comments, the order
of keys, defaults written out or left out, and requests in a file or in place do not enter.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import yaml
from msgspec import Meta

from lockstep.types import LockstepError, RequestError
from lockstep.verify.canonical import canonical_bytes, digest
from lockstep.verify.difference import Decision, DifferenceKind, Probability, Score, Token
from lockstep.verify.probe import ProbeRequest
from lockstep.verify.scoring import Expectation

Share = Annotated[float, Meta(ge=0, lt=1)]
T = TypeVar("T")
MERGE = "tag:yaml.org,2002:merge"
MOST_TEXT = 1 << 20  # characters of the YAML; its reader takes seconds for more
MOST_VALUES = 1_000_000  # in the document, a value counted wherever an alias repeats it


class RuleError(LockstepError, ValueError):
    """A rule that cannot be used: names the file, the field and what is wrong."""


class EndpointRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the two deployments.

    Attributes:
        url: the API's base, e.g. http://localhost:8000/v1.
        model: as its requests name it; "" where it serves one model only.
        api_key_env: name of the environment variable that holds its API key; never the key.
        extra: further fields of every body that goes to it.
    """

    url: Annotated[str, Meta(min_length=1)]
    model: str = ""
    api_key_env: str = ""
    extra: dict[str, Any] = {}


class Endpoints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A is the reference: its own repeats say how much noise there is. B is held against it."""

    a: EndpointRule
    b: EndpointRule


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fields of `ProbeRequest` that a request may set, and `defaults` for all of them."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    logprobs: int | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    tool_choice: str | dict[str, Any] | None = None
    extra: dict[str, Any] | None = None


class RequestRule(Sampling, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request.

    Attributes:
        id: by default its number, from 1.
        prompt, messages: a text or a conversation, exactly one of them.
        expect: what makes its answer right, for differences of kind score.
    """

    id: str = ""
    prompt: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    expect: Expectation | None = None


class RequestFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests in a file of JSON lines; its path is relative to the rule's."""

    file: str


class Exact(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="exact"):
    """At most `allow` requests differ in this run; A must manage that against itself.

    Attributes:
        allow: requests.
        confirm: a request that differs is asked so many times more of both, which shows
            whether A agreed with itself by luck.
    """

    allow: Annotated[int, Meta(ge=0)] = 0
    confirm: Annotated[int, Meta(ge=0, le=100)] = 4


class Relative(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="relative"
):
    """B differs from A on hardly more requests than A differs from itself.

    Attributes:
        margin: share of requests by which the first may exceed the second.
        most_own: largest share of requests on which A may differ from itself for the
            comparison to say anything.
        confidence: of the bounds that decide.
    """

    margin: Share
    most_own: Share = 0.1
    confidence: Annotated[float, Meta(gt=0.5, lt=1)] = 0.95


Criterion = Exact | Relative


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The YAML document as it stands."""

    name: Annotated[str, Meta(min_length=1)]
    endpoints: Endpoints
    requests: Annotated[tuple[RequestRule, ...], Meta(min_length=1)] | RequestFile
    criterion: Exact | Relative
    difference: Token | Decision | Probability | Score = Token()
    defaults: Sampling = Sampling()
    rounds: Annotated[int, Meta(ge=1, le=1000)] = 1
    concurrency: Annotated[int, Meta(ge=1, le=1024)] = 1
    timeout: Annotated[float, Meta(gt=0, le=86400)] = 120.0
    seed: int = 0


class Item(msgspec.Struct, frozen=True):
    """One request of a rule, complete."""

    id: str
    request: ProbeRequest
    expect: Expectation | None = None


class Rule(msgspec.Struct, frozen=True):
    """A rule that was read and holds together.

    Attributes:
        name: for people.
        a, b: the deployments.
        items: the requests, ids unique.
        difference: what counts as a difference.
        criterion: how many are too many.
        rounds: in each, every request is asked twice of A and twice of B.
        concurrency: requests under way at once.
        timeout: seconds of one answer.
        seed: of the order in which all is asked.
    """

    name: str
    a: EndpointRule
    b: EndpointRule
    items: tuple[Item, ...]
    difference: DifferenceKind
    criterion: Criterion
    rounds: int
    concurrency: int
    timeout: float
    seed: int

    def canonical(self) -> dict[str, Any]:
        """A JSON value that is equal exactly for rules that mean the same."""
        return {
            "name": self.name,
            "endpoints": msgspec.to_builtins({"a": self.a, "b": self.b}),
            "requests": [
                {
                    "id": item.id,
                    "request": item.request.canonical(),
                    "expect": msgspec.to_builtins(item.expect),
                }
                for item in self.items
            ],
            "difference": msgspec.to_builtins(self.difference),
            "criterion": msgspec.to_builtins(self.criterion),
            "rounds": self.rounds,
            "concurrency": self.concurrency,
            "timeout": self.timeout,
            "seed": self.seed,
        }

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical form, in hexadecimal."""
        return digest(self.canonical())


def load(path: Path) -> Rule:
    """Read a rule.

    Raises:
        RuleError: naming the field and what is wrong with it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RuleError(f"{path} cannot be read: {error}") from None
    try:
        return parse(text, path.parent)
    except RuleError as error:
        raise RuleError(f"{path}: {error}") from None


def parse(text: str, folder: Path = Path()) -> Rule:
    """A rule from its YAML text; files that it names lie relative to `folder`.

    Raises:
        RuleError: as `load`.
    """
    if len(text) > MOST_TEXT:
        raise RuleError(f"{len(text)} characters, at most {MOST_TEXT}: put requests into a file")
    try:
        value = yaml.load(text, Loader=_OnceLoader)
        values = _count(value, {})
    except RuleError:
        raise
    # PyYAML's numbers and dates raise ValueError where they are none.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RuleError(f"not YAML: {' '.join(str(error).split())}") from None
    if values > MOST_VALUES:
        raise RuleError(f"its aliases unfold to {values} values, at most {MOST_VALUES}")
    document = _convert(value, Document)
    if isinstance(document.requests, RequestFile):
        requests = read_requests(folder / document.requests.file)
    else:
        requests = document.requests
    rule = Rule(
        document.name,
        document.endpoints.a,
        document.endpoints.b,
        items_of(requests, document.defaults),
        document.difference,
        document.criterion,
        document.rounds,
        document.concurrency,
        document.timeout,
        document.seed,
    )
    _check(rule)
    try:
        canonical_bytes(rule.canonical())
    except (TypeError, ValueError) as error:  # dates, infinities and the like in a free field
        raise RuleError(f"a request, or extra, holds what JSON has not: {error}") from None
    return rule


def _count(value: Any, counted: dict[int, int]) -> int:
    """How many values this one comes to; each that several aliases share is walked once."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in counted:
        inner = value.values() if isinstance(value, dict) else value
        counted[id(value)] = 1 + sum(_count(one, counted) for one in inner)
    return counted[id(value)]


def read_requests(path: Path) -> tuple[RequestRule, ...]:
    """The requests of a file of JSON lines.

    Raises:
        RuleError: it cannot be read, or a line is no request.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RuleError(f"requests: {path} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_convert(json.loads(line), RequestRule))
            except ValueError as error:
                raise RuleError(f"{path}, line {number}: {error}") from None
    if not found:
        raise RuleError(f"requests: {path} holds none")
    return tuple(found)


def items_of(requests: Iterable[RequestRule], defaults: Sampling) -> tuple[Item, ...]:
    """Complete requests.

    Raises:
        RuleError: naming the request and its field.
    """
    found: dict[str, Item] = {}
    common = _given(defaults)
    for number, one in enumerate(requests, 1):
        name = one.id or str(number)
        if name in found:
            raise RuleError(f"requests: the id {name!r} is there twice")
        try:
            request = ProbeRequest(
                messages=one.messages, prompt=one.prompt, **{**common, **_given(one)}
            )
        except RequestError as error:
            raise RuleError(f"requests: {name}: {error}") from None
        found[name] = Item(name, request, one.expect)
    return tuple(found.values())


def _given(fields: Sampling) -> dict[str, Any]:
    values = ((name, getattr(fields, name)) for name in Sampling.__struct_fields__)
    return {name: value for name, value in values if value is not None}


def _check(rule: Rule) -> None:
    """What no single field shows."""
    if isinstance(rule.difference, Score):
        missing = [item.id for item in rule.items if item.expect is None]
        if missing:
            raise RuleError(f"difference: score needs expect in request {missing[0]}")
        if rule.rounds != 1:
            raise RuleError(
                "rounds must be 1 with difference score: each request counts once; "
                "add requests instead"
            )
    if isinstance(rule.difference, Probability):
        missing = [item.id for item in rule.items if item.request.logprobs is None]
        if missing:
            raise RuleError(f"difference: probability needs logprobs in request {missing[0]}")
    for name in ("a", "b"):
        for item in rule.items:
            endpoint: EndpointRule = getattr(rule, name)
            both = sorted(set(endpoint.extra) & set(item.request.body("")))
            if both:
                raise RuleError(
                    f"endpoints.{name}.extra may not set {', '.join(both)}: request {item.id} does"
                )


def _convert(value: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise RuleError(str(error)) from None


class _OnceLoader(yaml.SafeLoader):
    """YAML's safe form, in which no key stands twice: the first would be lost in silence. For
    the same reason there are no merge keys, whose fields give way to others without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == MERGE:
                raise RuleError(
                    f"line {key_node.start_mark.line + 1}: merge keys (<<) are not read: write the "
                    "fields out, or put those of every request into defaults"
                )
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # refused below
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is there twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)
