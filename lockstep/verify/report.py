"""Reports for people: one HTML file that needs nothing beside it, or lines on a terminal."""

from __future__ import annotations

import io
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import Environment, FileSystemLoader

from lockstep import __version__

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Tone = Literal["good", "bad", "open", ""]
TONES: Mapping[str, Tone] = {
    "pass": "good",
    "zero": "good",
    "ok": "good",
    "fail": "bad",
    "noisy": "bad",
    "changed": "bad",
    "error": "open",
    "undecidable": "open",
    "unreadable": "open",
}
SHOWN = 120  # characters of a text in a table
_METADATA = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)  # says who drew it
INK, BLUE, RED, GREY = "#1c2430", "#2463a8", "#b02a25", "#8b95a1"


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing in a report."""

    svg: str
    caption: str


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report; `verbatim` are the columns whose blanks matter."""

    title: str
    text: Sequence[str] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    plots: Sequence[Plot] = ()
    verbatim: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found, for people.

    Attributes:
        verdict: one word, "" where there is none to give.
    """

    title: str
    lead: str
    verdict: str
    reason: str
    sections: Sequence[Section]
    footer: str = f"Made by lockstep verify {__version__}."

    @property
    def tone(self) -> Tone:
        """How the verdict is coloured."""
        return TONES.get(self.verdict, "")


def html(report: Report) -> str:
    """The report as one HTML file: styles and drawings inside, no script, every text escaped."""
    # Not PackageLoader: it would import the package's metadata for one file beside this one.
    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    template = Environment(loader=loader, autoescape=True).get_template("report.html")
    return template.render(report=report) + "\n"


def write_html(report: Report, path: Path) -> None:
    """Write the report, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, delete=False, encoding="utf-8", errors="backslashreplace"
    ) as file:
        file.write(html(report))
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def print_report(report: Report) -> None:
    """The report on a terminal, without its drawings."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"[bold]{escape(report.title)}[/bold]\n{escape(report.lead)}")
    for section in report.sections:
        if not section.text and not section.rows:
            continue
        console.print(f"\n[bold]{escape(section.title)}[/bold]")
        for paragraph in section.text:
            console.print(escape(paragraph))
        if section.rows:
            table = Table(box=None, show_header=bool(section.head), padding=(0, 2, 0, 0))
            for name in section.head or [""] * len(section.rows[0]):
                table.add_column(escape(name))
            for row in section.rows:
                table.add_row(*(escape(str(cell)) for cell in row))
            console.print(table)
    if report.verdict:
        colour = {"good": "green", "bad": "red", "open": "yellow"}.get(report.tone, "white")
        word = report.verdict.upper()
        console.print(f"\n[{colour}]{escape(word)}[/{colour}] {escape(report.reason)}")


def shortened(text: str, limit: int = SHOWN) -> str:
    """A text as a table can hold it."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shares_plot(
    names: Sequence[str], shares: Sequence[float], bounds: Sequence[tuple[float, float]]
) -> str:
    """Shares with their intervals, one line each, as SVG."""

    def draw(axes: Axes) -> None:
        places = range(len(names) - 1, -1, -1)
        for place, share, (low, high) in zip(places, shares, bounds, strict=True):
            axes.plot([100 * low, 100 * high], [place, place], color=BLUE, lw=2)
            axes.plot([100 * share], [place], "o", color=BLUE)
        axes.set_yticks(list(places), names)
        axes.set_ylim(-0.6, len(names) - 0.4)
        axes.set_xlim(left=-1)
        axes.set_xlabel("requests that differ, % (line: 95% interval)")

    return _svg(draw, 1.0 + 0.4 * len(names))


def steps_plot(series: Mapping[str, Sequence[float]], label: str, *, log: bool = False) -> str:
    """For each series, how many of its values are at most x, as SVG.

    With `log`, values of 0 stand at the left edge.
    """
    from matplotlib.ticker import MaxNLocator

    colours = (GREY, BLUE, RED, INK)
    positive = [value for values in series.values() for value in values if value > 0]
    floor = min(positive, default=1e-6) / 3

    def draw(axes: Axes) -> None:
        for (name, values), colour in zip(series.items(), colours, strict=False):
            ordered = sorted(max(value, floor) if log else value for value in values)
            counts = range(1, len(ordered) + 1)
            axes.step(ordered, counts, where="post", color=colour, label=name, marker=".")
        if log:
            axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel(label)
        axes.set_ylabel("requests, cumulated")
        axes.legend(frameon=False)

    return _svg(draw, 2.8)


def _svg(draw: Any, height: float) -> str:
    """A drawing without a display, the same bytes for the same drawing."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.hashsalt": "lockstep",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 9,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(6.4, height), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return _METADATA.sub("", text[text.index("<svg") :])
