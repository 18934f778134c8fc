"""A report as Markdown, for mails and issue trackers."""

from __future__ import annotations

from pathlib import Path

from lockstep.verify.report import Report, write_html


def markdown(report: Report) -> str:
    """The report without its drawings; nothing in it is read as markup."""
    lines = [f"# {_text(report.title)}", "", _text(report.lead), ""]
    if report.verdict:
        lines += [f"**{report.verdict.upper()}** {_text(report.reason)}", ""]
    for section in report.sections:
        if not section.text and not section.rows:
            continue
        lines += [f"## {_text(section.title)}", ""]
        for paragraph in section.text:
            lines += [_text(paragraph), ""]
        if section.rows:
            head = section.head or [""] * len(section.rows[0])
            lines += [_row(head), "|" + "---|" * len(head)]
            lines += [*map(_row, section.rows), ""]
    return "\n".join([*lines, _text(report.footer), ""])


def write_report(report: Report, path: Path) -> None:
    """Write Markdown where the path ends in .md, else HTML."""
    if path.suffix.lower() in (".md", ".markdown"):
        path.write_text(markdown(report), encoding="utf-8", errors="backslashreplace")
    else:
        write_html(report, path)


def _row(cells: object) -> str:
    assert isinstance(cells, list | tuple)
    return "| " + " | ".join(_text(str(cell)) for cell in cells) + " |"


def _text(text: str) -> str:
    """Characters that mean something to Markdown or HTML, escaped; line breaks as blanks."""
    escaped = "".join(f"\\{char}" if char in "\\`*_{}[]<>#|~" else char for char in text)
    return " ".join(escaped.split())
