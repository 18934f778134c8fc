"""One frozen dataclass per room; the one place for defaults and their validation."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from lockstep.types import BranchLayers, LockstepError


class ConfigError(LockstepError, ValueError):
    """A setting out of range: the message names the setting, the value and the limit."""


def cache_folder() -> Path:
    """Where compiled kernels and assembled files lie between runs.

    `$LOCKSTEP_CACHE_DIR`, else `lockstep` in `$XDG_CACHE_HOME`, else in `~/.cache`.
    """
    own = os.environ.get("LOCKSTEP_CACHE_DIR")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "lockstep"


def _at_least(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}")


def _between(name: str, value: int, low: int, high: int) -> None:
    _at_least(name, value, low)
    if value > high:
        raise ConfigError(f"{name} must be at most {high}, got {value}")


def _boolean(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}")


def _string(name: str, value: str) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a string, got {value!r}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}")


# By kind of device: a GPU wants thousands of rows a step to be busy, and has the memory.
DEFAULTS: dict[str, dict[str, int]] = {
    "cpu": {
        "page_tokens": 16,
        "max_step_tokens": 512,
        "max_sequences": 64,
        "max_chunk_tokens": 256,
    },
    "cuda": {
        "page_tokens": 64,
        "max_step_tokens": 8192,
        "max_sequences": 256,
        "max_chunk_tokens": 4096,
    },
}


def _defaults(device: str) -> dict[str, int]:
    """Defaults of a device such as "cpu", "cuda" or "cuda:1"; of the CPU where unknown."""
    return DEFAULTS.get(device.partition(":")[0], DEFAULTS["cpu"])


DTYPES = ("auto", "bfloat16", "float32")
BACKENDS = ("auto", "native", "torch", "triton")
MAX_THREADS = 1024  # more than any memory can feed


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What to load and where to put it.

    Attributes:
        name: a path, a packaged name (`smollm2`, `gemma3-270m`) or a hub id.
        dtype: of weights, activations and cache; "auto" is bfloat16.
        device: "auto" takes CUDA when present, else the CPU; a named device that
            is absent is an error, never a silent fallback.
        backend: kernels to use; "auto" takes Triton on CUDA and the native form on a CPU
            ("torch" on a CPU without a C++ compiler).
        threads: CPU threads of the engine, at most `MAX_THREADS`; 0 means all cores this process
            may use.
        cuda_graphs: replay captured decode steps on CUDA. They have the same bits; without
            them every kernel of a step is launched from Python.
    """

    name: str = "smollm2"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    device: str = "auto"
    backend: Literal["auto", "native", "torch", "triton"] = "auto"
    threads: int = 0
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        _string("model", self.name)  # what the doors call it
        _one_of("dtype", self.dtype, DTYPES)
        _string("device", self.device)
        _one_of("backend", self.backend, BACKENDS)
        _between("threads", self.threads, 0, MAX_THREADS)
        _boolean("cuda_graphs", self.cuda_graphs)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The page pool and the prefix tree.

    Attributes:
        page_tokens: tokens a page; divides the attention block (`kernels.tree.BLOCK`), or on
            CUDA is a multiple of it.
            0 takes the device's default: 16 on a CPU, 64 on CUDA.
        memory_bytes: bytes of the pool; 0 means sized by the runner from free memory.
        prefix_caching: keep finished sequences' pages for reuse.
    """

    page_tokens: int = 0
    memory_bytes: int = 0
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        _at_least("page_tokens", self.page_tokens, 0)
        _at_least("cache_bytes", self.memory_bytes, 0)  # what the doors call it
        _boolean("prefix_caching", self.prefix_caching)

    def resolved(self, device: str) -> CacheConfig:
        """The same with the device's defaults in place of zeros."""
        return replace(self, page_tokens=self.page_tokens or _defaults(device)["page_tokens"])


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How steps are filled. A budget of 0 takes the device's default (`DEFAULTS`).

    Attributes:
        max_step_tokens: token budget of one step, over all sequences.
        max_sequences: sequences that may run at once.
        max_chunk_tokens: most prompt tokens of one sequence in one step while
            others are running (keeps a long prompt from starving them).
        max_context: most tokens (prompt plus output) of a sequence; 0 means the model's own.
        max_queue: waiting requests beyond which a submit is refused; 0 means no limit.
        overlap: plan the next step while the device works; None does so on CUDA. It moves
            no bit; without it a defect can be placed.
    """

    max_step_tokens: int = 0
    max_sequences: int = 0
    max_chunk_tokens: int = 0
    max_context: int = 0
    max_queue: int = 0
    overlap: bool | None = None

    def __post_init__(self) -> None:
        if self.overlap is not None:
            _boolean("overlap", self.overlap)
        _at_least("max_step_tokens", self.max_step_tokens, 0)
        _at_least("max_sequences", self.max_sequences, 0)
        _at_least("max_chunk_tokens", self.max_chunk_tokens, 0)
        _at_least("max_context", self.max_context, 0)
        _at_least("max_queue", self.max_queue, 0)

    def resolved(self, device: str) -> SchedulerConfig:
        """The same with the device's defaults in place of zeros."""
        defaults = _defaults(device)
        return replace(
            self,
            max_step_tokens=self.max_step_tokens or defaults["max_step_tokens"],
            max_sequences=self.max_sequences or defaults["max_sequences"],
            max_chunk_tokens=self.max_chunk_tokens or defaults["max_chunk_tokens"],
            overlap=device.startswith("cuda") if self.overlap is None else self.overlap,
        )


@dataclass(frozen=True, slots=True)
class BranchOptions:
    """Decision branches.

    Attributes:
        load: (name, folder) of branches that are there from the start.
        layers: for which the cache is laid out beside those of `load`: an engine that takes
            another's place can load whatever that one could.
        depth: how far a context's rows go for a decision alone: "full" through all layers, so
            that a later answer finds them, or "exit" to the branch's exit, which is less work.
        keep_activations: keep what enters a `context` branch's fork, so that another decision
            over the same context computes the branch's layers alone.
        keep_tails: keep a `context` branch's own keys and values after its decision, as long as
            there is room.
    """

    load: tuple[tuple[str, str], ...] = ()
    layers: tuple[BranchLayers, ...] = ()
    depth: Literal["full", "exit"] = "full"
    keep_activations: bool = False
    keep_tails: bool = False

    def __post_init__(self) -> None:
        if self.depth not in ("full", "exit"):
            raise ConfigError(f"branch_depth must be full or exit, got {self.depth!r}")
        _boolean("keep_activations", self.keep_activations)
        _boolean("keep_tails", self.keep_tails)
        if self.keep_activations and self.depth == "exit":
            raise ConfigError("keep_activations needs branch_depth full")
        names = [name for name, _ in self.load]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"branches: {twice!r} is named twice")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine needs to start."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    branches: BranchOptions = field(default_factory=BranchOptions)


# "auto" is what the model's chat template is written for; docs/tools.md has the formats.
TOOL_PARSERS = (
    "auto",
    *("hermes", "llama3_json", "mistral", "mistral_named", "pythonic", "qwen3_coder"),
)
REASONING_PARSERS = ("auto", "none", "think", "mistral")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP door. Every limit of 0 is none, unless it says otherwise.

    Attributes:
        host, port: where to listen; port 0 takes a free one.
        served_name: the model name that clients use; "" means the name it was loaded by.
        keep_alive_seconds: idle connections are closed after it; longer than a reverse
            proxy's own, so that it never sends into a connection that is being closed.
            A request's head has as long, however slowly it comes in.
        stall_seconds: a client is cut off that sends nothing of the rest of its request for
            so long, or takes nothing of its answer.
        tool_parser: the format of the model's function calls, one of `TOOL_PARSERS`.
        reasoning_parser: the markers around its reasoning, one of `REASONING_PARSERS`.
        max_body_bytes: larger request bodies get 413.
        max_prompt_tokens: longer prompts get 400.
        max_output_tokens: larger `max_tokens` get 400, and it is the default where a
            request gives none.
        requests_per_minute, tokens_per_minute, max_concurrent: of each key, unless the
            key has its own; of all clients together where there are no keys. Tokens are
            those of prompts and of answers.
        keys_file: a file of hashed API keys (`lockstep keys new`).
        api_keys, admin_keys: further keys, in plain text: from the environment.
        isolate_keys: no key's requests reuse prefixes that another key's have cached, so
            that nobody can learn from timing what others ask.
        open_metrics: `/metrics` asks for no key.
        cors_origins: origins whose pages may call; "*" is all.
        tls_cert, tls_key, tls_key_password: PEM files; both files or none.
        tls_client_ca: PEM file; clients must show a certificate that it has signed.
        trusted_proxies: addresses whose X-Forwarded-* headers are believed.
        log_format: "console" for people, "json" for machines: an object a line.
        log_prompts: write what clients send and get into the log.
        access_log: a line a request.
        vllm_metric_names: give metrics that mean the same under vLLM's names as well.
        otlp_endpoint: where traces go over OTLP and HTTP; "" means nowhere.
        drain_seconds: how long running answers get after the first SIGTERM or SIGINT.
        data_dir: where files and batches live; "" means a temporary folder that goes with
            the server. Two servers cannot share one.
        max_file_bytes: larger uploaded files get 413.
        branch_root: folder inside which `/admin/branches` may load from; "" means the working
            directory, and the folders that hold those loaded at the start.
        batch_concurrency: lines of batches in the engine at once; 0 means as many as it
            runs sequences.
        stored_responses, stored_response_bytes, stored_response_seconds: how many of
            /v1/responses are kept for `previous_response_id`, how large all of them may be,
            and how long after its last use one is kept. 0 of any keeps none.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str = ""
    keep_alive_seconds: int = 75
    stall_seconds: int = 60
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    max_body_bytes: int = 4 * 1024 * 1024
    max_prompt_tokens: int = 0
    max_output_tokens: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_concurrent: int = 0
    keys_file: str = ""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    isolate_keys: bool = False
    open_metrics: bool = False
    cors_origins: tuple[str, ...] = ()
    tls_cert: str = ""
    tls_key: str = ""
    tls_key_password: str = field(default="", repr=False)
    tls_client_ca: str = ""
    trusted_proxies: tuple[str, ...] = ("127.0.0.1", "::1")
    log_format: Literal["console", "json"] = "console"
    log_prompts: bool = False
    access_log: bool = True
    vllm_metric_names: bool = True
    otlp_endpoint: str = ""
    drain_seconds: int = 30
    data_dir: str = ""
    max_file_bytes: int = 512 * 1024 * 1024
    branch_root: str = ""
    batch_concurrency: int = 0
    stored_responses: int = 10_000
    stored_response_bytes: int = 256 * 1024 * 1024
    stored_response_seconds: int = 24 * 3600

    def __post_init__(self) -> None:
        _between("port", self.port, 0, 65535)
        _at_least("max_body_bytes", self.max_body_bytes, 1024)
        _at_least("max_file_bytes", self.max_file_bytes, 1024)
        _string("data_dir", self.data_dir)
        _string("branch_root", self.branch_root)
        _at_least("keep_alive_seconds", self.keep_alive_seconds, 1)
        for name in (
            "batch_concurrency",
            "stored_responses",
            "stored_response_bytes",
            "stored_response_seconds",
            "max_prompt_tokens",
            "max_output_tokens",
            "requests_per_minute",
            "tokens_per_minute",
            "max_concurrent",
            "drain_seconds",
            "stall_seconds",
        ):
            _at_least(name, getattr(self, name), 0)
        _one_of("tool_parser", self.tool_parser, TOOL_PARSERS)
        _one_of("reasoning_parser", self.reasoning_parser, REASONING_PARSERS)
        if self.log_format not in ("console", "json"):
            raise ConfigError(f"log_format must be console or json, got {self.log_format!r}")
        if bool(self.tls_cert) != bool(self.tls_key):
            given, missing = ("tls_cert", "tls_key") if self.tls_cert else ("tls_key", "tls_cert")
            raise ConfigError(f"{given} is given without {missing}")
        if self.tls_client_ca and not self.tls_cert:
            raise ConfigError("tls_client_ca is given without tls_cert and tls_key")
        for origin in self.cors_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ConfigError(
                    f"cors_origins: {origin!r} is no origin such as https://example.org"
                )
