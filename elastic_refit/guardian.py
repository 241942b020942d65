"""Ends what a process has started when that process was killed and cannot do so itself.

Ray's workers outlive the driver that started Ray: one that was just starting waits a minute for its control store, and
one that was adopted by a subreaper (an init of a container, a supervisor, another driver) may wait for ever. So a
process of its own stands by. It holds the other end of a pipe, and what it has to end carries a mark in its
environment, which whatever is started in between inherits and no re-parenting takes away.

What must never happen here: a process ended that does not carry the mark.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from elastic_refit.processes import end_all

__all__ = ["guarded"]

_MARK = "ELASTIC_REFIT_GUARDED"
_ALL_IS_WELL = b"done"
_END_S = 30.0


@contextmanager
def guarded() -> Iterator[None]:
    """If this process dies inside the ``with`` body, so does everything that it has started there."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", __name__, mark]
    # A session of its own: Ctrl-C in a terminal reaches every process of the driver's.
    guardian = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    before = os.environ.get(_MARK)
    os.environ[_MARK] = mark
    try:
        yield
    finally:
        os.environ.pop(_MARK)
        if before is not None:
            os.environ[_MARK] = before
        guardian.communicate(_ALL_IS_WELL)


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark:
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def _stand_by(mark: str) -> None:
    """Return when the guarded process has ended, well or not."""
    if sys.stdin.buffer.read() != _ALL_IS_WELL:
        end_all(lambda: _marked(mark), timeout_s=_END_S)


if __name__ == "__main__":
    _stand_by(sys.argv[1])
