"""What goes in and what comes out: a leaf module that every room may import.

Every record here is a frozen dataclass of plain values, so that it crosses the
process boundary as it is (msgspec encodes dataclasses natively).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal


class LockstepError(Exception):
    """Base of every error that Lockstep raises on purpose."""


class RequestError(LockstepError, ValueError):
    """A request that cannot be served as it stands.

    Attributes:
        field: the name of the offending field, as the client wrote it, or "".
        code: a short machine-readable reason, e.g. "context_length_exceeded".
    """

    def __init__(self, message: str, *, field: str = "", code: str = "invalid_value") -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class ModelError(LockstepError, ValueError):
    """A model that cannot be loaded: names the file, key or tensor at fault."""


def lone_surrogate(text: str) -> int | None:
    """Where `text` has half of a surrogate pair, which UTF-8 cannot hold; None without one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


class FinishReason(StrEnum):
    """Why a sequence ended. The values are the OpenAI wire names where one exists."""

    GATE = "gate"  # the request's gate stayed closed: nothing was written
    STOP = "stop"  # an end-of-sequence token, a stop token id or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    CANCELLED = "cancelled"  # the client went away or asked for it
    ERROR = "error"  # the step that computed it failed; `error` says why


MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOPS = 256  # strings, and ids
MAX_STOP_CHARACTERS = 4096  # of all stop strings together
MAX_BAD_WORDS = 1024
MAX_LOGPROB_IDS = 1024
MAX_CHOICES = 128
MAX_LOGPROBS = 128
MAX_SEED = 2**63 - 1


def _finite(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, got {value!r}", field=name)
    if not low <= value <= high:  # NaN compares false
        raise RequestError(f"{name} must be in [{low:g}, {high:g}], got {value!r}", field=name)


def _integer(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}", field=name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be in [{low}, {high}], got {value}", field=name)


def _boolean(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {value!r}", field=name)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the generated text must look like, from its first token to its end.

    Attributes:
        kind: what `source` is: a JSON Schema or "" for any JSON object, a regular
            expression, a JSON list of texts, a grammar in Lark's EBNF.
        source: the text of it; a JSON Schema or a list of texts as JSON.
        name: what the client calls it, for errors.

    Raises:
        RequestError: an unknown kind, or a source that is no valid text.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "ebnf"]
    source: str = ""
    name: str = field(default="grammar", compare=False)

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "json_object", "regex", "choice", "ebnf"):
            raise RequestError(f"grammar: kind {self.kind!r} is unknown", field="grammar")
        if not isinstance(self.source, str):
            raise RequestError(
                f"grammar: source must be a string, got {self.source!r}", field="grammar"
            )
        if (place := lone_surrogate(self.source)) is not None:
            raise RequestError(
                f"grammar: source has a lone surrogate at character {place}: it is not valid "
                "Unicode",
                field="grammar",
            )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request samples. Validated on construction; see `docs/sampling.md`.

    Logprobs are those of the model's raw distribution (before penalties,
    temperature and truncation) unless `logprobs_mode` is "processed".

    Attributes:
        temperature: in [0, 1e6]; 0 means greedy.
        top_k: at least -1; 0 or -1 means off.
        top_p: in [0, 1]; 0 keeps the most probable token only.
        min_p: in [0, 1]; tokens below min_p times the largest probability are dropped.
        presence_penalty, frequency_penalty: in [-2, 2], over generated tokens (OpenAI).
        repetition_penalty: in [0.01, 100], over prompt and generated tokens (CTRL, Keskar
            et al. 2019).
        logit_bias: token id -> value in [-100, 100] added to its logit.
        bad_words: texts never generated (as the tokenizer writes them, with and
            without a leading space).
        max_tokens: None means up to the context's end; 0 means score the prompt only.
        min_tokens: end-of-sequence and stop ids cannot be drawn before it.
        stop: texts that end generation; never part of the text unless
            `include_stop_str_in_output`. One text may stand alone.
        stop_token_ids: ids that end generation, besides the model's own.
        include_stop_str_in_output: the text ends with the stop text, or with that of the id,
            that ended it.
        ignore_eos: the model's own end-of-sequence ids are ordinary tokens.
        seed: 64 bits, signed; None draws one per request; with a seed, equal requests give
            equal text.
        n: number of choices; they share the prompt's pages and differ by choice index.
        logprobs: None, or how many alternatives to report at each generated position.
        prompt_logprobs: None, or how many alternatives at each prompt position.
        logprob_token_ids: ids whose exact logprob is reported at every reported position.
        skip_special_tokens: control tokens have no text.
        grammar: what the generated text must look like; None leaves it free.

    Raises:
        RequestError: naming the field, the value and the allowed range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    logprobs_mode: Literal["raw", "processed"] = "raw"
    skip_special_tokens: bool = True
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            if isinstance(value, str):
                value = (value,)
            if not isinstance(value, list | tuple) or not all(
                isinstance(item, str) and item for item in value
            ):
                raise RequestError(f"{name} must be non-empty strings, got {value!r}", field=name)
            most = MAX_STOPS if name == "stop" else MAX_BAD_WORDS
            if len(value) > most:
                raise RequestError(
                    f"{name} has {len(value)} entries, at most {most} are allowed", field=name
                )
            object.__setattr__(self, name, tuple(value))
        for name in ("stop_token_ids", "logprob_token_ids"):
            ids = getattr(self, name)
            if not isinstance(ids, list | tuple):
                raise RequestError(f"{name} must be a list of token ids, got {ids!r}", field=name)
            most = MAX_STOPS if name == "stop_token_ids" else MAX_LOGPROB_IDS
            if len(ids) > most:
                raise RequestError(
                    f"{name} has {len(ids)} entries, at most {most} are allowed", field=name
                )
            for item in ids:
                _integer(name, item, 0, 2**31 - 1)
            object.__setattr__(self, name, tuple(ids))
        if sum(map(len, self.stop)) > MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop has {sum(map(len, self.stop))} characters in all, "
                f"at most {MAX_STOP_CHARACTERS} are allowed",
                field="stop",
            )
        _finite("temperature", self.temperature, 0.0, 1e6)
        _finite("top_p", self.top_p, 0.0, 1.0)
        _finite("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _finite("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _finite("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _finite("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if not isinstance(self.logit_bias, dict):
            raise RequestError(
                f"logit_bias must map token ids to numbers, got {self.logit_bias!r}",
                field="logit_bias",
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} entries, at most "
                f"{MAX_LOGIT_BIAS_ENTRIES} are allowed",
                field="logit_bias",
            )
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 2**31 - 1)
            _finite("logit_bias", bias, -100.0, 100.0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                field="min_tokens",
            )
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        _integer("n", self.n, 1, MAX_CHOICES)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None:
                _integer(name, count, 0, MAX_LOGPROBS)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            _boolean(name, getattr(self, name))
        if self.logprobs_mode not in ("raw", "processed"):
            raise RequestError(
                f"logprobs_mode must be 'raw' or 'processed', got {self.logprobs_mode!r}",
                field="logprobs_mode",
            )

        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise RequestError(
                f"grammar must be a Grammar or None, got {self.grammar!r}", field="grammar"
            )

    @property
    def greedy(self) -> bool:
        """True when the most probable token is taken at every position."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that cache alike; a model lists its groups in a fixed order.

    Attributes:
        name: unique within the model, e.g. "full" or "sliding".
        kind: how the group caches. "recurrent", "branch" and "activations" are named
            here so that tables keyed by kind have a place for them.
        layers: layer indices, ascending.
        kv_heads, head_dim: shape of one token's keys (and values) in one layer.
        window: positions a query sees, itself included; None for full attention.
    """

    name: str
    kind: Literal["full", "sliding", "recurrent", "branch", "activations"]
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class BranchLayers:
    """The trunk layers [fork, exit) that a branch runs with its adapters, and whose rows these
    touch: what the cache is laid out for, see `branch.Branch`."""

    fork: int
    exit: int
    adapt: Literal["suffix", "context"]

    @property
    def stop(self) -> int:
        """The layer at whose entrance the trunk's rows of a context may stop for the branch:
        nothing that it reads lies above."""
        return self.fork if self.adapt == "context" else self.exit


Pooling = Literal["", "last", "mean"]


@dataclass(frozen=True, slots=True)
class GateProbe:
    """One reading of a gate: the request's prompt, `suffix`, and `path` behind it.

    Attributes:
        suffix: ids behind the prompt, up to where an answer begins.
        path, wanted: as `options.Probe`; empty where a branch's head is read.
    """

    suffix: tuple[int, ...]
    path: tuple[int, ...] = ()
    wanted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Gate:
    """Decide first; write only if the decision says so. The prompt is computed once for both.

    Attributes:
        branch: the loaded branch whose head decides; "" is the trunk's own head.
        branch_key: as `Request.branch_key`.
        probes: what to read: one for a branch, as many as the options need for the trunk.
        sequences: token path of each option, for the trunk's head.
        outputs: index of each option's output of the branch's head.
        headers: for each option the ids behind the prompt with which writing begins, None
            where the gate stays closed.
        thresholds, temperature: see `options.choose` and `options.normalise`; one threshold
            an option.
    """

    branch: str
    probes: tuple[GateProbe, ...]
    headers: tuple[tuple[int, ...] | None, ...]
    thresholds: tuple[float | None, ...]
    sequences: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[int, ...] = ()
    temperature: float = 1.0
    branch_key: str = ""


@dataclass(frozen=True, slots=True)
class GateOutcome:
    """What a gate decided.

    Attributes:
        chosen: index of the winning option.
        logprobs: of each option, as `decisions.OptionScores`; of a branch normalised over the
            options alone at temperature 1.
        probabilities, mass: as `decisions.Decision`.
    """

    chosen: int
    logprobs: tuple[float, ...]
    probabilities: tuple[float, ...]
    mass: float


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the engine takes it: token ids, never text.

    Attributes:
        id: unique among live requests.
        prompt: token ids, at least one.
        sampling: validated parameters; `seed` is set (the door draws one if the client did not).
        stop_ids: end-of-sequence ids of the model (unless ignore_eos) and the client's stop ids.
        bad_ids: token id sequences never generated, from `sampling.bad_words`.
        priority: lower runs earlier; equal priorities run in order of arrival.
        salt: part of the identity of cached prefixes; set by the server, never by a client.
        score_from: with `sampling.prompt_logprobs`, the first prompt position whose logprob
            is wanted; those before it may come from the prefix cache and are reported as None.
        pooling: with max_tokens 0, what becomes of the prompt's last hidden rows (after the
            model's final norm): "last" reports that of the last token, "mean" the mean over all
            tokens, "" nothing.
        branch: with max_tokens 0, the loaded branch whose head reads the prompt's last row;
            its outputs are reported as `SequenceOutput.scores`. "" for none.
        branch_key: `Branch.key` of the one that the request was made for, which is refused where
            another has the name by now; "" takes whichever has it.
        branch_from: first prompt position of the question behind the context: of a branch that
            adapts the suffix the first row that it adapts.
        gate: decide behind `prompt`, then write behind `prompt` and the gate's header.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop_ids: tuple[int, ...] = ()
    bad_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    salt: str = ""
    score_from: int = 1
    pooling: Pooling = ""
    branch: str = ""
    branch_key: str = ""
    branch_from: int = 0
    gate: Gate | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one position.

    Attributes:
        token: the id that stands at the position.
        logprob: its natural-log probability (float32 value).
        rank: 1 for the most probable token; ties count the lower id first.
        top: (id, logprob) of the most probable alternatives, descending, ties by lower id.
        given: logprobs of `SamplingParams.logprob_token_ids`, in their order.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    given: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What the engine says about one choice of one request after a step.

    Attributes:
        request: the request's id.
        choice: index in [0, n).
        tokens: ids generated since the last output, in order (may be empty).
        logprobs: one entry per token in `tokens` when asked for, else empty.
        prompt_logprobs: sent once, with the first output, one entry per prompt
            token; those before `Request.score_from` are None (nothing precedes the first).
        finish: set on the last output of this choice.
        cached_tokens: prompt tokens taken from the prefix cache when first admitted.
        error: set when finish is ERROR.
        started: when the engine first took it out of the queue, in seconds of the machine's
            monotonic clock; 0 before. No part of the answer: equality leaves it out.
        pooled: sent once, with the last output of a pooled request: what its runs reported,
            see `RunResult.pooled`.
        scores: sent once, with the last output of a request that a branch reads: float32
            values of the head's outputs (logits, or the number of a value head).
        gate: sent once, with the first output of every choice of a gated request, before or
            with its first token; with a closed gate it is the only one, and `finish` is GATE.
    """

    request: str
    choice: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish: FinishReason | None = None
    cached_tokens: int = 0
    error: str = ""
    started: float = field(default=0.0, compare=False)
    pooled: tuple[bytes, ...] = ()
    scores: tuple[float, ...] = ()
    gate: GateOutcome | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice of a completion."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole answer to one request.

    `text`, `token_ids`, `logprobs` and `finish_reason` are those of the first choice.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    pooled: tuple[bytes, ...] = ()  # see `SequenceOutput`, as the two below
    scores: tuple[float, ...] = ()
    gate: GateOutcome | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine says about itself.

    Attributes:
        model: the name it was loaded by; `architecture`: e.g. "LlamaForCausalLM".
        dtype, device, backend, threads: as resolved, never "auto".
        max_context: most tokens (prompt plus output) of a sequence.
        pool_tokens: tokens that the page pool can hold at once.
        fingerprint: hash over everything that fixes the bits; answers carry it.
        load_seconds: from the start of loading to ready.
        hidden_size: numbers of a token's hidden state; 0 where there is no model.
        weights_hash: of the trunk's weights: what a branch's `base` must equal.
        weight_bytes: of the trunk's weights; a loaded branch has its own (`Branch`).
    """

    model: str
    architecture: str
    dtype: str
    device: str
    backend: str
    threads: int
    vocab_size: int
    num_layers: int
    max_context: int
    page_tokens: int
    pool_tokens: int
    pool_bytes: int
    weight_bytes: int
    fingerprint: str
    load_seconds: float
    hidden_size: int = 0
    weights_hash: str = ""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and counters of an engine; counters only grow.

    Sequences are counted, one a choice: submitted = running + waiting + finished +
    cancelled + failed at any time. One of a gated request's runs before it decides, the
    others wait.
    """

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_used: int = 0  # referenced by live sequences
    pages_cached: int = 0  # only in the prefix tree, evictable
    pages_tail: int = 0  # of these two, branches' own keys and values, and rows at stops
    steps: int = 0
    prompt_tokens: int = 0  # prompt tokens admitted
    cached_tokens: int = 0  # of these, taken from the prefix tree
    computed_tokens: int = 0  # rows that went through the model
    computed_layers: int = 0  # layers that rows went through, added up over all rows
    generated_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    submitted: int = 0
