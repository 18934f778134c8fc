"""`lockstep verify`: evidence about deployments, of Lockstep and of other servers."""

from __future__ import annotations

import asyncio
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import options

if TYPE_CHECKING:
    from lockstep.verify.compare import Comparison
    from lockstep.verify.endpoint import Endpoint
    from lockstep.verify.noise import Noise, Plan
    from lockstep.verify.report import Report
    from lockstep.verify.rule import EndpointRule, Rule

NO_VERDICT = 2

app = typer.Typer(help="Prove what a deployment does: this one or another's.", no_args_is_help=True)
ledger_app = typer.Typer(help="The record of past runs.", no_args_is_help=True)
app.add_typer(ledger_app, name="ledger")

LedgerPath = Annotated[
    Path, typer.Option("--ledger", help="The record that this run goes on; it is only added to.")
]
DEFAULT_LEDGER = Path("verify-ledger.jsonl")
ReportPath = Annotated[
    Path | None, typer.Option("--report", help="Write the report there: .md, else HTML.")
]
Wait = Annotated[
    float,
    typer.Option(
        min=0.0, help="Seconds to wait for a server that is still starting; 0 asks at once."
    ),
]
DEFAULT_WAIT = 60.0


@app.callback()
def _verify() -> None:
    """Prove what a deployment does: this one or another's."""


@app.command()
def compare(
    rule: Annotated[Path, typer.Argument(help="A YAML file, see docs/verify.md.")],
    ledger: LedgerPath = DEFAULT_LEDGER,
    report: ReportPath = None,
    wait: Wait = DEFAULT_WAIT,
    print_hash: Annotated[
        bool, typer.Option("--print-hash", help="Only say the rule's hash; ask nothing.")
    ] = False,
) -> None:
    """Do two deployments answer alike, by a rule that was fixed beforehand?

    Ends with status 0 for pass, 1 for fail, 2 where it cannot be decided (or nothing ran).
    """
    require_extra()
    from lockstep.verify.comparison_report import details, figures, report_of
    from lockstep.verify.ledger import Ledger
    from lockstep.verify.ledger_report import summary
    from lockstep.verify.rule import load
    from lockstep.verify.verdict import EXIT

    fixed = load(rule)
    if print_hash:
        typer.echo(fixed.hash)
        return
    a, b = open_endpoint(fixed.a, fixed), open_endpoint(fixed.b, fixed)
    subject = f"{fixed.name}: {a.name} and {b.name}"
    with Ledger(ledger).run("compare", rule=fixed.hash, subject=subject) as run:
        typer.echo(f"rule {fixed.hash}", err=True)
        found = asyncio.run(_compare(fixed, a, b, wait))
        record = run.finish(
            found.verdict.value, figures(found), details(found), reason=found.reason
        )
    show(report_of(found, a.name, b.name), report)
    typer.echo(f"on record in {ledger}: {summary(record)}", err=True)
    raise typer.Exit(EXIT[found.verdict])


async def _compare(rule: Rule, a: Endpoint, b: Endpoint, wait: float) -> Comparison:
    from lockstep.progress import command_progress
    from lockstep.verify.compare import compare as run

    async with a, b:
        await ready(wait, a, b, chat=bool(rule.items[0].request.messages))
        with command_progress("asking", 1.0) as advance:
            return await run(
                rule, a, b, lambda done, of: advance(done / of, f"{done} of {of} answers")
            )


async def ready(seconds: float, *endpoints: Endpoint, chat: bool = True) -> None:
    """Wait for servers that are still starting, and say so.

    Raises:
        EndpointError: one is not there in time.
    """
    from lockstep.verify.readiness import wait_until_ready

    for one in endpoints:
        await wait_until_ready(one, seconds, chat=chat, say=lambda text: typer.echo(text, err=True))


@app.command()
def noise(
    url: Annotated[str, typer.Argument(help="The API's base, e.g. http://localhost:8000/v1.")],
    model: Annotated[str, typer.Option(help="Its name there, where several are served.")] = "",
    api_key_env: Annotated[
        str, typer.Option(help="Environment variable that holds the API key.")
    ] = "",
    requests: Annotated[
        Path | None, typer.Option(help="JSON lines of requests, by default built-in questions.")
    ] = None,
    count: Annotated[int, typer.Option(min=2, help="How many built-in questions.")] = 24,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of their answers.")] = 48,
    completions: Annotated[
        bool, typer.Option("--completions", help="Ask them as plain prompts, without a template.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each condition.")] = 3,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once in a crowd.")] = 16,
    prefills: Annotated[
        int, typer.Option(min=0, help="Clients that send long prompts beside the crowd.")
    ] = 2,
    prefill_words: Annotated[int, typer.Option(min=1, help="Words of a long prompt.")] = 800,
    timeout: Annotated[float, typer.Option(help="Seconds of one answer.")] = 120.0,
    wait: Wait = DEFAULT_WAIT,
    ledger: LedgerPath = DEFAULT_LEDGER,
    report: ReportPath = None,
) -> None:
    """How far does a deployment differ from itself? Exactly zero on Lockstep.

    Ends with status 0 for zero, 1 for any difference, 2 where failures leave it open.
    """
    require_extra()
    import secrets

    from lockstep.verify.endpoint import Endpoint
    from lockstep.verify.ledger import Ledger
    from lockstep.verify.noise import Plan, questions
    from lockstep.verify.noise_report import figures, reason_of, report_of
    from lockstep.verify.rule import Sampling, items_of, read_requests

    if requests is None:
        nonce = secrets.token_hex(4)
        items = questions(nonce, count=count, max_tokens=max_tokens, chat=not completions)
    else:
        items = items_of(read_requests(requests), Sampling(logprobs=1))
    plan = Plan(items, repeats, concurrency, prefills, prefill_words, fresh=requests is None)
    endpoint = Endpoint(
        url, model, key_from(api_key_env), timeout, connections=concurrency + prefills
    )
    with Ledger(ledger).run("noise", rule=plan.hash, subject=endpoint.name) as run:
        found = asyncio.run(_noise(plan, endpoint, wait))
        run.finish(found.verdict, figures(found), reason=reason_of(found))
    show(report_of(found, endpoint.name), report)
    raise typer.Exit({"zero": 0, "noisy": 1}.get(found.verdict, NO_VERDICT))


async def _noise(plan: Plan, endpoint: Endpoint, wait: float) -> Noise:
    from dataclasses import replace

    from lockstep.progress import command_progress
    from lockstep.verify.noise import measure, without_unknown

    async with endpoint:
        await ready(wait, endpoint, chat=bool(plan.items[0].request.messages))
        with command_progress("asking", 1.0) as advance:
            found = await measure(
                await without_unknown(plan, endpoint),
                endpoint,
                lambda done, of: advance(done / of, f"{done} of {of} answers"),
            )
    return replace(found, plan=plan)  # what was fixed beforehand


@app.command("self")
def self_test(
    model: options.ModelName,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    backend: options.BackendName = "auto",
    threads: options.Threads = 0,
    branch: options.BranchFolders = None,
    ledger: LedgerPath = DEFAULT_LEDGER,
    report: ReportPath = None,
) -> None:
    """Does the determinism contract hold here, with this model? Point by point, in minutes.

    With --branch also for decisions and gates of trained branches.
    Ends with status 1 if a point fails.
    """
    require_extra()
    from lockstep.settings import engine_config
    from lockstep.verify.ledger import Ledger
    from lockstep.verify.outcome import Outcome
    from lockstep.verify.selftest import plan_hash, reason_of, report_of, verdict_of
    from lockstep.verify.selftest import self_test as examine

    settings = options.engine_settings(
        dtype=dtype, device=device, backend=backend, threads=threads, max_context=0, cache_mb=0
    )
    folders = options.branch_folders(branch)
    chosen = engine_config(model, **settings).model
    outcomes: list[Outcome] = []
    words = {True: "holds", False: "FAILS", None: "not examined"}
    with Ledger(ledger).run("self", rule=plan_hash(chosen, folders), subject=model) as run:
        for outcome in examine(chosen, folders):
            outcomes.append(outcome)
            typer.echo(f"{words[outcome.passed]}: {outcome.point}", err=True)
        figures = {outcome.point: [outcome.passed, outcome.detail] for outcome in outcomes}
        run.finish(verdict_of(outcomes), figures, reason=reason_of(outcomes))
    show(report_of(outcomes, model, folders), report)
    if verdict_of(outcomes) == "fail":
        raise typer.Exit(1)


@ledger_app.command("check")
def ledger_check(
    path: Annotated[Path, typer.Argument(help="The ledger.")] = DEFAULT_LEDGER,
    head: Annotated[
        str,
        typer.Option(
            help="A hash kept from earlier: that record must still be there. Without one, a "
            "cut-off end or a ledger written anew cannot be seen."
        ),
    ] = "",
) -> None:
    """Was anything in the record edited, deleted, inserted or reordered? Exit status 1 if so."""
    require_extra()
    from lockstep.verify.ledger import check

    checked = check(path, head)
    for problem in checked.problems:
        typer.echo(problem)
    typer.echo(f"{len(checked.records)} records, head {checked.head}")
    if checked.problems:
        raise typer.Exit(1)


@ledger_app.command("show")
def ledger_show(
    path: Annotated[Path, typer.Argument(help="The ledger.")] = DEFAULT_LEDGER,
    report: ReportPath = None,
) -> None:
    """All runs of the record as a table, failed and unfinished ones among them."""
    require_extra()
    from lockstep.verify.ledger import check
    from lockstep.verify.ledger_report import report_of

    show(report_of(path, check(path)), report)


def open_endpoint(rule: EndpointRule, fixed: Rule) -> Endpoint:
    """One of a rule's endpoints.

    Raises:
        typer.BadParameter: its key is not in the environment.
    """
    from lockstep.verify.endpoint import Endpoint

    return Endpoint(
        rule.url,
        rule.model,
        key_from(rule.api_key_env),
        fixed.timeout,
        connections=fixed.concurrency,
        extra=rule.extra,
    )


def key_from(variable: str) -> str:
    """The API key in an environment variable; "" for no variable.

    Raises:
        typer.BadParameter: it is not set.
    """
    if variable and variable not in os.environ:
        raise typer.BadParameter(f"the environment has no variable {variable}")
    return os.environ.get(variable, "") if variable else ""


def show(report: Report, path: Path | None) -> None:
    """Print a report, and write it where a path is given."""
    from lockstep.verify.markdown import write_report
    from lockstep.verify.report import print_report

    print_report(report)
    if path is not None:
        write_report(report, path)
        typer.echo(f"report: {path}", err=True)


def require_extra() -> None:
    """End the command with a hint where what `verify` needs is missing."""
    needed = ("httpx", "jsonschema", "matplotlib", "prometheus_client", "scipy", "yaml")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise typer.BadParameter(
            f"{', '.join(missing)} not installed: pip install '.[verify]' in Lockstep's folder"
        )
