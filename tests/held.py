"""What this process holds, so that a test can tell what its own subject has left open.

Files and threads of earlier tests may still be let go meanwhile: what counts is what is new, not how much there is.
"""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["files", "threads"]

_FILES = "/proc/self/fd"


def files() -> set[tuple[str, str]]:
    """Every open descriptor, with what it is of; sockets and pipes have numbers of their own (proc(5))."""
    found = set()
    for descriptor in os.listdir(_FILES):
        with suppress(FileNotFoundError):  # the one that listed this folder
            found.add((descriptor, os.readlink(f"{_FILES}/{descriptor}")))
    return found


def threads() -> set[str]:
    """The kernel's number of every thread, those of other languages too."""
    return set(os.listdir("/proc/self/task"))
