"""Rates in a server's own `/metrics`: calls that do not parse, answers that are cut off ..."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

PREFIXES = ("lockstep:", "vllm:")


@dataclass(frozen=True, slots=True)
class Count:
    """A rate as two counters that only grow."""

    bad: float
    total: float


@dataclass(frozen=True, slots=True)
class _Rule:
    """How a rate is made of the samples of one family.

    Attributes:
        bad, counted: whether a sample's labels are part of either count.
        by: labels that tell rates of this name apart.
    """

    name: str
    sample: str
    bad: Callable[[Mapping[str, str]], bool]
    counted: Callable[[Mapping[str, str]], bool] = lambda labels: True
    by: tuple[str, ...] = ()


_RULES = (
    _Rule(
        "malformed-tool-calls",
        "tool_calls_total",
        lambda labels: labels.get("result") == "malformed",
        # What a client or a limit cut off says nothing about the model.
        lambda labels: labels.get("result") in ("ok", "malformed"),
        ("parser", "tool"),
    ),
    _Rule(
        "failed",
        "requests_outcome_total",
        lambda labels: labels.get("outcome") in ("failed", "lost"),
    ),
    _Rule(
        "left-by-clients",
        "requests_outcome_total",
        lambda labels: labels.get("outcome") == "cancelled",
    ),
    # Both directions of one rate: longer answers are cut oftener, shorter ones end oftener.
    _Rule(
        "cut-by-length",
        "request_success_total",
        lambda labels: labels.get("finished_reason") == "length",
    ),
    _Rule(
        "ended-by-themselves",
        "request_success_total",
        lambda labels: labels.get("finished_reason") == "stop",
    ),
    _Rule(
        "http-5xx",
        "http_requests_total",
        lambda labels: labels.get("status", "").startswith("5"),
        lambda labels: labels.get("method") == "POST",
    ),
)


def read_counts(text: str) -> dict[str, Count]:
    """The rates in a page of Prometheus's text format, by name.

    A family that stands there under Lockstep's and under vLLM's name counts once.

    Raises:
        ValueError: no such page.
    """
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    counts: dict[str, Count] = {}
    for rule in _RULES:
        for prefix in PREFIXES:
            found = samples.get(prefix + rule.sample)
            if found:
                counts.update(_rates(rule, found))
                break
    return counts


def _rates(
    rule: _Rule, samples: list[tuple[Mapping[str, str], float]]
) -> Iterator[tuple[str, Count]]:
    groups: dict[tuple[str, ...], Count] = {}
    for labels, value in samples:
        if not rule.counted(labels):
            continue
        key = tuple(labels.get(name, "") for name in rule.by)
        before = groups.get(key, Count(0.0, 0.0))
        bad = value if rule.bad(labels) else 0.0
        groups[key] = Count(before.bad + bad, before.total + value)
    for key, count in groups.items():
        yield "/".join((rule.name, *(part or "-" for part in key))), count
