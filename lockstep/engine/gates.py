"""Decide, then write: what a gate reads, and what the request becomes.

One sequence of a gated request reads the gate for all of its choices: the prompt, and behind
it one probe after another, as other sequences read theirs. Then it turns into the first of
the writers where it stands, on the pages that it has; the other choices were held until then.
So the prompt is computed once, whatever the cache keeps or gives up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.branch import Branch
from lockstep.engine.routes import Route
from lockstep.options import Probe, choose, log_softmax, normalise, probe_params, read, total_mass
from lockstep.types import (
    Gate,
    GateOutcome,
    Request,
    RequestError,
    SamplingParams,
    TokenLogprob,
)

if TYPE_CHECKING:
    from lockstep.text.grammar_matcher import CompiledGrammar


class GatedRequest:
    """A request that has yet to decide.

    Attributes:
        gate: what to read. routes: the ways of a branch's rows; none for the trunk's own head.
        max_lens: for each option the most tokens of a writer, prompt included; 0 where the
            gate stays closed.
        prompt_len: tokens in front of what is read and written. grammar: of what is written.
    """

    def __init__(
        self,
        request: Request,
        gate: Gate,
        max_lens: Sequence[int],
        grammar: CompiledGrammar | None = None,
        routes: tuple[Route, ...] = (),
    ) -> None:
        self.gate = gate
        self.prompt_len = len(request.prompt)
        self.max_lens = tuple(max_lens)
        self.grammar = grammar
        self.routes = routes
        self._request = request
        self._rows: list[list[TokenLogprob]] = []  # of each probe that was read
        self._scores: tuple[float, ...] = ()

    @property
    def shared(self) -> int:
        """Prompt tokens that stay as they are whatever is read and written behind them: all,
        or all but the last where its row is computed anew for somebody."""
        return self.prompt_len - (not all(_pieces(self.gate)))

    @property
    def judge(self) -> Request:
        """What reads the next probe."""
        return judge_request(self._request, self.gate, len(self._rows))

    @property
    def judge_len(self) -> int:
        """Most tokens of that sequence, with the one that it draws for its probabilities."""
        return len(self.judge.prompt) + (not self.routes)

    def take(self, rows: Sequence[TokenLogprob], scores: tuple[float, ...]) -> None:
        """What the probe told: the entries of its path and of what is drawn behind it, or
        the outputs of a branch's head."""
        self._rows.append(list(rows))
        self._scores = scores

    @property
    def is_read(self) -> bool:
        return len(self._rows) == len(self.gate.probes)

    def outcome(self) -> GateOutcome:
        """What the probes say together."""
        gate = self.gate
        if self.routes:
            logprobs = log_softmax([self._scores[index] for index in gate.outputs])
            mass = 1.0
        else:
            probes = [Probe(probe.path, probe.wanted) for probe in gate.probes]
            logprobs = read(gate.sequences, probes, self._rows)
            mass = total_mass(logprobs)
        probabilities = normalise(logprobs, gate.temperature)
        return GateOutcome(choose(probabilities, gate.thresholds), logprobs, probabilities, mass)

    def writer(self, option: int) -> Request | None:
        """What writes once that option has won; None where the gate stays closed."""
        header = self.gate.headers[option]
        if header is None:
            return None
        return replace(self._request, prompt=(*self._request.prompt, *header), gate=None)


def judge_request(request: Request, gate: Gate, index: int) -> Request:
    """The request that reads one probe; `decisions` asks alike without a gate."""
    probe = gate.probes[index]
    begins = len(request.prompt) + len(probe.suffix)
    params = SamplingParams(max_tokens=0, seed=0)
    if not gate.branch:
        params = probe_params(probe.path, probe.wanted)
    return Request(
        request.id,
        (*request.prompt, *probe.suffix, *probe.path),
        params,
        priority=request.priority,
        salt=request.salt,
        score_from=begins if probe.path else 1,
        branch=gate.branch,
        branch_from=len(request.prompt) if gate.branch else 0,
    )


def _pieces(gate: Gate) -> list[tuple[int, ...]]:
    """Everything that is computed right behind the prompt."""
    ends = [probe.suffix or probe.path for probe in gate.probes]
    return ends + [header for header in gate.headers if header is not None]


def ids_of(gate: Gate) -> list[int]:
    """Every token id that a gate names."""
    ids = [*(token for path in gate.sequences for token in path)]
    for probe in gate.probes:
        ids += [*probe.suffix, *probe.path, *probe.wanted]
    return ids + [token for header in gate.headers for token in header or ()]


def check_gate(gate: Gate, branch: Branch | None) -> None:
    """Refuse a gate that cannot be read, or whose parts do not go together.

    Raises:
        RequestError: field "gate".
    """
    count = len(gate.headers)
    if count < 1 or len(gate.thresholds) != count:
        raise _refusal(f"it has {count} headers and {len(gate.thresholds)} thresholds")
    for threshold in gate.thresholds:
        if threshold is not None and not 0 <= threshold <= 1:
            raise _refusal(f"a threshold must be in [0, 1], got {threshold!r}")
    if not 0 <= gate.temperature < float("inf"):
        raise _refusal(f"temperature must be finite and at least 0, got {gate.temperature!r}")
    if not gate.probes:
        raise _refusal("it has no probes")
    if branch is None:
        _check_paths(gate, count)
        return
    (first, *more) = gate.probes
    if more or first.path or first.wanted or gate.sequences or not first.suffix:
        raise _refusal("a branch reads one probe, which has a suffix and nothing else")
    if len(gate.outputs) != count:
        raise _refusal(f"it has {count} headers for {len(gate.outputs)} outputs")
    for index in gate.outputs:
        if not 0 <= index < len(branch.options):
            raise _refusal(f"output {index} is not among the head's {len(branch.options)}")


def _check_paths(gate: Gate, count: int) -> None:
    """The probes must show every token of every option."""
    if len(gate.sequences) != count or not all(gate.sequences):
        raise _refusal(f"it has {count} headers for {len(gate.sequences)} options, none empty")
    shown: dict[tuple[int, ...], tuple[int, ...]] = {}
    for probe in gate.probes:
        for length in range(len(probe.path) + 1):
            shown.setdefault(probe.path[:length], probe.wanted)
    for path in gate.sequences:
        for length, token in enumerate(path):
            if token not in shown.get(path[:length], ()):
                raise _refusal(f"no probe shows token {token} of option {list(path)}")


def _refusal(text: str) -> RequestError:
    return RequestError(f"gate: {text}", field="gate")
