"""Progress bars and Ctrl-C around a blocking call."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def wanted(progress: bool | None) -> bool:
    """Whether to show a bar: as told, else when standard error is a terminal."""
    return sys.stderr.isatty() if progress is None else progress


@contextmanager
def progress_bar(shown: bool, title: str, total: float) -> Iterator[Callable[[float, str], None]]:
    """A progress bar on standard error; yields a function of (done, description)."""
    if not shown:
        yield lambda done, description: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done, description: bar.update(task, completed=done, description=description)


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Keep Ctrl-C from landing inside a step; yields a check that raises it between steps.

    A second Ctrl-C is not held back. Outside the main thread nothing changes.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous is None:
        yield lambda: None
        return
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous)
