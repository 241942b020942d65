"""How far this rank is: cursors that the working thread sets and any other thread reads.

What must never happen here: a reader that blocks the working thread, or a cursor that is lost when the work is aborted:
the last values are the evidence.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from elastic_refit.core.evidence import Beacon, WaitingOn

__all__ = ["ProgressRecorder"]


class _Waiting(Protocol):
    @property
    def waiting_on(self) -> tuple[WaitingOn, int | None]: ...


class ProgressRecorder:
    """The cursors of one rank in one epoch. The working thread writes single attributes; any thread may read."""

    def __init__(self, epoch: int = -1, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.epoch = epoch
        self.entered = -2
        self.completed = -2
        self.applied = -1
        self.phase = "preparing"
        self.communicator: _Waiting | None = None
        self._waiting: WaitingOn = "none"
        self._held: tuple[WaitingOn, int | None] | None = None
        self._clock = clock
        self._ticked = clock()

    def tick(self) -> None:
        self._ticked = self._clock()

    def enter(self, phase: str, *, waiting_on: WaitingOn = "none") -> None:
        """Say what the rank does from here on; entering a phase is progress."""
        self.phase, self._waiting, self._held = phase, waiting_on, None
        self.tick()

    def begin_refit(self, applied: int = -1) -> None:
        """A refit begins in the group that is joined: the cursors of the one before it are over."""
        self.entered = self.completed = -1
        self.applied = applied

    def hold(self) -> None:
        """The work is about to be broken off: keep what it waits for and the age of its tick; they are the evidence."""
        if self._held is None:
            self._held = self._waits()
        self.phase = "aborted"

    def beacon(self) -> Beacon:
        """The present cursors; ``tick_age_s`` counts from the last progress."""
        waiting, peer = self._held or self._waits()
        return Beacon(
            epoch=self.epoch,
            entered=self.entered,
            completed=self.completed,
            applied=self.applied,
            waiting_on=waiting,
            waiting_peer=peer,
            phase=self.phase,
            tick_age_s=max(0.0, self._clock() - self._ticked),
        )

    def _waits(self) -> tuple[WaitingOn, int | None]:
        if self.communicator is not None and self.phase in {"joining", "in_collective"}:
            return self.communicator.waiting_on
        return self._waiting, None
