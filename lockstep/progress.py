"""Progress, and Ctrl-C around a blocking call."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

LINE_SECONDS = 30.0


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
def command_progress(title: str, total: float) -> Iterator[Callable[[float, str], None]]:
    """Progress of a command's long work: a bar on a terminal, and in a log a line now and then."""
    if sys.stderr.isatty():
        with progress_bar(True, title, total) as advance:
            yield advance
        return
    told = time.monotonic()

    def tell(done: float, description: str) -> None:
        nonlocal told
        if time.monotonic() - told >= LINE_SECONDS:
            told = time.monotonic()
            print(f"{description} ({done / total:.0%})", file=sys.stderr, flush=True)

    yield tell


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
