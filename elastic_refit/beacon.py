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
        self._clock = clock
        self._ticked = clock()

    def tick(self) -> None:
        self._ticked = self._clock()

    def enter(self, phase: str, *, waiting_on: WaitingOn = "none") -> None:
        """Say what the rank does from here on; entering a phase is progress."""
        self.phase, self._waiting = phase, waiting_on
        self.tick()

    def beacon(self) -> Beacon:
        """The present cursors; ``tick_age_s`` counts from the last progress."""
        waiting, peer = self._waiting, None
        if self.communicator is not None and self.phase in {"joining", "in_collective"}:
            waiting, peer = self.communicator.waiting_on
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
