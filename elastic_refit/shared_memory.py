"""The named shared memory of processes, which outlives them: removed once nobody has it mapped any more.

vLLM's processes make some hundred megabytes of it per engine. Python's resource tracker, which would remove it, dies
with the engine when that is killed as a whole, and it does not know of what vLLM's C++ part has made.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import psutil

from elastic_refit.core.ids import ProcessId

__all__ = ["mapped_by", "mapped_segments", "remove", "remove_abandoned"]

_FOLDER = "/dev/shm/"


def mapped_segments(processes: Iterable[ProcessId]) -> set[str]:
    """The files of shared memory that these processes of this node have mapped and that have a name, by their paths."""
    return mapped_by(process.pid for process in processes)


def mapped_by(pids: Iterable[int]) -> set[str]:
    """As :func:`mapped_segments`; nothing of a process that is gone."""
    names = _names()
    return {names[inode] for pid in pids for inode in _inodes(pid) if inode in names}


def remove_abandoned(segments: set[str]) -> None:
    """Remove those that no process has mapped any more."""
    remove(segments - mapped_by(psutil.pids()) if segments else segments)


def remove(segments: Iterable[str]) -> None:
    """Remove these, as far as they are still there; whoever has one mapped keeps its memory."""
    for segment in segments:
        with contextlib.suppress(OSError):
            os.unlink(segment)


def _names() -> dict[int, str]:
    """The named files by their inodes; none on a node without such a folder."""
    try:
        with os.scandir(_FOLDER) as entries:
            return {entry.inode(): entry.path for entry in entries}
    except FileNotFoundError:
        return {}


def _inodes(pid: int) -> set[int]:
    """Of what it has mapped there (proc(5)). The path would not do: that of a semaphore is a link's that is gone."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {int(line.split(maxsplit=5)[4]) for line in lines if _FOLDER in line}
