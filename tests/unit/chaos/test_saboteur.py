"""Faults strike once they are recorded, once, and where they were told to."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from elastic_refit.chaos import Fault, FaultRecord, Moment, Saboteur
from elastic_refit.core.ids import ShardId
from elastic_refit.errors import ShardError

SHARD = ShardId(0)


def test_a_fault_strikes_after_it_was_recorded_and_only_in_its_phase() -> None:
    script = """
import os
from elastic_refit.chaos import Fault, Moment, Saboteur
from elastic_refit.core.ids import ShardId
from elastic_refit.processes import identify
shard = ShardId(0)
keep = lambda record: print("recorded", record.fault, record.phase, record.pid == os.getpid(), flush=True)
saboteur = Saboteur(shard, keep, processes=[identify(os.getpid(), "here")])
saboteur.arm(Fault("kill", shard, 3, "bucket:2"))
for version, phase in ((2, "bucket:2"), (3, "bucket:1")):
    saboteur.reach(Moment(version, phase))
print("alive", flush=True)
saboteur.reach(Moment(3, "bucket:2"))
print("not reached", flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout.splitlines() == ["alive", "recorded kill of shard[0] in refit v3, bucket:2 bucket:2 True"]


def test_a_fault_that_cannot_be_recorded_does_not_strike() -> None:
    def refuse(record: FaultRecord) -> None:
        raise ShardError("nowhere to record")

    saboteur = Saboteur(SHARD, refuse)
    saboteur.arm(Fault("kill", SHARD, 1, "ack"))
    with pytest.raises(ShardError):
        saboteur.reach(Moment(1, "ack"))
    saboteur.reach(Moment(1, "ack"))  # and it is not tried again


def test_what_somebody_else_strikes_is_not_armed_here() -> None:
    with pytest.raises(ValueError, match=r"shard\[1\]"):
        Saboteur(SHARD, lambda record: None).arm(Fault("kill", ShardId(1), 1, "ack"))


def test_what_was_disarmed_does_not_strike() -> None:
    kept: list[FaultRecord] = []
    saboteur = Saboteur(SHARD, kept.append)
    saboteur.arm(Fault("kill", SHARD, 1, "ack"), Fault("freeze", SHARD, 1, "bucket:*"))
    saboteur.disarm()
    saboteur.reach(Moment(1, "ack"))
    saboteur.reach(Moment(1, "bucket:0"))
    assert kept == []
