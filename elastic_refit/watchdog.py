"""The watchdog that breaks a refit off from inside the process that is stuck in it. It needs nobody's help.

Three rungs. An order from the control channel, ``abort_s`` without a tick, or the hard deadline make it *fire*: it
aborts everything that it was handed, which frees the blocked thread. If the process cannot even run its threads
because something holds the GIL, the native rung dumps every stack and ends the process. And a process that somebody
else means to kill can be asked for its stacks first, by signal.

What must never happen here: a refit that ends well after the watchdog fired; a deadline that waits for another
process; an error of the guarded code replaced by the watchdog's own.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol, Self

from elastic_refit.errors import CommunicatorAborted

__all__ = ["STACK_DUMP_SIGNAL", "Abortable", "Armed", "RefitAbortWatchdog", "register_stack_dump_signal"]

logger = logging.getLogger(__name__)

STACK_DUMP_SIGNAL = signal.SIGRTMIN + 7
"""SIGUSR1 and SIGUSR2 are taken: Ray Tune and torchrun claim the first, Ray's dashboard agent the second."""

_RUNG_SLACK = 0.02
"""Share of ``rung_s`` by which the native rung may come late, so that not every tick pays for re-arming it."""


class Abortable(Protocol):
    """A communicator, or anything else that another thread can break."""

    def abort(self, reason: str) -> None: ...


class Armed:
    """One guarded refit, as its body sees it."""

    def __init__(self, epoch: int, *, abort_s: float, hard_s: float, clock: Callable[[], float], rung: _Rung) -> None:
        self.epoch = epoch
        self.fired: str | None = None
        """Why the watchdog fired, or None."""
        self._abort_s = abort_s
        self._hard_s = hard_s
        self._clock = clock
        self._rung = rung
        self._started = self._ticked = clock()
        self._lock = threading.RLock()
        self._handed_over: list[Abortable] = []
        self._is_over = False

    def hand_over(self, target: Abortable) -> None:
        """Have ``target`` aborted when the watchdog fires; at once if it already has."""
        with self._lock:
            self._handed_over.append(target)
            fired = self.fired
        if fired is not None:
            _abort(target, fired)

    def tick(self) -> None:
        """Say that this rank has made progress. Cheap enough for every chunk."""
        self._ticked = self._clock()
        if self.fired is None:
            self._rung.hold(self._ticked)

    def due_at(self) -> float:
        return min(self._ticked + self._abort_s, self._started + self._hard_s)

    def overdue(self) -> str | None:
        """Which deadline has passed, if any."""
        now = self._clock()
        if now >= self._started + self._hard_s:
            return f"the hard deadline of {self._hard_s:g} s passed"
        if now >= self._ticked + self._abort_s:
            return f"no progress for {self._abort_s:g} s"
        return None

    def fire(self, reason: str) -> None:
        """Abort everything that was handed over; only the first reason counts, and none after the end. Any thread."""
        with self._lock:
            if self.fired is not None or self._is_over:
                return
            self.fired = reason
            targets = tuple(self._handed_over)
        logger.warning("watchdog_fired", extra={"epoch": self.epoch, "reason": reason, "targets": len(targets)})
        for target in targets:
            _abort(target, reason)

    def end(self) -> None:
        """The body was left: what has not fired by now must not."""
        with self._lock:
            self._is_over = True


class RefitAbortWatchdog:
    """Guards the refits of one process, one at a time; one daemon thread for all of them, started by the first.

    ``clock`` is monotonic seconds. With a clock of one's own, ``check`` does what the thread would do.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition(threading.RLock())
        self._armed: Armed | None = None
        self._ordered: tuple[int, str] = (-1, "")
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def aborted_through(self) -> int:
        """The highest epoch that was ordered to abort; -1 before any order."""
        return self._ordered[0]

    @contextmanager
    def armed(
        self,
        *,
        epoch: int,
        abort_s: float,
        hard_s: float,
        rung_s: float | None = None,
        dump_path: str | Path | None = None,
    ) -> Iterator[Armed]:
        """Guard the body: one refit of ``epoch``.

        Fires ``abort_s`` after the last tick, ``hard_s`` after the start, or when the epoch is ordered to abort,
        even if the order came first. ``rung_s`` after the last tick the native rung ends the process with every
        stack in ``dump_path`` (default: standard error); it belongs above ``abort_s``.

        Raises:
            CommunicatorAborted: the watchdog fired and the body ended well all the same. Its own errors pass.
            ValueError: the limits are out of order, or another refit is being guarded.
        """
        if not 0 < abort_s <= hard_s or (rung_s is not None and rung_s <= abort_s):
            raise ValueError(f"limits must keep 0 < abort_s={abort_s} <= hard_s={hard_s}, abort_s < rung_s={rung_s}")
        rung = _Rung(rung_s, dump_path)
        armed = Armed(epoch, abort_s=abort_s, hard_s=hard_s, clock=self._clock, rung=rung)
        self._arm(armed)
        try:
            with rung:
                armed.tick()
                yield armed
        finally:
            armed.end()
            self._disarm()
        if armed.fired is not None:
            raise CommunicatorAborted(f"the refit of epoch {epoch} was broken off: {armed.fired}", reason=armed.fired)

    def order_abort(self, epoch: int, reason: str) -> None:
        """Break off every refit of an epoch up to ``epoch``: the one that runs, and any that is armed later."""
        with self._changed:
            if epoch > self._ordered[0]:
                self._ordered = (epoch, reason)
            self._changed.notify()

    def check(self) -> None:
        """Fire if a reason to has come."""
        with self._changed:
            armed, (ordered, why) = self._armed, self._ordered
        if armed is None or armed.fired is not None:
            return
        reason = f"ordered: {why}" if armed.epoch <= ordered else armed.overdue()
        if reason is not None:
            armed.fire(reason)

    def close(self) -> None:
        """End the thread. Nothing can be armed any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _arm(self, armed: Armed) -> None:
        with self._changed:
            if self._armed is not None or self._closed:
                raise ValueError("the watchdog guards one refit at a time, and none after it was closed")
            self._armed = armed
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="refit-abort-watchdog", daemon=True)
                self._thread.start()
            self._changed.notify()
        self.check()

    def _disarm(self) -> None:
        with self._changed:
            self._armed = None

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                self._changed.wait(self._patience_s())
            self.check()

    def _patience_s(self) -> float | None:
        """How long nothing can become due by time alone."""
        armed = self._armed
        if armed is None or armed.fired is not None:
            return None
        if armed.epoch <= self._ordered[0]:
            return 0.0
        return max(0.0, armed.due_at() - self._clock())


class _Rung:
    """The last rung: ``faulthandler``'s native timer. There is one per process; it needs neither thread nor GIL."""

    def __init__(self, rung_s: float | None, dump_path: str | Path | None) -> None:
        self._rung_s = rung_s
        self._path = None if rung_s is None or dump_path is None else Path(dump_path)
        self._file: IO[bytes] | None = None
        self._held_at = float("-inf")

    def __enter__(self) -> Self:
        if self._path is not None:
            self._file = self._path.open("ab")
        return self

    def hold(self, now: float) -> None:
        """Start the timer anew."""
        if self._rung_s is None or now - self._held_at < self._rung_s * _RUNG_SLACK:
            return
        self._held_at = now
        limit_s = self._rung_s * (1 + _RUNG_SLACK)
        if self._file is None:
            faulthandler.dump_traceback_later(limit_s, exit=True)
        else:
            faulthandler.dump_traceback_later(limit_s, exit=True, file=self._file)

    def __exit__(self, *_: object) -> None:
        if self._rung_s is not None:
            faulthandler.cancel_dump_traceback_later()
        if self._file is not None and self._path is not None:
            is_empty = self._file.tell() == 0
            self._file.close()
            if is_empty:
                self._path.unlink(missing_ok=True)


def register_stack_dump_signal(path: str | Path) -> int:
    """Append every thread's stack to ``path`` whenever this process gets the signal that is returned.

    Works while the GIL is held and while every thread is blocked. Call it once; the file stays open for the life of
    the process. A process that has not registered is ended by the signal.
    """
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    faulthandler.register(STACK_DUMP_SIGNAL, file=fd, all_threads=True, chain=False)
    return STACK_DUMP_SIGNAL


def _abort(target: Abortable, reason: str) -> None:
    try:
        target.abort(reason)
    except Exception as error:  # noqa: BLE001 - one target that cannot be aborted must not save the others
        logger.error("abort_failed", extra={"target": type(target).__name__, "error": repr(error)})
