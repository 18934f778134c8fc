"""`lockstep chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.llm import LLM
    from lockstep.settings import EngineSettings
    from lockstep.types import SamplingParams

HELP = "/reset forgets the conversation, /exit leaves, Ctrl-C stops an answer."


@options.grouped(
    sampling=options.SAMPLING.defaults(max_tokens=1024, temperature=0.7), engine=options.ENGINE
)
def chat(
    model: options.ModelName = "smollm2",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    *,
    sampling: dict[str, Any],
    engine: EngineSettings,
) -> None:
    """Talk with a model; answers stream, earlier turns come from the prefix cache."""
    from rich.console import Console

    from lockstep.llm import LLM
    from lockstep.types import SamplingParams

    notes = Console(stderr=True, highlight=False)
    with LLM(model, **engine) as llm:
        info = llm.info
        notes.print(
            f"[dim]{info.model}, {info.dtype} on {info.device}, ready in "
            f"{info.load_seconds:.1f} s. {HELP}[/dim]"
        )
        _converse(llm, SamplingParams(**sampling), system, notes)


def _converse(llm: LLM, params: SamplingParams, system: str | None, notes: Console) -> None:
    start = [{"role": "system", "content": system}] if system is not None else []
    messages = list(start)
    while True:
        try:
            text = _read_line()
        except EOFError:
            return
        except KeyboardInterrupt:
            notes.print(f"\n[dim]{HELP}[/dim]")
            continue
        match text.strip():
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/reset":
                messages = list(start)
                notes.print("[dim]The conversation is forgotten.[/dim]")
            case "/help":
                notes.print(f"[dim]{HELP}[/dim]")
            case _:
                _answer(llm, params, messages, text, notes)


def _read_line() -> str:
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives `input` line editing and history)

        return input("> ")
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _answer(
    llm: LLM,
    params: SamplingParams,
    messages: list[dict[str, str]],
    text: str,
    notes: Console,
) -> None:
    """Stream one answer and append both turns; a turn that cannot be served is dropped."""
    from lockstep.progress import deferred_interrupt
    from lockstep.types import RequestError

    turn = {"role": "user", "content": text.rstrip("\n")}
    pieces: list[str] = []
    tokens = cached = 0
    started = first = time.monotonic()
    stopped = False
    try:
        stream = llm.stream_chat([*messages, turn], params)
    except RequestError as error:
        notes.print(f"[red]{error}[/red]")
        if error.code == "context_length_exceeded":
            notes.print("[dim]/reset makes room.[/dim]")
        return
    with deferred_interrupt() as check_interrupt:
        try:
            for delta in stream:
                if not tokens:
                    first = time.monotonic()
                tokens += len(delta.token_ids)
                cached = delta.cached_tokens
                pieces.append(delta.text)
                print(delta.text, end="", flush=True)
                check_interrupt()
        except KeyboardInterrupt:
            stopped = True
            stream.close()
    print()
    elapsed = max(time.monotonic() - first, 1e-9)
    notes.print(
        f"[dim]{'stopped, ' if stopped else ''}{tokens} tokens, "
        f"{max(tokens - 1, 0) / elapsed:.1f} tokens/s, first after {first - started:.2f} s, "
        f"{cached} prompt tokens from the cache[/dim]"
    )
    messages += [turn, {"role": "assistant", "content": "".join(pieces)}]
