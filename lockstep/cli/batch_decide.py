"""`lockstep batch decide`: decide about every row of a file, and write where it says so."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options

if TYPE_CHECKING:
    from lockstep.async_llm import AsyncLLM
    from lockstep.decide_rows import Rows, Summary, Totals
    from lockstep.decisions.asking import GateArguments
    from lockstep.settings import EngineSettings
    from lockstep.types import SamplingParams

SOME_FAILED = 1
_SOURCE = "Decision"
_ROWS = "Rows"


@options.grouped(
    sampling=options.SAMPLING.defaults(max_tokens=128, temperature=0.0, seed=0),
    engine=options.ENGINE,
)
def decide(
    file: Annotated[
        Path,
        typer.Argument(
            help="JSON lines with text or messages, and an optional id.",
            exists=True,
            dir_okay=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the rows go; must not exist.")],
    model: Annotated[
        str, typer.Option(help="A packaged name (smollm2, gemma3-270m), a path or a hub id.")
    ] = "smollm2",
    continue_if: Annotated[
        list[str] | None,
        typer.Option(
            help="Write if this option wins; may be repeated, or a,b.", rich_help_panel=_SOURCE
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(help="The reply's beginning; an option follows.", rich_help_panel=_SOURCE),
    ] = None,
    choices: Annotated[
        str,
        typer.Option(
            "--options", help="What may follow: a,b or a JSON list.", rich_help_panel=_SOURCE
        ),
    ] = "",
    branch: Annotated[
        str,
        typer.Option(help="NAME=FOLDER of a trained branch that decides.", rich_help_panel=_SOURCE),
    ] = "",
    question: Annotated[
        str,
        typer.Option(
            help="A question to the model, or to a branch that answers any.",
            rich_help_panel=_SOURCE,
        ),
    ] = "",
    threshold: Annotated[
        list[str] | None,
        typer.Option(
            help="OPTION=P: it wins from this probability on; may be repeated.",
            rich_help_panel=_SOURCE,
        ),
    ] = None,
    gate_file: Annotated[
        Path | None,
        typer.Option(
            "--gate",
            help="A file with a request's gate as JSON, in place of the options above.",
            exists=True,
            dir_okay=False,
            rich_help_panel=_SOURCE,
        ),
    ] = None,
    template: Annotated[
        str,
        typer.Option(help="The prompt; {name} is the row's field.", rich_help_panel=_ROWS),
    ] = "{text}",
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="The prompt is a user's message to the assistant.", rich_help_panel=_ROWS
        ),
    ] = False,
    system: Annotated[
        str, typer.Option(help="System message; implies --chat.", rich_help_panel=_ROWS)
    ] = "",
    concurrency: Annotated[
        int,
        typer.Option(
            min=0, help="Rows in the engine at once; 0 fits its size.", rich_help_panel=_ROWS
        ),
    ] = 0,
    *,
    sampling: dict[str, Any],
    engine: EngineSettings,
) -> None:
    """Decide about every row, then write where the decision is to continue. One prefill a row.

    The decision comes from what follows a forced --prefix, from a --question,
    or from a --branch; --gate says the same as a request to a server would.
    Rows of the output stand in the input's order.
    Stopped at any moment, the same command goes on where it was.
    Ends with status 1 when rows hold errors.
    """
    from rich.console import Console

    from lockstep.async_llm import AsyncLLM
    from lockstep.decide_rows import Rows, check_output
    from lockstep.decisions import GateSpec
    from lockstep.types import SamplingParams

    folders = options.branch_folders([branch] if branch else None)
    name = next(iter(folders), "")
    if gate_file is None:
        gate = _gate(continue_if, prefix, choices, question, threshold)
        if name:
            gate["branch"] = name
    elif continue_if or prefix is not None or choices or question or threshold:
        raise typer.BadParameter("it says all that is to be decided", param_hint="--gate")
    else:
        gate = _gate_of(gate_file)
    GateSpec(**gate)  # refused before a model is loaded, and so are templates and outputs
    rows = Rows(file, template, chat, system)
    check_output(out)
    engine["branches"] = folders
    notes = Console(stderr=True, highlight=False)
    begin = time.monotonic()
    try:
        llm = AsyncLLM(model, **engine)
        summary = asyncio.run(_run(llm, rows, out, gate, SamplingParams(**sampling), concurrency))
    except KeyboardInterrupt:
        notes.print("stopped; the same command goes on from here")
        raise typer.Exit(130) from None
    for line in _told(out, summary, time.monotonic() - begin):
        notes.print(line, soft_wrap=True, markup=False)
    if summary.totals.failed:
        raise typer.Exit(SOME_FAILED)


def _gate(
    continue_if: list[str] | None,
    prefix: str | None,
    choices: str,
    question: str,
    threshold: list[str] | None,
) -> GateArguments:
    """The gate that the options describe, but for its branch."""
    from lockstep.decisions import Choice, Predicate

    names = _names("--options", choices) if choices else []
    wins = [name for given in continue_if or () for name in _names("--continue-if", given)]
    gate: GateArguments = {"continue_if": wins, "prefix": prefix}
    if question:
        gate["question"] = Choice(question, names) if names else Predicate(question)
    else:
        gate["options"] = names
    limits = {}
    for one in threshold or ():
        option, _, value = one.rpartition("=")
        try:
            limits[option] = float(value)
        except ValueError:
            raise typer.BadParameter(
                f"must be OPTION=PROBABILITY, got {one!r}", param_hint="--threshold"
            ) from None
    gate["threshold"] = limits
    return gate


def _gate_of(file: Path) -> GateArguments:
    """The gate of a request's body."""
    options.require_server()
    from pydantic import ValidationError

    from lockstep.server.protocol.gate import GateBody

    try:
        spec = GateBody.model_validate_json(file.read_bytes()).spec()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise typer.BadParameter(f"{file}: {where}: {first['msg']}", param_hint="--gate") from None
    return {
        "continue_if": spec.continue_if,
        "question": spec.question,
        "branch": spec.branch,
        "prefix": spec.prefix,
        "options": spec.options,
        "threshold": spec.threshold,
    }


def _names(option: str, given: str) -> list[str]:
    """a,b or a JSON list of texts."""
    if not given.lstrip().startswith("["):
        return [name for part in given.split(",") if (name := part.strip())]
    try:
        found = json.loads(given)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"not a JSON list: {error}", param_hint=option) from None
    if not all(isinstance(name, str) for name in found):
        raise typer.BadParameter("must be a list of strings", param_hint=option)
    return list(found)


async def _run(
    llm: AsyncLLM,
    rows: Rows,
    out: Path,
    gate: GateArguments,
    params: SamplingParams,
    concurrency: int,
) -> Summary:
    from lockstep.decide_rows import Run, decide_file
    from lockstep.decide_rows.model import Decider
    from lockstep.places import Places
    from lockstep.progress import command_progress

    try:
        with command_progress("loading", 1.0) as advance:
            await llm.start(lambda stage, done: advance(done, stage))
        decider = Decider(llm, gate, params)
        decider.check()
        limits = llm.client.config.scheduler.resolved(llm.info.device)
        run = Run(
            rows=rows,
            out=out,
            identity=_identity(llm, rows, gate, params),
            decide=decider,
            ready=decider.ready,
            places=Places(concurrency or limits.max_sequences),
        )
        begin = time.monotonic()
        before = [-1]

        def shown(part: float, totals: Totals) -> None:
            if before[0] < 0:
                before[0] = totals.rows
            rate = (totals.rows - before[0]) / max(1e-9, time.monotonic() - begin)
            advance(part, f"{totals.rows} rows, {rate:.1f} a second, {totals.wrote} written")

        with command_progress("deciding", 1.0) as advance:
            return await decide_file(run, shown)
    finally:
        await llm.close()


def _identity(llm: AsyncLLM, rows: Rows, gate: GateArguments, params: SamplingParams) -> str:
    """What the answers depend on, beside the rows."""
    parts: dict[str, Any] = {
        "model": llm.info.fingerprint,
        "max_context": llm.client.config.scheduler.max_context,
        "prompt": [rows.template, rows.chat, rows.system],
        "gate": {**gate, "question": repr(gate.get("question"))},
        "branches": {name: branch.key for name, branch in llm.branches.items()},
        "params": asdict(params),
    }
    return json.dumps(parts, sort_keys=True)


def _told(out: Path, summary: Summary, seconds: float) -> list[str]:
    """The summary, as lines for a reader."""
    totals = summary.totals
    decisions = ", ".join(f"{name} {count}" for name, count in totals.decisions.most_common())
    lines = [f"{out}: {totals.rows} rows: {decisions or 'no decision'}"]
    if totals.failed:
        codes = ", ".join(f"{code} {count}" for code, count in totals.failed.most_common())
        lines.append(f"{totals.failed.total()} errors: {codes}")
    new = totals.rows - summary.resumed
    lines.append(
        f"{totals.wrote} texts of {totals.completion_tokens} tokens; {totals.prompt_tokens} tokens "
        "of prompts and questions"
    )
    before = f", {summary.resumed} from before" if summary.resumed else ""
    lines.append(
        f"{new} rows in {seconds:.1f} s, loading included; {summary.cached_tokens} tokens came "
        f"from the prefix cache{before}"
    )
    return lines
