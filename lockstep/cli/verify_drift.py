"""`lockstep verify watch`, `provider` and `quality`."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep import __version__
from lockstep.cli import options
from lockstep.cli.verify import (
    DEFAULT_LEDGER,
    DEFAULT_WAIT,
    LedgerPath,
    ReportPath,
    Wait,
    key_from,
    ready,
    require_extra,
    show,
)

if TYPE_CHECKING:
    from lockstep.settings import EngineSettings
    from lockstep.verify.drift.baseline import Baseline
    from lockstep.verify.drift.monitor import Monitor, Status
    from lockstep.verify.drift.passive import PassiveMonitor
    from lockstep.verify.drift.publish import Publisher, Watched
    from lockstep.verify.endpoint import Endpoint
    from lockstep.verify.quality.subject import Subject

EXIT = {"pass": 0, "fail": 1, "undecidable": 2}
EXIT_CODES = {"ok": 0, "changed": 1, "unreadable": 3}

_TELL = "Whom to tell"
Url = Annotated[str, typer.Argument(help="The API's base, e.g. http://localhost:8000/v1.")]
ModelOption = Annotated[str, typer.Option("--model", help="As requests name it; asked if empty.")]
KeyOption = Annotated[
    str, typer.Option("--api-key-env", help="Environment variable that holds the API key.")
]
Timeout = Annotated[float, typer.Option(min=0.001, help="Seconds that one request may take.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests at once.")]


def watch(
    url: Url,
    baseline: Annotated[
        Path, typer.Option(help="The file of a good day; made first where there is none.")
    ] = Path("baseline.json"),
    state: Annotated[
        Path | None, typer.Option(help="What is known so far; by default beside the baseline.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=0, help="Stop after so many; 0 never stops.")] = 0,
    interval: Annotated[float, typer.Option(min=0.0, help="Seconds between rounds.")] = 3600.0,
    confirm: Annotated[
        float, typer.Option(min=0.0, help="Seconds to the next round after a suspicious one.")
    ] = 30.0,
    alpha: Annotated[
        float, typer.Option(help="The chance that an unchanged server ever causes an alarm.")
    ] = 0.01,
    exact: Annotated[
        bool,
        typer.Option(help="Equal requests get equal answers here, so any difference is a change."),
    ] = False,
    baseline_rounds: Annotated[int, typer.Option(min=12, help="Rounds of a new baseline.")] = 64,
    baseline_interval: Annotated[
        float, typer.Option(min=0.0, help="Seconds between its rounds: 1350 spread 64 over a day.")
    ] = 0.0,
    passive: Annotated[
        bool, typer.Option(help="Ask nothing: read the counters at /metrics of the server.")
    ] = False,
    also: Annotated[
        list[str] | None, typer.Option(help="With --passive: a further server; may be repeated.")
    ] = None,
    learn: Annotated[
        int,
        typer.Option(min=1, help="With --passive: events from which a rate learns what is normal."),
    ] = 500,
    model: ModelOption = "",
    api_key_env: KeyOption = "",
    timeout: Timeout = 120.0,
    wait: Wait = DEFAULT_WAIT,
    concurrency: Concurrency = 4,
    replica_header: Annotated[
        str, typer.Option(help="The header of replies that names the replica.")
    ] = "",
    metrics_port: Annotated[
        int, typer.Option(help="Prometheus metrics on this port.", rich_help_panel=_TELL)
    ] = 0,
    textfile: Annotated[
        Path | None,
        typer.Option(help="Prometheus metrics as a text file.", rich_help_panel=_TELL),
    ] = None,
    webhook: Annotated[
        str,
        typer.Option(
            envvar="LOCKSTEP_WATCH_WEBHOOK",
            help="POST a JSON message for what is new.",
            rich_help_panel=_TELL,
        ),
    ] = "",
    ledger: LedgerPath = DEFAULT_LEDGER,
) -> None:
    """Has a server changed since a good day? Asks thirty short questions a round.

    With --rounds it ends with status 0 for ok, 1 for changed, 3 for unreadable.
    """
    require_extra()
    import httpx

    from lockstep.verify.canonical import digest
    from lockstep.verify.drift.monitor import Monitor
    from lockstep.verify.drift.passive import PassiveWatch
    from lockstep.verify.drift.probes import default_probes
    from lockstep.verify.drift.publish import Metrics, Publisher, Webhook
    from lockstep.verify.drift.record import Recorder
    from lockstep.verify.drift.replica import HEADERS, ReplicaTransport
    from lockstep.verify.drift.watch import Watch
    from lockstep.verify.endpoint import Endpoint
    from lockstep.verify.ledger import Ledger

    key = key_from(api_key_env)
    check_urls(url, *(also or []))

    async def run(stack: ExitStack, recorder: Recorder) -> Status:
        async with httpx.AsyncClient(timeout=30.0) as client:
            hook = Webhook(webhook, url, client) if webhook else None

            def publish(monitor: Watched) -> Publisher:
                metrics = Metrics(monitor, time.time)
                if metrics_port:
                    stack.callback(metrics.serve(metrics_port))
                return Publisher(metrics, textfile, hook)

            if passive:
                path = state or Path("passive-state.json")
                counters = _counters(alpha, learn, path)

                def scraped(status: Status, failure: str) -> None:
                    _say_counters(status, counters, failure)
                    recorder.round(status)

                # A client of its own: the webhook must not see the server's key.
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                async with httpx.AsyncClient(headers=headers, timeout=30.0) as scraper:
                    reading = PassiveWatch(
                        [url, *(also or [])],
                        scraper,
                        counters,
                        interval,
                        path,
                        publish(counters),
                        scraped,
                    )
                    return await reading.run(rounds)
            transport = ReplicaTransport(headers=[replica_header] if replica_header else HEADERS)
            async with Endpoint(
                url, model, key, timeout, connections=concurrency, transport=transport
            ) as endpoint:
                known = await _baseline(
                    endpoint, baseline, baseline_rounds, concurrency, baseline_interval, wait
                )
                recorder.baseline(baseline)
                path = state or baseline.with_suffix(".state.json")
                monitor = Monitor(default_probes(), known, alpha=alpha, exact=exact)
                if path.exists():
                    monitor.load(path)

                def told(status: Status, failure: str) -> None:
                    _say(status, monitor, failure)
                    recorder.round(status)

                asking = Watch(
                    endpoint,
                    default_probes(),
                    monitor,
                    interval,
                    confirm,
                    concurrency,
                    path,
                    publish(monitor),
                    told,
                )
                return await asking.run(rounds)

    settings = {"alpha": alpha, "learn": learn} if passive else {"alpha": alpha, "exact": exact}
    rule = digest({"watch": __version__, "passive": passive, **settings})
    subject = " and ".join((url, *(also or [])))
    with ExitStack() as stack, Ledger(ledger).run("watch", rule=rule, subject=subject) as record:
        recorder = Recorder(record)
        try:
            status = asyncio.run(run(stack, recorder))
        except KeyboardInterrupt:
            recorder.finish("stopped by hand")
            raise
        recorder.finish()
    raise typer.Exit(EXIT_CODES[status.state.value])


def check_urls(*urls: str) -> None:
    """Refuse what is no url, or holds a password, before it stands in a record."""
    from lockstep.verify.endpoint import api_base

    for url in urls:
        api_base(url)


async def _baseline(
    endpoint: Endpoint, path: Path, count: int, concurrency: int, pause: float, wait: float
) -> Baseline:
    """The file's, or a new one."""
    from lockstep.progress import command_progress
    from lockstep.verify.drift.baseline import Baseline, take_baseline
    from lockstep.verify.drift.probes import default_probes
    from lockstep.verify.drift.watch import now, rounds

    probes = default_probes()
    if path.exists():
        return Baseline.load(path, probes)
    await ready(wait, endpoint)
    await endpoint.model()  # a server that is not there has no good day
    with command_progress("baseline", 1.0) as advance:
        known = await take_baseline(
            rounds(endpoint, probes, concurrency, pause=pause),
            probes,
            count,
            endpoint.name,
            now(),
            lambda done: advance(done / count, f"baseline, {done} of {count} rounds"),
        )
    known.save(path)
    steady = (
        "no answer differed from round to round, so --exact may be used"
        if known.steady
        else "answers differ from round to round, which is taken as normal"
    )
    typer.echo(f"baseline of {known.source} in {path}: {count * len(probes)} answers; {steady}")
    return known


def _counters(alpha: float, learn: int, path: Path) -> PassiveMonitor:
    from lockstep.verify.drift.passive import PassiveMonitor

    monitor = PassiveMonitor(alpha=alpha, learn=learn)
    if path.exists():
        monitor.load(path)
    return monitor


def _say(status: Status, monitor: Monitor, failure: str) -> None:
    from lockstep.verify.drift.publish import describe
    from lockstep.verify.drift.watch import now
    from lockstep.verify.statistics import percent

    typer.echo(f"{now()} round {status.round}: {describe(status)}")
    if status.changed:
        for name, (share, low, high) in monitor.shares().items():
            typer.echo(
                f"  replica {name}: {percent(share)} of {monitor.replicas[name].readings} answers "
                f"unlike the baseline ({percent(low)} to {percent(high)})"
            )
    stickiness = monitor.routing.stickiness
    if stickiness is not None and stickiness > 0.5:
        typer.echo(f"  routing is sticky ({stickiness:.2f}): probes see only some replicas")
    if failure:
        typer.echo(f"  {failure}", err=True)


def _say_counters(status: Status, monitor: PassiveMonitor, failure: str) -> None:
    from lockstep.verify.drift.publish import describe
    from lockstep.verify.drift.watch import now

    learning = len(monitor.learning)
    more = f"; {learning} of {len(monitor.rates)} rates still learn" if learning else ""
    typer.echo(f"{now()} scrape {status.round}: {describe(status)}{more}")
    if failure:
        typer.echo(f"  {failure}", err=True)


def provider(
    a: Annotated[str, typer.Argument(metavar="A", help="The reference's API base.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The API base in question.")],
    model_a: Annotated[str, typer.Option(help="As A names the model; asked if empty.")] = "",
    model_b: Annotated[str, typer.Option(help="As B names it.")] = "",
    key_a: Annotated[str, typer.Option(help="Environment variable with A's API key.")] = "",
    key_b: Annotated[str, typer.Option(help="Environment variable with B's API key.")] = "",
    alpha: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="The chance that equal providers are called different."
        ),
    ] = 0.01,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Nats; smaller differences are other arithmetic.")
    ] = 0.1,
    longest: Annotated[int, typer.Option(min=1, help="Words of the longest prompt.")] = 4096,
    draws: Annotated[int, typer.Option(min=1, help="Draws of one token from either side.")] = 200,
    timeout: Timeout = 120.0,
    concurrency: Concurrency = 8,
    wait: Wait = DEFAULT_WAIT,
    ledger: LedgerPath = DEFAULT_LEDGER,
    report: ReportPath = None,
) -> None:
    """Is a model at B the model of that name at A? About 1,000 short requests.

    Ends with status 0 for pass, 1 for fail, 2 where it cannot be decided.
    """
    require_extra()
    from lockstep.verify.canonical import digest
    from lockstep.verify.endpoint import Endpoint
    from lockstep.verify.ledger import Ledger
    from lockstep.verify.provider.check import check_provider, report_of
    from lockstep.verify.provider.findings import Finding, overall

    check_urls(a, b)
    settings = {"alpha": alpha, "tolerance": tolerance, "longest": longest, "draws": draws}

    async def run() -> tuple[list[Finding], str, str]:
        async with (
            Endpoint(a, model_a, key_from(key_a), timeout, connections=concurrency) as one,
            Endpoint(b, model_b, key_from(key_b), timeout, connections=concurrency) as other,
        ):
            await ready(wait, one, other)
            await one.model()
            await other.model()
            found = await check_provider(
                one,
                other,
                alpha=alpha,
                tolerance=tolerance,
                longest=longest,
                draws=draws,
                progress=lambda stage: typer.echo(f"{stage} ...", err=True),
            )
            return found, one.name, other.name

    rule = digest({"provider": __version__, **settings})
    with Ledger(ledger).run("provider", rule=rule, subject=f"{a} and {b}") as record:
        findings, name_a, name_b = asyncio.run(run())
        verdict, reason = overall(findings)
        figures = {finding.name: dict(finding.figures) for finding in findings}
        record.finish(verdict.value, figures, reason=reason)
    show(report_of(findings, name_a, name_b), report)
    raise typer.Exit(EXIT[verdict.value])


def quality(
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="A model (name, path or hub id) or an API base.")
    ],
    changed: Annotated[
        str, typer.Argument(metavar="CHANGED", help="The same of the changed model.")
    ],
    tasks: Annotated[Path, typer.Option(help="What is asked and allowed: a YAML file.")],
    model_base: Annotated[str, typer.Option(help="Its name at an API; asked if empty.")] = "",
    model_changed: Annotated[str, typer.Option(help="The same of the changed one.")] = "",
    key_base: Annotated[str, typer.Option(help="Environment variable with an API key.")] = "",
    key_changed: Annotated[str, typer.Option(help="Environment variable with an API key.")] = "",
    timeout: Timeout = 600.0,
    wait: Wait = DEFAULT_WAIT,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    backend: options.BackendName = "auto",
    threads: options.Threads = 0,
    max_context: options.MaxContext = 0,
    cache_mb: options.CacheMegabytes = 0,
    ledger: LedgerPath = DEFAULT_LEDGER,
    report: ReportPath = None,
) -> None:
    """Is a quantised, merged or otherwise changed model as good as its base?

    Ends with status 0 for pass, 1 for fail, 2 where it cannot be decided.
    """
    require_extra()
    from lockstep.verify.ledger import Ledger
    from lockstep.verify.quality.check import Checked, check_quality, report_of
    from lockstep.verify.quality.tasks import load

    asked = load(tasks)
    check_urls(*(name for name in (base, changed) if name.startswith(("http://", "https://"))))
    settings = options.engine_settings(
        dtype=dtype,
        device=device,
        backend=backend,
        threads=threads,
        max_context=max_context,
        cache_mb=cache_mb,
    )

    async def run() -> Checked:
        async with AsyncExitStack() as stack:
            one = await _subject(stack, base, model_base, key_base, timeout, wait, settings)
            other = await _subject(
                stack, changed, model_changed, key_changed, timeout, wait, settings
            )
            return await check_quality(
                one, other, asked, lambda stage: typer.echo(f"{stage} ...", err=True)
            )

    with Ledger(ledger).run("quality", rule=asked.hash, subject=f"{base} and {changed}") as record:
        found = asyncio.run(run())
        verdict, reason = found.verdict
        record.finish(verdict.value, found.figures, reason=reason)
    show(report_of(found, base, changed), report)
    raise typer.Exit(EXIT[verdict.value])


async def _subject(
    stack: AsyncExitStack,
    name: str,
    model: str,
    key: str,
    timeout: float,
    wait: float,
    settings: EngineSettings,
) -> Subject:
    """A url's server, or a model in this process; closed with the stack."""
    from lockstep.verify.quality.subject import HTTPSubject, LocalSubject

    if name.startswith(("http://", "https://")):
        made = HTTPSubject(name, model, key_from(key), timeout)
        subject = await stack.enter_async_context(made)
        await ready(wait, subject.endpoint, chat=False)
        return subject
    from lockstep.llm import LLM

    llm = stack.enter_context(LLM(name, **settings))
    return LocalSubject(llm, name)


def add_to(app: typer.Typer) -> None:
    """Put the commands of this file under `lockstep verify`."""
    for command in (watch, provider, quality):
        app.command()(command)
