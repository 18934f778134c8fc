"""`lockstep branch`: train a decision branch, measure it, look at it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.branch import Branch
    from lockstep.branches.build import Plan, Trunk
    from lockstep.branches.data import Dataset
    from lockstep.branches.evaluate import Report
    from lockstep.branches.sweep import Point

app = typer.Typer(help="Decision branches: train, measure, show.", no_args_is_help=True)

BranchFolder = Annotated[Path, typer.Argument(help="A branch's folder.", metavar="BRANCH")]
_TRAINING = "Training"
_AIM = "Thresholds"


@app.command()
def train(
    data: Annotated[Path, typer.Option(help="JSON lines of rows, see docs/branches.md.")],
    fork: Annotated[int, typer.Option(help="The layer at whose entrance the branch leaves.")],
    exit: Annotated[int, typer.Option(help="The layer before which it ends.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The branch's folder; needed to write one.")
    ] = None,
    base: Annotated[
        str, typer.Option(help="A packaged name (smollm2, gemma3-270m), a path or a hub id.")
    ] = "smollm2",
    head: Annotated[str, typer.Option(help="options, codes or value.")] = "options",
    option: Annotated[
        list[str] | None,
        typer.Option("--options", help="Comma-separated, in the order of thresholds."),
    ] = None,
    adapt: Annotated[
        str, typer.Option(help="Rows that adapters touch: suffix (the question's) or context.")
    ] = "suffix",
    suffix: Annotated[
        str, typer.Option(help="Text behind the context; by default as the template asks.")
    ] = "",
    instructions: Annotated[str, typer.Option(help="What is decided, in words.")] = "",
    calibrate: Annotated[
        Path | None, typer.Option(help="Rows to calibrate on, in place of a share of --data.")
    ] = None,
    share: Annotated[float, typer.Option(help="That share of --data.")] = 0.15,
    targets: Annotated[
        str, typer.Option(help="Linears with adapters, comma-separated.", rich_help_panel=_TRAINING)
    ] = "",
    rank: Annotated[int, typer.Option(help="Of the adapters.", rich_help_panel=_TRAINING)] = 16,
    scale: Annotated[
        float, typer.Option(help="Of the adapters; best a power of 2.", rich_help_panel=_TRAINING)
    ] = 2.0,
    epochs: Annotated[int, typer.Option(rich_help_panel=_TRAINING)] = 4,
    batch: Annotated[int, typer.Option(help="Rows a step.", rich_help_panel=_TRAINING)] = 32,
    learning_rate: Annotated[
        float, typer.Option(help="Of the adapters, at its highest.", rich_help_panel=_TRAINING)
    ] = 1e-3,
    head_rate: Annotated[
        float, typer.Option(help="The same of norm and head.", rich_help_panel=_TRAINING)
    ] = 2e-3,
    seed: Annotated[
        int, typer.Option(help="The same seed, the same branch.", rich_help_panel=_TRAINING)
    ] = 0,
    target_precision: Annotated[
        list[str] | None,
        typer.Option(help="answer=0.95: thresholds that reach it.", rich_help_panel=_AIM),
    ] = None,
    cost: Annotated[
        list[str] | None,
        typer.Option(
            help="search:answer=5: answering where search is right costs 5; others 1.",
            rich_help_panel=_AIM,
        ),
    ] = None,
    sweep_exit: Annotated[
        bool, typer.Option("--sweep-exit", help="Show accuracy against the exit layer first.")
    ] = False,
    exits: Annotated[str, typer.Option(help="Exits of the sweep, comma-separated.")] = "",
    check: Annotated[
        bool, typer.Option(help="Serve the branch at the end and count flipped decisions.")
    ] = True,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    backend: options.BackendName = "auto",
    threads: options.Threads = 0,
    max_context: options.MaxContext = 0,
    cache_mb: options.CacheMegabytes = 0,
) -> None:
    """Train a branch on labelled rows and write its folder.

    The trunk's rows are computed once and kept in the cache between runs.
    Temperature and thresholds are chosen on rows that were not trained on.
    """
    from rich.console import Console

    from lockstep.branch import TARGETS, BranchError, write_branch
    from lockstep.branches.build import Aim, Plan, Trunk, build
    from lockstep.branches.data import read_rows
    from lockstep.branches.package import check_folder
    from lockstep.branches.train import Recipe
    from lockstep.progress import command_progress
    from lockstep.settings import engine_config

    if out is None and not sweep_exit:
        raise BranchError("name the branch's folder with --out")
    if out is not None:
        check_folder(out)
    for name, value, known in (
        ("head", head, ("options", "codes", "value")),
        ("adapt", adapt, ("suffix", "context")),
    ):
        if value not in known:
            raise BranchError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    kind: Any = head
    rows: Any = adapt
    names = [part.strip() for text in option or () for part in text.split(",") if part.strip()]
    dataset = read_rows(data, kind, names)
    held = None if calibrate is None else read_rows(calibrate, kind, _fixed(dataset))
    recipe = Recipe(
        fork=fork,
        exit=exit,
        head=kind,
        options=dataset.options,
        adapt=rows,
        targets=tuple(part.strip() for part in targets.split(",") if part.strip()) or TARGETS,
        rank=rank,
        scale=scale,
        epochs=epochs,
        batch=batch,
        learning_rate=learning_rate,
        head_rate=head_rate,
        seed=seed,
    )
    aim = Aim(tuple(target_precision or ()), tuple(cost or ()))
    plan = Plan(recipe, suffix, instructions, aim, share, threads)
    settings = options.engine_settings(
        dtype=dtype,
        device=device,
        backend=backend,
        threads=threads,
        max_context=max_context,
        cache_mb=cache_mb,
    )
    console = Console(highlight=False)
    with command_progress("loading", 1.0) as advance:
        trunk = Trunk(engine_config(base, **settings), lambda stage, done: advance(done, stage))
        if sweep_exit:
            _sweep(console, trunk, dataset, held, plan, exits, out, advance)
        if out is None:
            return
        built = build(
            trunk,
            dataset,
            plan,
            out,
            calibration=held,
            progress=lambda stage, done: advance(done, stage),
        )
        del trunk  # the served copy needs its memory
    branch = built.branch
    console.print(f"{out}: layers {fork} to {exit} of {branch.base_name}", soft_wrap=True)
    if check:
        from dataclasses import replace

        from lockstep.branches.evaluate import check_served

        with command_progress("serving", 1.0) as advance:
            found = asyncio.run(
                check_served(
                    base,
                    settings,
                    out,
                    branch,
                    built.calibration,
                    built.outputs,
                    progress=lambda stage, done: advance(done, stage),
                )
            )
        branch = replace(branch, calibration={**branch.calibration, "served": found.record()})
        write_branch(branch, out)
    _show_calibration(console, branch)
    _plot_reliability(console, {"calibration rows": branch.calibration}, out / "reliability.png")


def _fixed(data: Dataset) -> tuple[str, ...]:
    """Labels that a second file may have: those of the first."""
    return data.options if data.head == "options" else ()


def _sweep(
    console: Console,
    trunk: Trunk,
    data: Dataset,
    held: Dataset | None,
    plan: Plan,
    exits: str,
    out: Path | None,
    advance: Any,
) -> None:
    from lockstep.branch import BranchError
    from lockstep.branches import plots
    from lockstep.branches.sweep import default_exits, sweep

    depth = plan.recipe.exit - plan.recipe.fork
    try:
        wanted = [int(part) for part in exits.split(",") if part.strip()]
    except ValueError:
        raise BranchError(f"exits must be comma-separated integers, got {exits!r}") from None
    points = sweep(
        trunk,
        data,
        plan,
        wanted or default_exits(trunk.runner.num_layers, depth),
        calibration=held,
        progress=lambda stage, done: advance(done, stage),
    )
    _show_exits(console, points)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        if plots.exits(points, out / "exits.png"):
            console.print(f"{out / 'exits.png'}", soft_wrap=True)


@app.command("eval")
def evaluate(
    branch: BranchFolder,
    data: Annotated[Path, typer.Option(help="JSON lines of rows that were not trained on.")],
    base: Annotated[
        str, typer.Option(help="The model; by default the name that it was trained by.")
    ] = "",
    zero_shot: Annotated[
        bool, typer.Option(help="Ask the trunk's own head too: as many rows again, to its end.")
    ] = True,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write all figures there as well.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Reliability plot; by default in the branch's folder.")
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    backend: options.BackendName = "auto",
    threads: options.Threads = 0,
    max_context: options.MaxContext = 0,
    cache_mb: options.CacheMegabytes = 0,
) -> None:
    """Serve a branch and ask it every row: accuracy, ECE, Brier, each option, each case.

    Beside it a majority, and the trunk's own head asked the same question in words.
    """
    from dataclasses import asdict

    import msgspec
    from rich.console import Console

    from lockstep.branch import read_branch
    from lockstep.branches.data import read_rows
    from lockstep.branches.evaluate import evaluate as run
    from lockstep.progress import command_progress

    described = read_branch(branch)
    names = described.options if described.head == "options" else ()
    rows = read_rows(data, described.head, names)
    settings = options.engine_settings(
        dtype=dtype,
        device=device,
        backend=backend,
        threads=threads,
        max_context=max_context,
        cache_mb=cache_mb,
    )
    with command_progress("loading", 1.0) as advance:
        report = asyncio.run(
            run(
                base or described.base_name,
                settings,
                branch,
                described,
                rows.examples,
                trunk=zero_shot,
                progress=lambda stage, done: advance(done, stage),
            )
        )
    console = Console(highlight=False)
    _show_report(console, described, report)
    series = {"branch": report.branch, "trunk's own head": report.trunk}
    _plot_reliability(console, series, plot or branch / "reliability.png")
    if json_out is not None:
        json_out.write_bytes(msgspec.json.format(msgspec.json.encode(asdict(report))) + b"\n")


@app.command()
def show(branch: BranchFolder) -> None:
    """What a branch is, how it was trained, and how well it is calibrated."""
    from rich.console import Console
    from rich.table import Table

    from lockstep.branch import read_branch

    described = read_branch(branch)
    table = Table(box=None, show_header=False)
    training = described.training
    lines = {
        "base": f"{described.base_name} ({described.base[:16]})",
        "layers": f"{described.fork} to {described.exit}, adapters on the {described.adapt}",
        "adapters": f"rank {described.rank}, scale {described.scale:g}: "
        + ", ".join(described.targets),
        "head": f"{described.head}: {', '.join(described.options)}",
        **({"decides": described.instructions} if described.instructions else {}),
        "suffix": repr(described.suffix),
        "key": described.key,
        "trained on": f"{training.get('rows', '?')} rows of {training.get('data', '?')}, seed "
        f"{training.get('seed', '?')}, {training.get('epochs', '?')} epochs",
    }
    for name, value in lines.items():
        table.add_row(name, value)
    console = Console(highlight=False)
    console.print(table, markup=False)
    _show_calibration(console, described)


# --- tables -----------------------------------------------------------------------


def _show_calibration(console: Console, branch: Branch) -> None:
    """The figures of the rows on which temperature and thresholds were chosen."""
    found = branch.calibration
    if not found:
        return
    if branch.head == "value":
        console.print(_values(found))
        return
    shown = ", ".join(f"{name} from {value:g}" for name, value in branch.thresholds.items())
    console.print(
        f"calibrated on {found['rows']} rows: accuracy {found['accuracy']:.1%}, "
        f"ECE {found['ece']:.3f}, Brier {found['brier']:.3f}, "
        f"temperature {branch.temperature:g}; thresholds: {shown or 'none'}",
        soft_wrap=True,
    )
    _show_options(console, found["options"])
    served = found.get("served")
    if served:
        console.print(
            f"served in {served['dtype']}: {served['flipped']} of {served['rows']} decisions "
            f"other than in training, probabilities differ by up to "
            f"{served['largest_difference']:g}",
            soft_wrap=True,
        )


def _show_options(console: Console, figures: dict[str, dict[str, float]]) -> None:
    from rich.table import Table

    table = Table(box=None)
    for title in ("option", "rows", "chosen", "precision", "recall"):
        table.add_column(title, justify="left" if title == "option" else "right")
    for name, one in figures.items():
        table.add_row(
            name,
            str(one["rows"]),
            str(one["chosen"]),
            f"{one['precision']:.1%}",
            f"{one['recall']:.1%}",
        )
    console.print(table)


def _values(found: dict[str, float]) -> str:
    return (
        f"{found['rows']} rows: mean absolute error {found['mean_absolute_error']:g}, "
        f"root of mean square {found['root_mean_squared_error']:g}, R² {found['r_squared']:g}"
    )


def _show_report(console: Console, branch: Branch, report: Report) -> None:
    from rich.table import Table

    if branch.head == "value":
        console.print(f"branch: {_values(report.branch)}")
        console.print(f"always the mean: {_values(report.majority)}")
        return
    table = Table(box=None)
    for title in ("who decides", "accuracy", "ECE", "Brier"):
        table.add_column(title, justify="left" if title == "who decides" else "right")
    for name, one in (("the branch", report.branch), ("the trunk's own head", report.trunk)):
        if one:
            cells = (f"{one['accuracy']:.1%}", f"{one['ece']:.3f}", f"{one['brier']:.3f}")
            table.add_row(name, *cells)
    always = report.majority
    table.add_row(f"always {always['option']}", f"{always['accuracy']:.1%}", "-", "-")
    console.print(table)
    _show_options(console, report.branch["options"])
    if report.cases:
        table = Table(box=None)
        for title in ("case", "rows", "branch", "trunk"):
            table.add_column(title, justify="left" if title == "case" else "right")
        for case, one in report.cases.items():
            own = f"{one['trunk']:.1%}" if "trunk" in one else "-"
            table.add_row(case, f"{one['rows']:.0f}", f"{one['branch']:.1%}", own)
        console.print(table)


def _show_exits(console: Console, points: list[Point]) -> None:
    from rich.table import Table

    table = Table(box=None)
    for title in ("fork", "exit", "of the layers", "accuracy", "ECE", "Brier"):
        table.add_column(title, justify="right")
    for point in points:
        table.add_row(
            str(point.fork),
            str(point.exit),
            f"{point.share:.0%}",
            f"{point.accuracy:.1%}",
            f"{point.ece:.3f}",
            f"{point.brier:.3f}",
        )
    console.print(table)


def _plot_reliability(console: Console, series: dict[str, dict[str, Any]], file: Path) -> None:
    from lockstep.branches import plots

    bins = {name: one["reliability"] for name, one in series.items() if one.get("reliability")}
    if not bins:
        return
    if plots.reliability(bins, file):
        console.print(f"{file}", soft_wrap=True)
    else:
        console.print(
            "no plot: matplotlib is not installed (pip install '.[branches]')", markup=False
        )
