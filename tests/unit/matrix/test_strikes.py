"""From a cell to the faults that are armed: against whom, by whom, and in which order."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_refit.core.deadlines import Deadlines
from elastic_refit.core.ids import Member, ProcessId, ShardId, TrainerId
from elastic_refit.matrix.shape import lab_deadlines
from elastic_refit.matrix.strikes import plan_faults
from tests.unit.matrix.observations import cell


@dataclass
class Fleet:
    """Seats whose shards were all replaced once."""

    limits: Deadlines = field(default_factory=lambda: lab_deadlines().limits)

    def shard(self, index: int) -> ShardId:
        return ShardId(index, incarnation=1)

    def processes(self, *members: Member) -> tuple[ProcessId, ...]:
        return tuple(ProcessId("node", 100 + member.index, 1, 1) for member in members)


def test_a_fault_is_against_whoever_sits_in_the_seat_now() -> None:
    (fault,) = plan_faults(cell(victim=2), Fleet(), 7)
    assert (fault.kind, fault.victim, fault.version, fault.phase) == ("kill", ShardId(2, 1), 7, "bucket:2")
    assert fault.striker == ShardId(2, 1)


def test_of_several_killed_in_one_bucket_the_last_in_the_chain_strikes_and_itself_last() -> None:
    kill, own = plan_faults(cell(shards=4, victims=[2, 0]), Fleet(), 7)
    assert (kill.victim, kill.striker) == (ShardId(0, 1), ShardId(2, 1))
    assert kill.targets == Fleet().processes(ShardId(0, 1))
    assert (own.victim, own.striker, own.targets) == (ShardId(2, 1), ShardId(2, 1), ())


def test_a_kill_and_a_freeze_in_one_bucket_are_both_struck_by_the_last_in_the_chain() -> None:
    asked = cell(shards=4, victim=0, also={"victim": 2, "fault": "freeze", "phase": "bucket:2"})
    kill, freeze = plan_faults(asked, Fleet(), 7)
    assert (kill.kind, kill.victim, kill.striker) == ("kill", ShardId(0, 1), ShardId(2, 1))
    assert (freeze.kind, freeze.victim, freeze.targets) == ("freeze", ShardId(2, 1), ())


def test_who_raises_or_dies_between_refits_or_in_the_recovery_strikes_by_itself() -> None:
    for asked in (
        cell(fault="raise", phase="bucket:1", victims=[0, 1, 2]),
        cell(phase="idle", victims=[0, 1]),
        cell(then={"victim": 1, "fault": "kill", "phase": "retry"}),
    ):
        assert all(fault.by is None and not fault.targets for fault in plan_faults(asked, Fleet(), 7))


def test_a_partition_has_a_peer_and_slowness_stays_below_what_a_phase_allows() -> None:
    (cut,) = plan_faults(cell(fault="partition", between=[1, 2]), Fleet(), 7)
    assert (cut.victim, cut.peer) == (ShardId(1, 1), ShardId(2, 1))
    limits = Fleet().limits
    (late,) = plan_faults(cell(fault="slow", phase="finalizing"), Fleet(), 7)
    assert late.seconds is not None
    assert late.seconds < limits.stall_s < late.times * late.seconds < limits.finalize_s
    (each,) = plan_faults(cell(fault="slow", phase="bucket:*"), Fleet(), 7)
    assert each.seconds is not None
    assert each.times == 1
    assert each.seconds < limits.stall_s < 6 * each.seconds
    (pack,) = plan_faults(cell(fault="slow", phase="packing", trainer_victim=0), Fleet(), 7)
    assert pack.seconds is not None
    assert pack.seconds < limits.pack_s


def test_ledger_and_coordinator_are_struck_by_the_first_trainer_and_the_driver_says_where_they_are() -> None:
    (fault,) = plan_faults(cell(actor="ledger"), Fleet(), 7)
    assert (fault.victim, fault.striker, fault.targets) == ("ledger", TrainerId(0), ())
    (one,) = plan_faults(cell(widths=[2, 1, 1], rank_in_shard=1, fault="freeze"), Fleet(), 7)
    assert one.rank_in_shard == 1
