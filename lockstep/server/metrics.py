"""What `/metrics` says, in the names that dashboards of this field use.

Counting happens on the event loop, in plain numbers without locks (a token costs about a
microsecond); prometheus-client only writes them out. Names start with "lockstep:"; those
that mean the same in vLLM are given under "vllm:" too, for gateways and dashboards made for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from lockstep.async_llm import AsyncLLM, Outcome
from lockstep.decisions import Decision
from lockstep.engine.client import EngineState

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
OWN = "lockstep:"
ALIAS = "vllm:"

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(25.0, 50.0, 100.0, 250.0, 500.0, 1000.0),
)
_TOKEN_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)

MAX_TOOL_NAMES = 200
OTHER = "other"
RESULTS = ("ok", "malformed", "aborted")


class Histogram:
    """Counts of values by upper bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self._counts)

    def family(self, name: str, text: str, model: str) -> HistogramMetricFamily:
        """As prometheus-client writes it."""
        family = HistogramMetricFamily(name, text, labels=("model_name",))
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        family.add_metric((model,), buckets, self._sum)
        return family


class ToolCalls:
    """Function calls that models began, by what became of them.

    Clients choose the names of functions: the first `MAX_TOOL_NAMES` are counted by name, later
    ones together as "other". "" stands for calls that went wrong before they named one.

    Attributes:
        counts: by (parser, function, "ok" | "malformed" | "aborted"); each call is in one.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self._names: set[str] = {""}

    def count(self, parser: str, name: str, result: str) -> None:
        """Count a call."""
        if name not in self._names:
            if len(self._names) > MAX_TOOL_NAMES:
                name = OTHER
            else:
                self._names.add(name)
                for each in RESULTS:  # a rate needs the zeros as well
                    self.counts[parser, name, each] += 0
        self.counts[parser, name, result] += 1


class DecisionCounts:
    """Decisions and gates.

    Attributes:
        decisions: by (source, branch): source is "labels", "prefix" or "branch", the branch's
            name is "" without one. Those of gates count as well.
        gates: by (source, branch, "open" | "closed"), one a request.
    """

    def __init__(self) -> None:
        self.decisions: Counter[tuple[str, str]] = Counter()
        self.gates: Counter[tuple[str, str, str]] = Counter()

    def count(self, decision: Decision) -> None:
        """Count a decision."""
        self.decisions[_source_of(decision)] += 1

    def count_gate(self, decision: Decision, opened: bool) -> None:
        """Count a gate, and its decision."""
        self.count(decision)
        self.gates[*_source_of(decision), "open" if opened else "closed"] += 1


def _source_of(decision: Decision) -> tuple[str, str]:
    return (decision.source, "") if decision.by_trunk else ("branch", decision.source)


class Metrics:
    """Counters and histograms of a server, and the text that `/metrics` answers.

    Attributes:
        accepted: requests that the engine has taken. outcomes: what became of them; those
            in flight are `accepted` less all outcomes.
        http: replies by (method, route, status). refused: error replies by code.
        tool_calls: function calls that models began.
        decided: decisions and gates.
        key_tokens: by (key's name, "prompt" or "generation").
        in_flight: HTTP requests being worked for.
        background: requests in the engine that no client waits for, such as lines of batches.
        batches: batches in progress.
    """

    def __init__(self, llm: AsyncLLM, model: Callable[[], str], *, aliases: bool) -> None:
        self.accepted = 0
        self.outcomes: Counter[Outcome] = Counter(dict.fromkeys(Outcome, 0))
        self.finishes: Counter[str] = Counter({"stop": 0, "length": 0})
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.in_flight = 0
        self.http: Counter[tuple[str, str, int]] = Counter()
        self.refused: Counter[str] = Counter()
        self.key_requests: Counter[str] = Counter()
        self.key_tokens: Counter[tuple[str, str]] = Counter()
        self.draining = False
        self.background: Callable[[], int] = lambda: 0
        self.batches: Callable[[], int] = lambda: 0
        self.time_to_first_token = Histogram(_SECONDS)
        self.inter_token_latency = Histogram(_TOKEN_SECONDS)
        self.time_per_output_token = Histogram(_TOKEN_SECONDS)
        self.latency = Histogram(_SECONDS)
        self.queue_time = Histogram(_SECONDS)
        self.prefill_time = Histogram(_SECONDS)
        self.decode_time = Histogram(_SECONDS)
        self.inference_time = Histogram(_SECONDS)
        self.request_prompt_tokens = Histogram(_TOKENS)
        self.request_generation_tokens = Histogram(_TOKENS)
        self.http_seconds = Histogram(_SECONDS)
        self.tool_calls = ToolCalls()
        self.decided = DecisionCounts()
        self._llm = llm
        self._model = model
        self._aliases = aliases
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def text(self) -> bytes:
        """The page, as `CONTENT_TYPE`.

        Always the classic text format, which every scraper reads: in OpenMetrics
        prometheus-client writes underscores for the colons in names.
        """
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """All families; called by prometheus-client."""
        model = self._model()
        for family in self._shared(model):
            yield family
            if self._aliases:
                yield _renamed(family)
        yield from self._own(model)

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are not checked against other collectors before there is an engine."""
        return ()

    def _shared(self, model: str) -> Iterator[Metric]:
        """Families that mean what vLLM's of the same name mean."""
        stats = self._llm.stats()
        pages = max(1, stats.pages_total)
        for name, text, value in (
            ("num_requests_running", "Sequences in the engine's batch.", stats.running),
            ("num_requests_waiting", "Sequences in the engine's queue.", stats.waiting),
            (
                "kv_cache_usage_perc",
                "Share of the cache's pages that live sequences hold, in [0, 1].",
                stats.pages_used / pages,
            ),
        ):
            yield _gauge(name, text, value, model)
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the cache.", stats.cached_tokens),
            ("num_preemptions", "Sequences that had to start again.", stats.preemptions),
            ("prompt_tokens", "Prompt tokens of accepted requests.", self.prompt_tokens),
            ("prompt_tokens_cached", "Of these, from the cache.", self.cached_tokens),
            ("generation_tokens", "Tokens generated.", self.generation_tokens),
        ):
            yield _counter(name, text, value, model)
        success = CounterMetricFamily(
            OWN + "request_success",
            "Answers that finished, by why (each choice counts).",
            labels=("model_name", "finished_reason"),
        )
        for reason, count in self.finishes.items():
            success.add_metric((model, reason), count)
        yield success
        for name, text, histogram in (
            (
                "time_to_first_token_seconds",
                "From a request's arrival to its first token.",
                self.time_to_first_token,
            ),
            (
                "inter_token_latency_seconds",
                "Between a choice's consecutive tokens.",
                self.inter_token_latency,
            ),
            (
                "request_time_per_output_token_seconds",
                "Mean of a choice's inter-token latencies.",
                self.time_per_output_token,
            ),
            (
                "e2e_request_latency_seconds",
                "From a completed request's arrival to its last token.",
                self.latency,
            ),
            ("request_queue_time_seconds", "Waiting in the engine's queue.", self.queue_time),
            (
                "request_prefill_time_seconds",
                "From the queue to the first token.",
                self.prefill_time,
            ),
            ("request_decode_time_seconds", "From the first token to the last.", self.decode_time),
            ("request_inference_time_seconds", "Prefill and decode.", self.inference_time),
            ("request_prompt_tokens", "Prompt tokens of a request.", self.request_prompt_tokens),
            (
                "request_generation_tokens",
                "Tokens generated for a completed request.",
                self.request_generation_tokens,
            ),
        ):
            yield histogram.family(OWN + name, text, model)
        if self._llm.client.state is EngineState.READY:
            info = self._llm.info
            config = GaugeMetricFamily(
                OWN + "cache_config_info",
                "The cache's geometry, in its labels.",
                labels=("model_name", "block_size", "num_gpu_blocks"),
            )
            labels = (model, str(info.page_tokens), str(stats.pages_total))
            config.add_metric(labels, 1)
            yield config

    def _own(self, model: str) -> Iterator[Metric]:
        client = self._llm.client
        stats = self._llm.stats()
        yield _counter(
            "requests_accepted", "Requests that the engine has taken.", self.accepted, model
        )
        in_flight = self.accepted - self.outcomes.total()
        yield _gauge("requests_in_flight", "Accepted, without an outcome yet.", in_flight, model)
        yield _table(
            "requests_outcome",
            "Accepted requests by what became of them.",
            ("outcome",),
            (((outcome.value,), count) for outcome, count in self.outcomes.items()),
        )
        yield _gauge(
            "requests_in_background", "Of these, lines of batches.", self.background(), model
        )
        yield _gauge("batches_in_progress", "Files of requests at work.", self.batches(), model)
        yield _table(
            "tool_calls",
            "Function calls that the model began, by what became of them.",
            ("model_name", "parser", "tool", "result"),
            (((model, *labels), count) for labels, count in self.tool_calls.counts.items()),
        )
        yield _table(
            "decisions",
            "Questions that were decided, by what decided them.",
            ("model_name", "source", "branch"),
            (((model, *labels), count) for labels, count in self.decided.decisions.items()),
        )
        yield _table(
            "gates",
            "Gates of requests, by what decided and whether they opened.",
            ("model_name", "source", "branch", "outcome"),
            (((model, *labels), count) for labels, count in self.decided.gates.items()),
        )
        ready = client.state is EngineState.READY
        yield _gauge("branches_loaded", "Branches that decide.", len(client.branches), model)
        weights = GaugeMetricFamily(
            OWN + "weight_bytes",
            "Of the device's memory: the model's weights (branch is empty), and each branch's.",
            labels=("model_name", "branch"),
        )
        if ready:
            weights.add_metric((model, ""), client.info.weight_bytes)
        for name, branch in client.branches.items():
            weights.add_metric((model, name), branch.weight_bytes)
        yield weights
        yield _gauge("engine_up", "1 while the engine takes requests.", int(ready), model)
        yield _gauge(
            "engine_silent_seconds",
            "For how long the engine has said nothing.",
            client.silent,
            model,
        )
        yield _counter("engine_restarts", "Restarts of the engine process.", client.restarts, model)
        yield _counter("engine_steps", "Forward passes.", stats.steps, model)
        yield _counter(
            "engine_rows", "Rows that went through the model.", stats.computed_tokens, model
        )
        pages = GaugeMetricFamily(
            OWN + "cache_pages", "Pages of the cache, by state.", labels=("model_name", "state")
        )
        free = stats.pages_total - stats.pages_used - stats.pages_cached
        for state, count in (
            ("used", stats.pages_used),
            ("cached", stats.pages_cached),
            ("free", free),
        ):
            pages.add_metric((model, state), count)
        yield pages
        yield _gauge(
            "cache_pages_tail",
            "Of the used and cached ones, branches' own keys and values, and rows at their stops.",
            stats.pages_tail,
            model,
        )
        yield _gauge("draining", "1 while new requests are turned away.", int(self.draining), model)
        yield _gauge(
            "http_requests_in_flight", "HTTP requests being worked for.", self.in_flight, model
        )
        yield _table(
            "http_requests",
            "HTTP replies.",
            ("method", "route", "status"),
            (((m, route, str(status)), n) for (m, route, status), n in self.http.items()),
        )
        yield _table(
            "http_errors",
            "HTTP replies with an error, by its code.",
            ("code",),
            (((code,), count) for code, count in self.refused.items()),
        )
        yield self.http_seconds.family(
            OWN + "http_request_duration_seconds", "From an HTTP request to its last byte.", model
        )
        yield _table(
            "key_requests",
            "HTTP requests by the name of their key.",
            ("key",),
            (((key,), count) for key, count in self.key_requests.items()),
        )
        yield _table(
            "key_tokens",
            "Tokens by the name of the key that they were for.",
            ("key", "kind"),
            self.key_tokens.items(),
        )


def _gauge(name: str, text: str, value: float, model: str) -> Metric:
    family = GaugeMetricFamily(OWN + name, text, labels=("model_name",))
    family.add_metric((model,), value)
    return family


def _counter(name: str, text: str, value: float, model: str) -> Metric:
    family = CounterMetricFamily(OWN + name, text, labels=("model_name",))
    family.add_metric((model,), value)
    return family


def _table(
    name: str, text: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], float]]
) -> Metric:
    family = CounterMetricFamily(OWN + name, text, labels=labels)
    for values, count in rows:
        family.add_metric(values, count)
    return family


def _renamed(family: Metric) -> Metric:
    """The same family under vLLM's name."""
    other = Metric(ALIAS + family.name.removeprefix(OWN), family.documentation, family.type)
    other.samples = [
        sample._replace(name=ALIAS + sample.name.removeprefix(OWN)) for sample in family.samples
    ]
    return other
