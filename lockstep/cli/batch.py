"""`lockstep batch`: a file of requests answered without a server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import options
from lockstep.cli.batch_decide import decide

if TYPE_CHECKING:
    from lockstep.async_llm import AsyncLLM
    from lockstep.config import ServerConfig
    from lockstep.server.batches.local import Summary
    from lockstep.settings import EngineSettings

SOME_FAILED = 1

app = typer.Typer(help="Many requests in one file.", no_args_is_help=True)


@app.callback()
def _batch() -> None:
    """Many requests in one file."""


app.command()(decide)


@app.command()
@options.grouped(engine=options.ENGINE)
def run(
    file: Annotated[
        Path, typer.Argument(help="JSON lines of custom_id, method, url and body.", exists=True)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the rows go; must not exist.")],
    model: Annotated[
        str, typer.Option(help="A packaged name (smollm2, gemma3-270m), a path or a hub id.")
    ] = "smollm2",
    endpoint: Annotated[
        str, typer.Option(help="Url of the lines, e.g. /v1/completions; by default the first's.")
    ] = "",
    served_name: Annotated[
        str, typer.Option(help="Model name in the lines' bodies; by default that of --model.")
    ] = "",
    batch_concurrency: Annotated[
        int, typer.Option(help="Lines in the engine at once; 0 fits its size.")
    ] = 0,
    max_body_mb: Annotated[int, typer.Option(help="Larger bodies of lines are refused.")] = 4,
    branch: options.BranchFolders = None,
    *,
    engine: EngineSettings,
) -> None:
    """Answer every line of a file, as a server's batch would.

    Stopped at any moment, the same command goes on where it was.
    Ends with status 1 when rows hold errors.
    """
    options.require_server()
    from rich.console import Console

    from lockstep.async_llm import AsyncLLM
    from lockstep.config import ServerConfig

    engine["branches"] = options.branch_folders(branch)
    config = ServerConfig(
        served_name=served_name,
        batch_concurrency=batch_concurrency,
        max_body_bytes=max_body_mb * 1024 * 1024,
    )
    notes = Console(stderr=True, highlight=False)
    try:
        summary = asyncio.run(_run(AsyncLLM(model, **engine), config, file, out, endpoint))
    except KeyboardInterrupt:
        notes.print("stopped; the same command goes on from here")
        raise typer.Exit(130) from None
    before = f", {summary.resumed} of them from before" if summary.resumed else ""
    notes.print(
        f"{out}: {summary.answered} answers, {summary.failed} errors{before}", soft_wrap=True
    )
    if summary.failed:
        raise typer.Exit(SOME_FAILED)


async def _run(
    llm: AsyncLLM, config: ServerConfig, file: Path, out: Path, endpoint: str
) -> Summary:
    from lockstep.progress import command_progress
    from lockstep.server import create_app
    from lockstep.server.batches.local import answer_file

    app = create_app(llm, config)
    try:
        with command_progress("loading", 1.0) as advance:
            await llm.start(lambda stage, done: advance(done, stage))
        with command_progress("answering", 1.0) as advance:
            return await answer_file(
                app,
                file,
                out,
                endpoint=endpoint,
                progress=lambda done, total: advance(done / total, f"{done} of {total} lines"),
            )
    finally:
        await llm.close()
