"""Where a process leaves its stacks, and how it is asked for them before it is killed.

One folder for the whole run, on the process' own node; one name per member and occasion, by which an incident finds it.
What must never happen here: a wait of more than a moment for a process that will not answer.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from elastic_refit.core.ids import Member, ProcessId
from elastic_refit.processes import kill_proved, signal_catchers
from elastic_refit.watchdog import STACK_DUMP_SIGNAL

__all__ = ["asked_path", "end_with_stacks", "rung_path", "stacks_of"]

_ANSWER_S = 0.2
_LOOK_S = 0.01


def asked_path(folder: str | Path, member: Member, rank: int = 0) -> Path:
    """Where the process of the member's rank number ``rank`` writes its stacks when it is asked."""
    return Path(folder) / f"stacks-{_of_rank(member, rank)}.txt"


def rung_path(folder: str | Path, member: Member, rank: int = 0) -> Path:
    """Where its native timer writes them when it ends the process."""
    return Path(folder) / f"stacks-{_of_rank(member, rank)}-timeout.txt"


def stacks_of(folder: str | Path, members: Iterable[Member]) -> tuple[str, ...]:
    """The files that hold stacks of these members, of any of their ranks."""
    there = sorted(Path(folder).glob("stacks-*.txt"))
    files = [re.compile(rf"stacks-{re.escape(str(member))}(-\d+)?(-timeout)?\.txt") for member in members]
    return tuple(str(path) for file in files for path in there if file.fullmatch(path.name) and _size(path))


def _of_rank(member: Member, rank: int) -> str:
    return f"{member}-{rank}" if rank else str(member)


def end_with_stacks(processes: Sequence[ProcessId], path: Path, *, timeout_s: float) -> list[ProcessId]:
    """Like ``kill_proved``, but whoever runs and listens is asked first to write its stacks to ``path``."""
    _ask(processes, path)
    return kill_proved(processes, timeout_s=timeout_s)


def _ask(processes: Sequence[ProcessId], path: Path) -> None:
    """Returns when the file has stopped growing, or soon anyway. Who is stopped, or would die of it, is not asked."""
    before = _size(path)
    if not signal_catchers(processes, STACK_DUMP_SIGNAL):
        return
    deadline, last = time.monotonic() + _ANSWER_S, before
    while time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        size = _size(path)
        if size == last > before:
            return
        last = size


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
