"""From a cell's faults to those that are armed on a fleet: who strikes whom, and where on the chain.

Bytes come down a chain in rank order. In the middle of a bucket a rank has not passed on what its successors need to
come as far, so of several that are struck at once only the last in the chain can be the one that strikes: when it is in
the middle of the bucket, everybody before it is, or has been.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from elastic_refit.chaos import Fault
from elastic_refit.core.deadlines import Deadlines
from elastic_refit.core.ids import Member, ProcessId, ShardId
from elastic_refit.matrix.cells import Blow, Cell

__all__ = ["Seats", "plan_faults"]


class Seats(Protocol):
    """A fleet, as far as its members can be struck."""

    limits: Deadlines

    def shard(self, index: int) -> ShardId: ...
    def processes(self, *members: Member) -> tuple[ProcessId, ...]: ...


_SIGNALS = ("kill", "freeze")
_TOGETHER = ("bucket", "before", "retry")
_SLOW_TIMES = 5


def plan_faults(cell: Cell, lab: Seats, version: int) -> tuple[Fault, ...]:
    """The faults of ``cell`` in the refit of ``version``, in the order in which they are to be armed."""
    planned = [_fault(cell, lab, version, blow) for blow in cell.blows()]
    at_once = [
        fault
        for fault, blow in zip(planned, cell.blows(), strict=True)
        if blow.fault in _SIGNALS and not blow.is_then and fault.family in _TOGETHER
    ]
    shards = [fault.victim for fault in at_once if isinstance(fault.victim, ShardId)]
    if len(shards) < 2:
        return tuple(planned)
    last = max(shards)
    return tuple(_struck_by(last, fault, lab) if fault in at_once else fault for fault in _others_first(planned, last))


def _fault(cell: Cell, lab: Seats, version: int, blow: Blow) -> Fault:
    victim = lab.shard(blow.target.index) if isinstance(blow.target, ShardId) else blow.target
    peer = lab.shard(cell.between[1]) if cell.between is not None else None
    seconds, times = _slowness(blow, lab.limits)
    fault = blow.fault_against(victim, version=version, peer=peer, seconds=seconds, times=times)
    if "rank_in_shard" in cell.model_fields_set and victim == lab.shard(cell.victim):
        fault = replace(fault, rank_in_shard=cell.rank_in_shard)
    return fault


def _slowness(blow: Blow, limits: Deadlines) -> tuple[float, int]:
    """Delays, and how many: in all more than it takes to look like a stall, and each within what its phase allows."""
    if blow.fault != "slow" or blow.phase.endswith("*"):
        return 0.25 * limits.stall_s, 1
    return (0.8 * limits.pack_s, 1) if blow.phase == "packing" else (0.25 * limits.stall_s, _SLOW_TIMES)


def _struck_by(striker: ShardId, fault: Fault, lab: Seats) -> Fault:
    if not isinstance(fault.victim, ShardId) or fault.victim == striker:
        return fault
    return replace(fault, by=striker, targets=lab.processes(fault.victim))


def _others_first(faults: Sequence[Fault], last: ShardId) -> list[Fault]:
    """Whoever is to be killed or frozen itself cannot go on to the next."""
    return sorted(faults, key=lambda fault: fault.victim == last)
