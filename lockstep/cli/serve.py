"""`lockstep serve`: the HTTP server."""

from __future__ import annotations

import asyncio
import logging
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options

if TYPE_CHECKING:
    from lockstep.async_llm import AsyncLLM
    from lockstep.config import ServerConfig
    from lockstep.settings import EngineSettings

FORCED = 1

_LISTEN = "Listening"
_LIMITS = "Keys and limits"
_BROWSERS = "TLS, proxies and browsers"
_WATCH = "Logs, metrics and traces"
_FILES = "Files, batches and stored responses"
_FORMATS = "Tools and reasoning"


def _read_settings(context: typer.Context, path: Path | None) -> Path | None:
    """Options from a file, as defaults: what stands on the command line wins."""
    if path is None:
        return None
    try:
        settings = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from None
    known = {parameter.name for parameter in context.command.params} - {"config", "help"}
    values = {name.replace("-", "_"): value for name, value in settings.items()}
    for name, value in values.items():
        if name not in known:
            allowed = ", ".join(sorted(str(each).replace("_", "-") for each in known))
            raise typer.BadParameter(f"{path}: there is no option {name!r}; there are {allowed}")
        if isinstance(value, dict):
            raise typer.BadParameter(f"{path}: {name} must be a value, not a table")
    context.default_map = {**(context.default_map or {}), **values}
    return path


@options.grouped(engine=options.ENGINE)
def serve(
    model: options.ModelName = "smollm2",
    config: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file of these options, e.g. max-queue = 500; flags win over it.",
            callback=_read_settings,
            is_eager=True,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on.", rich_help_panel=_LISTEN)
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="Port to listen on; 0 takes a free one.", rich_help_panel=_LISTEN
        ),
    ] = 8000,
    served_name: Annotated[
        str,
        typer.Option(
            help="Model name that clients use; by default MODEL.", rich_help_panel=_LISTEN
        ),
    ] = "",
    keep_alive_seconds: Annotated[
        int, typer.Option(help="Idle connections are closed after it.", rich_help_panel=_LISTEN)
    ] = 75,
    stall_seconds: Annotated[
        int,
        typer.Option(
            help="A client that stops in the middle of a request, or takes nothing of its "
            "answer, is cut off after it; 0 is never.",
            rich_help_panel=_LISTEN,
        ),
    ] = 60,
    drain_seconds: Annotated[
        int,
        typer.Option(
            help="Running answers get so long after the first SIGTERM.", rich_help_panel=_LISTEN
        ),
    ] = 30,
    keys_file: Annotated[
        str,
        typer.Option(
            help="Hashed API keys (`lockstep keys new`). More keys, in plain text and separated "
            "by commas, may stand in the environment: LOCKSTEP_API_KEYS, LOCKSTEP_ADMIN_KEYS.",
            rich_help_panel=_LIMITS,
        ),
    ] = "",
    requests_per_minute: Annotated[
        int, typer.Option(help="Of each key; 0 is no limit.", rich_help_panel=_LIMITS)
    ] = 0,
    tokens_per_minute: Annotated[
        int, typer.Option(help="Of each key, read and written.", rich_help_panel=_LIMITS)
    ] = 0,
    max_concurrent: Annotated[
        int, typer.Option(help="Requests at once, of each key.", rich_help_panel=_LIMITS)
    ] = 0,
    isolate_keys: Annotated[
        bool,
        typer.Option(
            "--isolate-keys",
            help="Share no cached prefixes between keys: nobody learns from timing.",
            rich_help_panel=_LIMITS,
        ),
    ] = False,
    max_queue: Annotated[
        int,
        typer.Option(
            help="Waiting requests beyond which clients get 429; 0 is no limit.",
            rich_help_panel=_LIMITS,
        ),
    ] = 0,
    max_body_mb: Annotated[
        int, typer.Option(help="Larger request bodies get 413.", rich_help_panel=_LIMITS)
    ] = 4,
    max_prompt_tokens: Annotated[
        int, typer.Option(help="Longer prompts get 400; 0 is no limit.", rich_help_panel=_LIMITS)
    ] = 0,
    max_output_tokens: Annotated[
        int,
        typer.Option(
            help="Larger max_tokens get 400; also the default where none is given.",
            rich_help_panel=_LIMITS,
        ),
    ] = 0,
    tls_cert: Annotated[
        str, typer.Option(help="PEM file: serve HTTPS.", rich_help_panel=_BROWSERS)
    ] = "",
    tls_key: Annotated[
        str,
        typer.Option(
            help="PEM file of its key; a password in LOCKSTEP_TLS_KEY_PASSWORD.",
            rich_help_panel=_BROWSERS,
        ),
    ] = "",
    tls_client_ca: Annotated[
        str,
        typer.Option(
            help="PEM file: clients must show a certificate signed by it.",
            rich_help_panel=_BROWSERS,
        ),
    ] = "",
    trusted_proxy: Annotated[
        list[str],
        typer.Option(
            help="Address whose X-Forwarded-For is believed; may be repeated.",
            rich_help_panel=_BROWSERS,
        ),
    ] = ["127.0.0.1", "::1"],  # noqa: B006 (typer copies it)
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin whose pages may call, e.g. https://example.org; may be repeated.",
            rich_help_panel=_BROWSERS,
        ),
    ] = None,
    log_format: Annotated[
        str, typer.Option(help="console, or json: an object a line.", rich_help_panel=_WATCH)
    ] = "console",
    access_log: Annotated[
        bool, typer.Option(help="Log a line a request.", rich_help_panel=_WATCH)
    ] = True,
    log_prompts: Annotated[
        bool,
        typer.Option("--log-prompts", help="Log prompts and answers.", rich_help_panel=_WATCH),
    ] = False,
    open_metrics: Annotated[
        bool,
        typer.Option("--open-metrics", help="/metrics asks for no key.", rich_help_panel=_WATCH),
    ] = False,
    vllm_metric_names: Annotated[
        bool,
        typer.Option(help="Give metrics under vLLM's names as well.", rich_help_panel=_WATCH),
    ] = True,
    otlp_endpoint: Annotated[
        str,
        typer.Option(
            help="Send traces there, e.g. http://localhost:4318 (needs the extra otel).",
            rich_help_panel=_WATCH,
        ),
    ] = "",
    data_dir: Annotated[
        str,
        typer.Option(
            help="Folder of files and batches; without one they end with the server.",
            rich_help_panel=_FILES,
        ),
    ] = "",
    max_file_mb: Annotated[
        int, typer.Option(help="Larger uploaded files get 413.", rich_help_panel=_FILES)
    ] = 512,
    batch_concurrency: Annotated[
        int,
        typer.Option(
            help="Lines of batches in the engine at once; 0 fits its size.", rich_help_panel=_FILES
        ),
    ] = 0,
    stored_responses: Annotated[
        int,
        typer.Option(
            help="Answers kept for previous_response_id; 0 keeps none.", rich_help_panel=_FILES
        ),
    ] = 10_000,
    stored_response_mb: Annotated[
        int, typer.Option(help="How large all of them may be.", rich_help_panel=_FILES)
    ] = 256,
    stored_response_seconds: Annotated[
        int, typer.Option(help="How long after its last use one is kept.", rich_help_panel=_FILES)
    ] = 24 * 3600,
    tool_parser: Annotated[
        str,
        typer.Option(
            help="Format of the model's function calls: auto, hermes, llama3_json, mistral, "
            "mistral_named, pythonic or qwen3_coder.",
            rich_help_panel=_FORMATS,
        ),
    ] = "auto",
    reasoning_parser: Annotated[
        str,
        typer.Option(
            help="Markers around its reasoning: auto, none, think or mistral.",
            rich_help_panel=_FORMATS,
        ),
    ] = "auto",
    max_sequences: Annotated[
        int,
        typer.Option(
            help="Sequences that run at once; 0 is the device's default.", rich_help_panel="Engine"
        ),
    ] = 0,
    no_overlap: Annotated[
        bool,
        typer.Option(
            "--no-overlap",
            help="Plan each step after the one before it, on CUDA too; no bit moves.",
            rich_help_panel="Engine",
        ),
    ] = False,
    hang_seconds: Annotated[
        int,
        typer.Option(
            min=0,
            help="An engine that says nothing for so long is killed and started again; longer "
            "than any step; 0 is never.",
            rich_help_panel="Engine",
        ),
    ] = 600,
    branch: options.BranchFolders = None,
    branch_root: Annotated[
        str,
        typer.Option(
            help="Folder inside which /admin/branches may load; by default the current one and "
            "those that hold the folders of --branch.",
            rich_help_panel="Branches",
        ),
    ] = "",
    branch_depth: options.BranchDepth = "full",
    keep_activations: options.KeepActivations = False,
    keep_tails: options.KeepTails = False,
    *,
    engine: EngineSettings,
) -> None:
    """Serve a model over HTTP, as OpenAI's clients expect it."""
    options.require_server()
    from lockstep.async_llm import AsyncLLM
    from lockstep.config import ServerConfig

    engine["max_queue"] = max_queue
    engine["max_sequences"] = max_sequences
    if no_overlap:
        engine["overlap"] = False
    engine["branches"] = options.branch_folders(branch)
    depth: Any = branch_depth  # checked there, as the next
    engine["branch_depth"] = depth
    engine["keep_activations"] = keep_activations
    engine["keep_tails"] = keep_tails
    style: Any = log_format
    server = ServerConfig(
        host=host,
        port=port,
        served_name=served_name,
        keep_alive_seconds=keep_alive_seconds,
        stall_seconds=stall_seconds,
        max_body_bytes=max_body_mb * 1024 * 1024,
        max_prompt_tokens=max_prompt_tokens,
        max_output_tokens=max_output_tokens,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_concurrent=max_concurrent,
        keys_file=keys_file,
        api_keys=_keys("LOCKSTEP_API_KEYS"),
        admin_keys=_keys("LOCKSTEP_ADMIN_KEYS"),
        isolate_keys=isolate_keys,
        open_metrics=open_metrics,
        cors_origins=tuple(cors_origin or ()),
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_key_password=os.environ.pop("LOCKSTEP_TLS_KEY_PASSWORD", ""),
        tls_client_ca=tls_client_ca,
        trusted_proxies=tuple(trusted_proxy),
        log_format=style,
        log_prompts=log_prompts,
        access_log=access_log,
        vllm_metric_names=vllm_metric_names,
        otlp_endpoint=otlp_endpoint,
        drain_seconds=drain_seconds,
        data_dir=data_dir,
        max_file_bytes=max_file_mb * 1024 * 1024,
        branch_root=branch_root,
        batch_concurrency=batch_concurrency,
        stored_responses=stored_responses,
        stored_response_bytes=stored_response_mb * 1024 * 1024,
        stored_response_seconds=stored_response_seconds,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
    )
    llm = AsyncLLM(model, hang_seconds=hang_seconds, **engine)
    if asyncio.run(_serve(llm, server)):
        raise typer.Exit(FORCED)


def _keys(variable: str) -> tuple[str, ...]:
    """Keys from the environment, and out of it: child processes need none."""
    return tuple(key for part in os.environ.pop(variable, "").split(",") if (key := part.strip()))


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


async def _serve(llm: AsyncLLM, config: ServerConfig) -> bool:
    """Until a signal; true if a second one did not let it finish."""
    from rich.console import Console

    from lockstep import logs
    from lockstep.progress import progress_bar, wanted
    from lockstep.server.connections import raise_file_limit
    from lockstep.server.serve import base_url, listen, make_server

    raise_file_limit()
    notes = Console(stderr=True, highlight=False)
    logs.configure(config.log_format)
    server = make_server(llm, config)
    listener = listen(config)
    # Listening at once: until the engine is ready, clients get 503 with Retry-After.
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        shown = wanted(None) and config.log_format == "console"
        with progress_bar(shown, "loading", 1.0) as advance:
            starting = asyncio.create_task(llm.start(lambda stage, done: advance(done, stage)))
            await asyncio.wait({starting, serving}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            info = starting.result()
            name = config.served_name or llm.client.config.model.name
            where = base_url(listener, config)
            facts = (
                f"{info.dtype} on {info.device}, context {info.max_context}, "
                f"cache {info.pool_tokens} tokens, weights {_mib(info.weight_bytes)}"
                + "".join(
                    f", branch {branch} {_mib(own.weight_bytes)}"
                    for branch, own in llm.branches.items()
                )
                + f", ready in {info.load_seconds:.1f} s"
            )
            if config.log_format == "console":
                notes.print(f"serving [bold]{name}[/bold] at [bold]{where}/v1[/bold] ({facts})")
            else:
                logging.getLogger("lockstep.server").info(
                    "serving %s at %s/v1 (%s)", name, where, facts
                )
        else:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        await serving
    finally:
        server.should_exit = True
        await serving
        await llm.close()
    return server.force_exit
