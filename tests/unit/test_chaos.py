"""Faults are read strictly, recorded before they strike, and strike once, where they were told to."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from elastic_refit.chaos import Fault, FaultRecord, Saboteur, parse_fault
from elastic_refit.errors import ConfigError, ShardError


def test_a_fault_is_read_as_shard_step_and_phase() -> None:
    assert parse_fault("kill", "0@3:bucket:2") == Fault("kill", shard=0, version=3, phase="bucket:2")
    assert parse_fault("freeze", "12@1:before").bucket is None
    assert parse_fault("kill", "0@3:bucket:2").bucket == 2


@pytest.mark.parametrize("text", ["", "0", "0@3", "0@3:lunch", "x@3:before", "0@3:bucket", "0@3:bucket:-1", "-1@3:ack"])
def test_anything_else_is_refused_with_the_phases_that_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match=r"SHARD@STEP:PHASE.*bucket:K"):
        parse_fault("kill", text)


def test_a_fault_strikes_after_it_was_recorded_and_only_in_its_phase() -> None:
    script = """
import sys
from elastic_refit.chaos import Fault, Saboteur
saboteur = Saboteur((Fault("kill", 0, 3, "bucket:2"),), lambda record: print("recorded", record.fault, flush=True))
for version, phase in ((2, "bucket:2"), (3, "bucket:1")):
    saboteur.reach(version, phase)
print("alive", flush=True)
saboteur.reach(3, "bucket:2")
print("not reached", flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout.splitlines() == ["alive", "recorded kill of shard[0] in refit v3, bucket:2"]


def test_a_fault_that_cannot_be_recorded_does_not_strike() -> None:
    def refuse(record: FaultRecord) -> None:
        raise ShardError("nowhere to record")

    saboteur = Saboteur((Fault("kill", 0, 1, "ack"),), refuse)
    with pytest.raises(ShardError):
        saboteur.reach(1, "ack")
    saboteur.reach(1, "ack")  # and it is not tried again
