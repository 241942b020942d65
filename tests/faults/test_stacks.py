"""A culprit that still runs is asked for its stacks before it is killed; nobody waits for one that cannot answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic_refit.core.ids import ProcessId, ShardId, TrainerId
from elastic_refit.processes import identify
from elastic_refit.stacks import asked_path, end_with_stacks, rung_path, stacks_of

SHARD = ShardId(1)
DEADLINE_S = 60.0
LISTENS = """
import ctypes, sys
from elastic_refit.watchdog import register_stack_dump_signal

def stuck_in_the_engine():
    print("ready", flush=True)
    while True:  # a signal ends the sleep of C
        ctypes.PyDLL(None).sleep(600)

register_stack_dump_signal(sys.argv[1])
stuck_in_the_engine()
"""
STUCK_IN_A_REFIT = """
import ctypes, dataclasses, sys, threading, torch
from elastic_refit.communicators.tcp import TcpBackend
from elastic_refit.config import DeadlinesConfig
from elastic_refit.core.ids import ShardId, TrainerId
from elastic_refit.core.manifest import TensorSpec
from elastic_refit.core.membership import plan_membership
from elastic_refit.core.messages import JoinOrder, PrepareOrder, ReadyOrder, TransferOrder
from elastic_refit.participant import RefitParticipant
from elastic_refit.transports.base import Packing, WeightSource
from elastic_refit.transports.broadcast import BroadcastTransport

class Weights(WeightSource):
    calls = 0

    def specs(self):
        return [TensorSpec("w", (64,), "uint8", 64)]

    def materialize(self, names):
        self.calls += 1
        while self.calls > 1:  # the second bucket
            ctypes.PyDLL(None).sleep(600)
        return {"w": torch.zeros(64, dtype=torch.uint8)}

limits = dataclasses.replace(DeadlinesConfig().limits, abort_s=0.2, abort_grace_s=0.3)
trainer, shard = (
    RefitParticipant(member, BroadcastTransport(TcpBackend()), deadlines=limits)
    for member in (TrainerId(0), ShardId(0))
)
trainer.leave_stacks(sys.argv[1])
addresses = tuple(each.prepare(PrepareOrder(1, 0)).addresses[0] for each in (trainer, shard))
order = JoinOrder(1, plan_membership(1, (1,), [ShardId(0)], epoch=1), addresses)
threading.Thread(target=shard.join, args=(order, b"s" * 32)).start()
trainer.join(order, b"s" * 32)
ready = trainer.pin(ReadyOrder(1, 1, 0), Weights(), Packing(32))
print(ready.manifest.num_buckets, flush=True)
trainer.send(TransferOrder(1, 1, ready.manifest, 0))
"""
IS_DEAF = "print('ready', flush=True); import time; time.sleep(600)"


@contextmanager
def running(script: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], ProcessId]]:
    with subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process, identify(process.pid, "here")
        finally:
            process.kill()


def test_a_process_that_holds_the_gil_gives_its_stacks_and_is_gone(tmp_path: Path) -> None:
    path = asked_path(tmp_path, SHARD)
    with running(LISTENS, str(path)) as (process, identity):
        assert end_with_stacks([identity], path, timeout_s=DEADLINE_S) == []
        assert process.wait() == -signal.SIGKILL
    assert "stuck_in_the_engine" in path.read_text()
    assert stacks_of(tmp_path, [ShardId(0), SHARD]) == (str(path),)


def test_who_is_stopped_or_would_die_of_the_question_is_not_asked(tmp_path: Path) -> None:
    path = asked_path(tmp_path, SHARD)
    with running(LISTENS, str(path)) as (stopped, first), running(IS_DEAF) as (deaf, second):
        stopped.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
        assert end_with_stacks([first, second], path, timeout_s=DEADLINE_S) == []
        assert (stopped.wait(), deaf.wait()) == (-signal.SIGKILL, -signal.SIGKILL)
    assert path.read_text() == ""
    assert stacks_of(tmp_path, [SHARD]) == ()


def test_a_participant_that_nothing_can_free_is_ended_by_its_own_timer_and_leaves_its_stacks(tmp_path: Path) -> None:
    folder, trainer = tmp_path / "incidents", TrainerId(0)
    script = [sys.executable, "-c", STUCK_IN_A_REFIT, str(folder)]
    stuck = subprocess.run(script, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (stuck.stdout, stuck.returncode) == ("2\n", 1), stuck.stderr
    assert stacks_of(folder, [trainer]) == (str(rung_path(folder, trainer)),)
    assert "in materialize" in rung_path(folder, trainer).read_text()


def test_the_stacks_that_a_native_timer_left_are_found_too(tmp_path: Path) -> None:
    rung_path(tmp_path, ShardId(1, 2)).write_text("Timeout")
    assert stacks_of(tmp_path, [ShardId(1, 2)]) == (str(rung_path(tmp_path, ShardId(1, 2))),)
