"""The death of an engine's own processes, as the kernel tells it: within milliseconds, whatever any call waits for.

What must never happen here: a call that waits for an answer of a process that is gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

import psutil

from elastic_refit.errors import ShardDied
from elastic_refit.processes import end_all

__all__ = ["DeathWatch", "end_processes", "engine_processes"]

T = TypeVar("T")


def engine_processes() -> tuple[int, ...]:
    """Every process that descends from this one, the trackers of ``multiprocessing`` left out: they hold nothing."""
    children = psutil.Process().children(recursive=True)
    return tuple(child.pid for child in children if not _is_tracker(child))


def end_processes(pids: Sequence[int], *, timeout_s: float) -> None:
    """SIGKILL what is left of ``pids``, children of this process or theirs, and wait until it is gone.

    Shared memory that only they had mapped is removed.
    """
    left = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(psutil.Process(pid))
    end_all(lambda: left, timeout_s=timeout_s)


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True


class DeathWatch:
    """Watches ``pids`` on a daemon thread until one of them ends, or until ``close``."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._death: Future[str] = Future()
        self._pids = {os.pidfd_open(pid): pid for pid in pids}
        self._bell = os.eventfd(0, os.EFD_CLOEXEC)
        threading.Thread(target=self._watch, name="engine-death-watch", daemon=True).start()

    @property
    def death(self) -> str | None:
        """Who died, in words, or None."""
        return self._death.result() if self._death.done() and not self._death.cancelled() else None

    def when_dead(self, callback: Callable[[str], None]) -> None:
        """Have ``callback`` called with those words, once, on the watching thread; at once if it has happened."""

        def call(death: Future[str]) -> None:
            if not death.cancelled():
                callback(death.result())

        self._death.add_done_callback(call)

    def race(self, call: Future[T]) -> T:
        """The outcome of ``call``, or ShardDied as soon as a process has died before it came."""
        either: list[Future[Any]] = [call, self._death]
        wait(either, return_when=FIRST_COMPLETED)
        if not call.done():
            why = self._death.result() if not self._death.cancelled() else "the engine is closed"
            raise ShardDied(why)
        return call.result()

    def close(self) -> None:
        """What dies from here on was told to. Idempotent."""
        if not self._death.done():
            self._death.cancel()
        with contextlib.suppress(OSError):
            os.eventfd_write(self._bell, 1)

    def _watch(self) -> None:
        poller = select.poll()
        for fd in (*self._pids, self._bell):
            poller.register(fd, select.POLLIN)
        ended = {fd for fd, _ in poller.poll()}
        dead = sorted(self._pids[fd] for fd in ended - {self._bell})
        if self._death.set_running_or_notify_cancel():
            self._death.set_result(f"process {', '.join(map(str, dead))} of the engine is gone")
        for fd in self._pids:
            os.close(fd)
