"""Faults in the ranks of a wide shard: armed by its actor, struck in the rank that reaches the phase.

A rank cannot reach the log of a run itself: its actor fetches each record by the rank's line and has it kept, and only
then does the rank strike. What must never happen here: a strike without a record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait

from elastic_refit.chaos import Fault, FaultRecord, Moment, Saboteur
from elastic_refit.core.ids import ProcessId
from elastic_refit.errors import ShardDied, ShardError
from elastic_refit.rank_line import RankLine

__all__ = ["FaultyRank", "RankSaboteurs"]

_STRIKE_S = 5.0


class FaultyRank:
    """In the rank's process: the records on their way to the actor, and what the line asks for."""

    def __init__(self) -> None:
        self._records: queue.SimpleQueue[FaultRecord] = queue.SimpleQueue()
        self._kept: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.saboteur: Saboteur | None = None

    def keep(self, record: FaultRecord) -> None:
        """Blocks until the actor has had it kept; raises ShardError if it could not."""
        self._records.put(record)
        error = self._kept.get()
        if error is not None:
            raise ShardError(f"{record.fault} could not be recorded, so it does not strike: {error}")

    def next_record(self) -> FaultRecord:
        """Blocks until a fault is about to strike."""
        return self._records.get()

    def note_kept(self, error: str | None) -> None:
        self._kept.put(error)

    def arm(self, *faults: Fault) -> None:
        self._saboteur.arm(*faults)

    def disarm(self) -> None:
        self._saboteur.disarm()

    def reach(self, version: int, phase: str) -> None:
        self._saboteur.reach(Moment(version, phase))

    @property
    def _saboteur(self) -> Saboteur:
        assert self.saboteur is not None, "only a run with faults arms its ranks"
        return self.saboteur


class RankSaboteurs:
    """In the actor: arms the rank that is to strike, and has its records kept. ``ranks`` are the ranks' processes."""

    def __init__(
        self,
        lines: Sequence[RankLine],
        keep: Callable[[FaultRecord], None],
        *,
        ranks: Sequence[ProcessId],
        processes: Sequence[ProcessId],
    ) -> None:
        self._lines = lines
        self._keep = keep
        self._ranks = ranks
        self._processes = processes
        for line in lines:
            threading.Thread(target=self._record, args=(line,), name=f"faults-{line.name}", daemon=True).start()

    def arm(self, *faults: Fault) -> None:
        """A fault of one rank is struck by that rank; one of the whole shard, or of its engine, by the first.

        Where a fault names no processes, it is those of its rank, or all of the shard's.
        """
        for fault in faults:
            aimed = dataclasses.replace(fault, targets=fault.targets or self._targets(fault))
            self._lines[fault.rank_in_shard or 0].ask("arm", aimed).result()

    def disarm(self) -> None:
        for line in self._lines:
            line.ask("disarm")

    def reach(self, moment: Moment) -> None:
        """Returns when every rank has come to it; one that is struck there may never say so."""
        wait([line.ask("reach", moment.version, moment.phase) for line in self._lines], timeout=_STRIKE_S)

    def _targets(self, fault: Fault) -> tuple[ProcessId, ...]:
        if fault.rank_in_shard is not None:
            return (self._ranks[fault.rank_in_shard],)
        return tuple(self._processes)

    def _record(self, line: RankLine) -> None:
        with contextlib.suppress(ShardDied):
            while True:
                record: FaultRecord = line.ask("next_record").result()
                line.ask("note_kept", self._kept(record)).result()

    def _kept(self, record: FaultRecord) -> str | None:
        try:
            self._keep(record)
        except Exception as error:  # noqa: BLE001 - whatever it is, the fault must not strike
            return f"{type(error).__name__}: {error}"
        return None
