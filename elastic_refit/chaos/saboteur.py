"""Strikes the faults that are armed in one process, when it comes to their phases.

A fault first has its own record kept, by somebody who outlives it, and then strikes: a test that asks for a fault can
tell whether it struck, and where. A process whose run was not started for faults has no saboteur: its refits call
nothing.

What must never happen here: a strike without a record, a signal to a process that is not the one meant.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable

from elastic_refit.chaos.faults import Fault, FaultRecord
from elastic_refit.core.ids import Member, ProcessId
from elastic_refit.processes import signal_processes

__all__ = ["Saboteur"]

_SIGNALS = {
    "kill": signal.SIGKILL,
    "freeze": signal.SIGSTOP,
    "engine_kill": signal.SIGKILL,
    "engine_freeze": signal.SIGSTOP,
    "worker_kill": signal.SIGKILL,
}


class Saboteur:
    """The faults that ``member`` strikes; ``processes`` are all that the member consists of.

    ``keep`` blocks until the record is safe, and raises if it cannot be: then the fault does not strike. Any thread may
    arm and disarm; faults strike on the thread that comes to their phase.
    """

    def __init__(
        self, member: Member, keep: Callable[[FaultRecord], None], *, processes: Iterable[ProcessId] = ()
    ) -> None:
        self._member = member
        self._keep = keep
        self._processes = tuple(processes)
        self._lock = threading.Lock()
        self._armed: tuple[Fault, ...] = ()

    def arm(self, *faults: Fault) -> None:
        """Have these strike too.

        Raises:
            ValueError: it is not this member that strikes it.
        """
        for fault in faults:
            if fault.striker != self._member:
                raise ValueError(f"{fault} is struck by {fault.striker}, not by {self._member}")
        with self._lock:
            self._armed += faults

    def disarm(self) -> None:
        """Nothing that has not struck by now will."""
        with self._lock:
            self._armed = ()

    def reach(self, version: int, phase: str) -> None:
        """The refit of ``version`` has come to ``phase`` in this process; whoever waits for that strikes now."""
        for fault in self._due(version, phase):
            self._keep(FaultRecord(fault, os.getpid(), phase))
            self._signal(fault)

    def _due(self, version: int, phase: str) -> list[Fault]:
        """Those that strike here; one that does not repeat is armed no longer, even if its record cannot be kept."""
        with self._lock:
            due = [fault for fault in self._armed if fault.version == version and _is_there(fault, phase)]
            self._armed = tuple(fault for fault in self._armed if fault.repeats or fault not in due)
        return due

    def _signal(self, fault: Fault) -> None:
        """Others first: whoever is to be ended, or stopped, with them cannot go on to the next."""
        targets = fault.targets or self._processes
        if fault.rank_in_shard is not None and not fault.targets:
            targets = targets[fault.rank_in_shard : fault.rank_in_shard + 1]
        signal_processes(sorted(targets, key=lambda each: each.pid == os.getpid()), _SIGNALS[fault.kind])


def _is_there(fault: Fault, phase: str) -> bool:
    return fault.phase == phase or (fault.repeats and phase.partition(":")[0] == "bucket")
