"""Faults are read and checked strictly; each says who strikes it, and where."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from elastic_refit.chaos import Fault, FaultRecord, parse_fault
from elastic_refit.core.ids import ProcessId, ShardId, TrainerId
from elastic_refit.errors import ConfigError

SHARD = ShardId(0)


def test_a_fault_is_read_as_shard_step_and_phase() -> None:
    assert parse_fault("kill", "0@3:bucket:2") == Fault("kill", SHARD, version=3, phase="bucket:2")
    assert parse_fault("freeze", "12@1:before").bucket is None
    assert parse_fault("kill", "0@3:bucket:2").bucket == 2


@pytest.mark.parametrize("text", ["", "0", "0@3", "0@3:lunch", "x@3:before", "0@3:bucket", "0@3:bucket:-1", "-1@3:ack"])
def test_anything_else_is_refused_with_the_phases_that_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match=r"SHARD@STEP:PHASE.*bucket:K"):
        parse_fault("kill", text)


def test_a_phase_may_name_one_bucket_or_all_of_them_and_a_retry_needs_to_name_none() -> None:
    faults = [Fault("kill", SHARD, 1, phase) for phase in ("bucket:3", "bucket:*", "retry", "retry:3", "before")]
    assert [fault.family for fault in faults] == ["bucket", "bucket", "retry", "retry", "before"]
    assert [fault.bucket for fault in faults] == [3, None, None, 3, None]
    assert [fault.repeats for fault in faults] == [False, True, False, False, False]


def test_the_ledger_and_the_coordinator_are_struck_by_a_member() -> None:
    fault = Fault("freeze", "ledger", 1, "bucket:1")
    assert fault.striker == TrainerId(0)
    assert replace(fault, by=SHARD).striker == SHARD
    assert Fault("kill", SHARD, 1, "ack").striker == SHARD


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (lambda: Fault("kill", SHARD, 1, "bucket"), "bucket"),
        (lambda: Fault("kill", SHARD, 1, "bucket:x"), "bucket:x"),
        (lambda: Fault("explode", SHARD, 1, "idle"), "explode"),  # type: ignore[arg-type]
        (lambda: Fault("kill", SHARD, 1, "packing"), "packing"),
        (lambda: Fault("kill", TrainerId(0), 1, "finalizing"), "finalizing"),
        (lambda: Fault("wedge", SHARD, 1, "settle"), "settle"),
        (lambda: Fault("wedge", TrainerId(0), 1, "bucket:1"), "packing"),
        (lambda: Fault("abort_stuck", SHARD, 1, "ack"), "settle"),
        (lambda: Fault("partition", SHARD, 1, "bucket:1"), "peer"),
        (lambda: Fault("kill", SHARD, 1, "bucket:1", peer=ShardId(1)), "peer"),
        (lambda: Fault("wedge", "ledger", 1, "before"), "killed or frozen"),
        (lambda: Fault("kill", "ledger", 1, "finalizing"), r"trainer\[0\]"),
        (lambda: Fault("corrupt", TrainerId(1), 1, "bucket:1"), "trainer"),
        (lambda: Fault("engine_kill", TrainerId(1), 1, "bucket:1"), "engine"),
        (lambda: Fault("corrupt_link", TrainerId(0), 1, "bucket:1"), "root"),
        (lambda: Fault("slow", SHARD, 1, "bucket:*"), "seconds"),
        (lambda: Fault("wedge", SHARD, 1, "bucket:1", by=TrainerId(0)), "kill or freeze"),
    ],
)
def test_a_fault_that_could_not_strike_is_refused_with_the_reason(fault: object, why: str) -> None:
    assert callable(fault)
    with pytest.raises(ConfigError, match=why):
        fault()


def test_faults_and_their_records_survive_the_way_to_another_process() -> None:
    fault = Fault("kill", "coordinator", 2, "ack", targets=(ProcessId("here", 1, 2, 3),))
    record = FaultRecord(fault, 7, "ack", epoch=3, at_s=1.5)
    assert pickle.loads(pickle.dumps(record)) == record
