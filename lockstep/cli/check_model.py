"""`lockstep check-model`: is a model computed right on this machine?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from lockstep.cli import options

if TYPE_CHECKING:
    from lockstep.runner.check import Outcome

EXIT_FAILED = 1


def check_model(
    model: options.ModelName,
    device: options.Device = "auto",
    backend: options.BackendName = "auto",
    threads: options.Threads = 0,
) -> None:
    """Compare a model with transformers and its bits between schedules; exit status 1 if it fails.

    Without transformers the comparison with it is skipped, and said to be.
    """
    from rich.console import Console
    from rich.markup import escape

    from lockstep.runner.check import check_model as check
    from lockstep.settings import engine_config

    settings = engine_config(
        model,
        **options.engine_settings(
            dtype="auto",
            device=device,
            backend=backend,
            threads=threads,
            max_context=0,
            cache_mb=0,
        ),
    )
    console = Console(highlight=False)
    outcomes: list[Outcome] = []
    for outcome in check(model, settings.model):
        outcomes.append(outcome)
        console.print(f"{_mark(outcome)} {escape(f'{outcome.name}: {outcome.detail}')}")
    failed = sum(outcome.passed is False for outcome in outcomes)
    if failed:
        console.print(f"[red]FAIL[/red]: {failed} of {len(outcomes)} checks failed")
        raise typer.Exit(EXIT_FAILED)
    console.print(f"[green]PASS[/green]: {sum(bool(o.passed) for o in outcomes)} checks passed")


def _mark(outcome: Outcome) -> str:
    if outcome.passed is None:
        return "[yellow]SKIP[/yellow]"
    return "[green]ok[/green]  " if outcome.passed else "[red]FAIL[/red]"
