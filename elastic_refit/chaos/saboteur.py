"""Strikes the faults that are armed in one process, when it comes to their phases.

A fault first has its own record kept, by somebody who outlives it, and then strikes: a test that asks for a fault can
tell whether it struck, and where. A process whose run was not started for faults has no saboteur: its refits call
nothing.

What must never happen here: a strike without a record, a signal to a process that is not the one meant, a hold that
neither ``disarm`` nor the end of the process releases.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

from elastic_refit.chaos.faults import Fault, FaultKind, FaultRecord
from elastic_refit.chaos.interpreter import hold_interpreter
from elastic_refit.chaos.moment import Moment
from elastic_refit.communicators.tap import Tap
from elastic_refit.core.ids import Member, ProcessId
from elastic_refit.processes import signal_processes

__all__ = ["Sabotaged", "Saboteur"]

_SIGNALS: dict[FaultKind, signal.Signals] = {
    "kill": signal.SIGKILL,
    "freeze": signal.SIGSTOP,
    "engine_kill": signal.SIGKILL,
    "engine_freeze": signal.SIGSTOP,
    "worker_kill": signal.SIGKILL,
}
_OF_OWN_WORK: frozenset[FaultKind] = frozenset({"wedge", "slow", "raise", "corrupt"})
"""They strike a bucket outside the collective: when it was passed on and is about to be applied."""
_PHASES_OF_RECOVERY = {"joining:prepare": "rebuild", "joining:connect": "rebuild"}
_ALWAYS = frozenset({"settle", "idle", "loaded"})


class Sabotaged(RuntimeError):
    """What a ``raise`` raises: no error of ours, and in equal words wherever it strikes."""


class Saboteur:
    """The faults that ``member`` strikes; ``processes`` are all that the member consists of, by rank where it has them.

    ``keep`` blocks until the record is safe, and raises if it cannot be: then the fault does not strike. ``tap`` is
    what the process' communicators were made with; ``cut_channel`` cuts its end of the control channel off, and joins
    it again. Any thread may arm and disarm; faults strike on the thread that comes to their phase.
    """

    def __init__(
        self, member: Member, keep: Callable[[FaultRecord], None], *, processes: Iterable[ProcessId] = ()
    ) -> None:
        self.tap = Tap()
        self.tap.on_dialled = self._connecting
        self.cut_channel: Callable[[bool], None] | None = None
        self._member = member
        self._keep = keep
        self._processes = tuple(processes)
        self._lock = threading.Lock()
        self._armed: tuple[Fault, ...] = ()
        self._released = threading.Event()
        self._joining: Moment | None = None
        self._version = self._first_epoch = -1

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
            self._attend_to_tap()

    def disarm(self) -> None:
        """Nothing that has not struck by now will, and who is held up goes on; links that were cut stay so."""
        with self._lock:
            self._armed = ()
            self._attend_to_tap()
            released, self._released = self._released, threading.Event()
        released.set()
        if self.cut_channel is not None:
            self.cut_channel(False)

    def reach(self, moment: Moment) -> None:
        """Whoever waits for this moment strikes now."""
        if moment.phase == "joining:prepare":
            self._joining = moment
        released = self._released  # before it is known who strikes: else a disarm in between would release nobody
        phase = self._phase_of(moment)
        for fault in self._due(moment, phase):
            self._keep(FaultRecord(fault, os.getpid(), phase, moment.epoch))
            self._strike(fault, moment, released)

    def _attend_to_tap(self) -> None:
        self.tap.is_relay = any(fault.kind == "corrupt_link" for fault in self._armed)

    def _connecting(self) -> None:
        """The tap's word that a link was opened: the first time in a join, this rank has begun to connect."""
        joining, self._joining = self._joining, None
        if joining is not None:
            self.reach(replace(joining, phase="joining:connect"))

    def _phase_of(self, moment: Moment) -> str:
        """As faults name it; a second epoch of one version is a recovery, and its other phases have no name."""
        site, _, bucket = moment.phase.partition(":")
        if not self._is_recovery(moment) or site in _ALWAYS:
            return f"bucket:{bucket}" if site == "applying" else moment.phase
        if site in ("bucket", "applying"):
            return f"retry:{bucket}"
        return _PHASES_OF_RECOVERY.get(moment.phase, f"{moment.phase} of a recovery")

    def _is_recovery(self, moment: Moment) -> bool:
        if moment.version < 0 or moment.epoch < 0:
            return False
        if moment.version != self._version:
            self._version, self._first_epoch = moment.version, moment.epoch
        return moment.epoch > self._first_epoch

    def _due(self, moment: Moment, phase: str) -> list[Fault]:
        """Those that strike here; one that does not repeat is armed no longer, even if its record cannot be kept."""
        is_own_work = moment.phase.startswith("applying")
        with self._lock:
            due = [
                fault
                for fault in self._armed
                if fault.version == moment.version
                and fault.is_at(phase)
                and (not fault.strikes_buckets or (fault.kind in _OF_OWN_WORK) == is_own_work)
            ]
            self._armed = tuple(fault for fault in self._armed if fault.repeats or fault not in due)
        return due

    def _strike(self, fault: Fault, moment: Moment, released: threading.Event) -> None:
        match fault.kind:
            case "wedge" | "abort_stuck":
                released.wait(fault.seconds)
            case "gil":
                hold_interpreter(fault.seconds)
            case "raise":
                raise Sabotaged("the receiver refuses what it was given")
            case "slow":
                for _ in range(fault.times):
                    released.wait(fault.seconds)
                    moment.tick()
            case "corrupt":
                assert moment.buffer is not None
                moment.buffer[len(moment.buffer) // 2] ^= 0xFF
            case "corrupt_link":
                self.tap.alter_next()
            case "partition":
                self.tap.cut(str(fault.peer))
            case "control_partition":
                assert self.cut_channel is not None
                self.cut_channel(True)
            case _:
                self._signal(fault)

    def _signal(self, fault: Fault) -> None:
        """Others first: whoever is ended or stopped with them cannot go on to the next."""
        targets = fault.targets or self._processes
        if fault.rank_in_shard is not None and not fault.targets:
            targets = (self._processes[fault.rank_in_shard],)
        signal_processes(sorted(targets, key=lambda each: each.pid == os.getpid()), _SIGNALS[fault.kind])
