"""`lockstep serve`: the HTTP server."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import options

if TYPE_CHECKING:
    from lockstep.async_llm import AsyncLLM
    from lockstep.config import ServerConfig


def serve(
    model: options.ModelName = "smollm2",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    served_name: Annotated[
        str, typer.Option(help="Model name that clients use; by default MODEL.")
    ] = "",
    max_queue: Annotated[
        int, typer.Option(help="Waiting requests beyond which clients get 429; 0 is no limit.")
    ] = 0,
    max_sequences: Annotated[
        int, typer.Option(help="Sequences that run at once; 0 is the device's default.")
    ] = 0,
    max_body_mb: Annotated[int, typer.Option(help="Larger request bodies get 413.")] = 4,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    backend: options.BackendName = "auto",
    threads: options.Threads = 0,
    max_context: options.MaxContext = 0,
    cache_mb: options.CacheMegabytes = 0,
) -> None:
    """Serve a model over HTTP, as OpenAI's clients expect it."""
    try:
        import lockstep.server  # noqa: F401
    except ModuleNotFoundError as error:
        raise typer.BadParameter(
            f"{error.name} is not installed: pip install lockstep[server]"
        ) from None
    from lockstep.async_llm import AsyncLLM
    from lockstep.config import ServerConfig

    settings = options.engine_settings(
        dtype=dtype,
        device=device,
        backend=backend,
        threads=threads,
        max_context=max_context,
        cache_mb=cache_mb,
    )
    settings["max_queue"] = max_queue
    settings["max_sequences"] = max_sequences
    config = ServerConfig(
        host=host, port=port, served_name=served_name, max_body_bytes=max_body_mb * 1024 * 1024
    )
    llm = AsyncLLM(model, **settings)
    asyncio.run(_serve(llm, config))


async def _serve(llm: AsyncLLM, config: ServerConfig) -> None:
    from rich.console import Console

    from lockstep.progress import progress_bar, wanted
    from lockstep.server.serve import base_url, listen, make_server

    notes = Console(stderr=True, highlight=False)
    listener = listen(config)
    server = make_server(llm, config)
    # uvicorn raises the signal that stopped it once more; by then it has been heeded.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, frame: None)
    # Listening at once: until the engine is ready, clients get 503 with Retry-After.
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        with progress_bar(wanted(None), "loading", 1.0) as advance:
            starting = asyncio.create_task(llm.start(lambda stage, done: advance(done, stage)))
            await asyncio.wait({starting, serving}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            info = starting.result()
            name = config.served_name or llm.client.config.model.name
            notes.print(
                f"serving [bold]{name}[/bold] at [bold]{base_url(listener)}/v1[/bold] "
                f"({info.dtype} on {info.device}, context {info.max_context}, "
                f"cache {info.pool_tokens} tokens, ready in {info.load_seconds:.1f} s)"
            )
        else:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        await serving
    finally:
        server.should_exit = True
        await serving
        await llm.close()
