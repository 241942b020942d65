"""Faults on purpose: a real kill or freeze of this very process, at a named phase of a named refit.

A fault first has its own record kept, by somebody who outlives it, and then strikes: a test that asks for a fault can
tell whether it struck, and where. Nothing here runs unless a run was started with faults; the code path of a refit then
calls :meth:`Saboteur.reach` at its phases, else it calls nothing.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from elastic_refit.errors import ConfigError

__all__ = ["PHASES", "Fault", "FaultRecord", "Saboteur", "parse_fault"]

FaultKind = Literal["kill", "freeze"]
_SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}

PHASES = ("idle", "before", "bucket:K", "finalizing", "ack")
"""Where a shard can be struck: between refits; told to receive but not in the collective; in the middle of bucket K;
about to finish the update; received whole with the answer not sent."""

_FAULT = re.compile(r"(?P<shard>\d+)@(?P<step>\d+):(?P<phase>idle|before|finalizing|ack|bucket:\d+)")


@dataclass(frozen=True, slots=True)
class Fault:
    """Strike shard ``shard`` in ``phase`` of the refit that pushes ``version``."""

    kind: FaultKind
    shard: int
    version: int
    phase: str

    @property
    def bucket(self) -> int | None:
        """The bucket of a ``bucket:K`` phase."""
        return int(self.phase.partition(":")[2]) if self.phase.startswith("bucket:") else None

    def __str__(self) -> str:
        return f"{self.kind} of shard[{self.shard}] in refit v{self.version}, {self.phase}"


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """Written before the fault strikes: which, where, and in which process."""

    fault: Fault
    pid: int


def parse_fault(kind: FaultKind, text: str) -> Fault:
    """Read ``SHARD@STEP:PHASE``; step ``n`` pushes version ``n``.

    Raises:
        ConfigError: the text is not of that form; the message says which phases there are.
    """
    match = _FAULT.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"--{kind} {text!r}: write SHARD@STEP:PHASE, for example 0@3:bucket:2; PHASE is one of {', '.join(PHASES)}",
            field=kind,
        )
    return Fault(kind, int(match["shard"]), int(match["step"]), match["phase"])


class Saboteur:
    """Holds the faults of one process; ``keep`` stores a record where the process' death cannot lose it.

    ``keep`` blocks until the record is safe, and raises if it cannot be: then the fault does not strike.
    """

    def __init__(self, faults: tuple[Fault, ...], keep: Callable[[FaultRecord], None]) -> None:
        self._faults = list(faults)
        self._keep = keep

    def reach(self, version: int, phase: str) -> None:
        """The refit of ``version`` has come to ``phase`` in this process; whoever waits for that strikes now, once."""
        for fault in tuple(self._faults):
            if fault.version == version and fault.phase == phase:
                self._faults.remove(fault)
                self._keep(FaultRecord(fault, os.getpid()))
                os.kill(os.getpid(), _SIGNALS[fault.kind])
