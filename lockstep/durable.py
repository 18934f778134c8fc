"""Output files of long work: one writer each, and names that outlive a loss of power."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from lockstep.types import RequestError


def hold(descriptor: int, path: Path) -> None:
    """Keep every other call away from an open file until it is closed, however that happens.

    Raises:
        RequestError: another call holds it; field "out".
        OSError: it cannot be locked.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EAGAIN:
            raise
        raise RequestError(f"{path} is being written by another call", field="out") from None


def sync_folder(folder: Path) -> None:
    """Make new names in a folder, and renames, outlive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
