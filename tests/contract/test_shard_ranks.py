"""A shard of two ranks in processes of their own, without a model: what makes it one member, as good as the worst."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest

from elastic_refit.communicators.tcp import TcpBackend
from elastic_refit.control.host import ControlHost
from elastic_refit.control.setup import ChannelPlan
from elastic_refit.control.stall import StallWatch
from elastic_refit.core.evidence import Beacon, Testimony
from elastic_refit.core.ids import ShardId, TrainerId
from elastic_refit.core.membership import Membership, plan_membership
from elastic_refit.core.messages import (
    Answer,
    CommitOrder,
    Committed,
    Done,
    Fault,
    JoinOrder,
    PingOrder,
    Pong,
    Prepared,
    PrepareOrder,
    Ready,
    ReadyOrder,
    Received,
    Settled,
    SettleOrder,
    TransferOrder,
)
from elastic_refit.engines.torch_workers import TorchWorkersEngine
from elastic_refit.errors import ShardError
from elastic_refit.participant import RefitParticipant
from elastic_refit.participant_setup import RankSetup
from elastic_refit.shard_ranks import seat_ranks
from elastic_refit.transports.base import Packing
from elastic_refit.transports.broadcast import BroadcastTransport
from tests.light_rank import feeds_until, holds
from tests.refit_group import BUCKET_BYTES, LIMITS, Weights, digests_sent
from tests.waiting import wait_until

SHARD, TRAINER = ShardId(0), TrainerId(0)
PACKING = Packing(BUCKET_BYTES)
WAIT_S = 60.0


class LightEngine(TorchWorkersEngine):
    rank_module = "tests.light_rank"


class Fleet:
    """A trainer in this process, a shard of two ranks, and the control channel; the test is the coordinator."""

    def __init__(self, folder: Path) -> None:
        (folder / "config.json").touch()
        (folder / "none.safetensors").touch()
        self.plan = ChannelPlan()
        ends = tuple(self.plan.end(name) for name in ("shard[0]", "shard[0]/1"))
        self.host = ControlHost(self.plan.host())
        self.engine = LightEngine(str(folder), width=2)
        setup = RankSetup(SHARD, LIMITS, PACKING, ends, str(folder))
        self.shard = seat_ranks(self.engine, setup, "here")
        self.trainer = RefitParticipant(TRAINER, BroadcastTransport(TcpBackend(chunk_bytes=1024)), deadlines=LIMITS)
        self.threads = ThreadPoolExecutor(8)
        self.epoch = 0

    def close(self) -> None:
        self.trainer.close()
        self.shard.close()
        self.engine.close()
        self.host.close()
        self.plan.close()
        self.threads.shutdown()

    def build(self) -> Membership:
        self.epoch += 1
        group = plan_membership(1, [2], [SHARD], epoch=self.epoch)
        self.host.open_epoch(self.epoch)
        order = PrepareOrder(self.epoch, 0)
        prepared = [self.trainer.prepare(order), self.shard.work(order)]
        addresses = tuple(a for each in prepared if isinstance(each, Prepared) for a in each.addresses)
        assert len(addresses) == 3
        join, secret = JoinOrder(self.epoch, group, addresses), secrets.token_bytes(32)
        joining = self.threads.submit(self.shard.work, join, secret)
        assert (self.trainer.join(join, secret), joining.result(WAIT_S)) == (Done(), Done())
        return group

    def ready(self, version: int) -> TransferOrder:
        """The trainer has packed, the shard has paused: the order that would move the bytes."""
        order = ReadyOrder(self.epoch, version, 0)
        ready = self.trainer.pin(order, Weights(version), PACKING)
        assert isinstance(ready, Ready)
        assert ready.manifest is not None
        assert self.shard.work(order) == Done()
        return TransferOrder(self.epoch, version, ready.manifest, 0)

    def transfer(self, version: int) -> tuple[Future[Answer], Future[Answer]]:
        """The trainer's answer and the shard's, when they come."""
        moving = self.ready(version)
        return self.threads.submit(self.trainer.send, moving), self.threads.submit(self.shard.work, moving)

    def refit(self, version: int) -> None:
        self.build()
        sent, received = (each.result(WAIT_S) for each in self.transfer(version))
        assert received == Received(digests_sent({TRAINER: sent}))
        assert self.shard.serving_version is None
        assert self.shard.work(CommitOrder(self.epoch, version, digests_sent({TRAINER: sent}))) == Committed(version)
        assert self.shard.serving_version == version

    def settle(self, version: int, *, roll_back: bool = False) -> Settled:
        answer = self.shard.attend(SettleOrder(self.epoch, version, "a test", roll_back))
        assert isinstance(answer, Settled)
        return answer

    def told(self, version: int) -> list[str]:
        """What the engines were told, each the same; all hold the version whole."""
        found = self.engine.in_workers(partial(holds, version))
        assert all(same for same, _ in found)
        assert found[0] == found[1]
        return found[0][1]

    def beacon(self) -> Beacon:
        pong = self.shard.attend(PingOrder(self.epoch))
        assert isinstance(pong, Pong)
        return pong.beacon

    def slowest_is_heard(self) -> bool:
        """The channel tells of the shard what rank 1 says, which is behind its sibling."""
        heard = self.host.heard()
        if not {"shard[0]", "shard[0]/1"} <= heard.keys() or heard["shard[0]/1"].beacon.phase != "applying":
            return False
        beacon, _ = StallWatch(self.host.heard, LIMITS.stall_s).beacons([SHARD], 0.0)[SHARD]
        return beacon.applied == heard["shard[0]/1"].beacon.applied < heard["shard[0]"].beacon.applied


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One for all tests, in their order; the last one ends it."""
    fleet = Fleet(tmp_path_factory.mktemp("model"))
    yield fleet
    fleet.close()


def test_a_refit_reaches_every_rank_and_the_shard_serves_what_all_of_them_hold(fleet: Fleet) -> None:
    assert fleet.shard.serving_version is None
    for version in (1, 2):
        fleet.refit(version)
        assert fleet.told(version)[-2:] == ["begin", f"finish {version}"]
    pong = fleet.shard.attend(PingOrder(fleet.epoch))
    assert isinstance(pong, Pong)
    assert {each.pid for each in pong.processes} == {os.getpid(), *fleet.engine.pids()}


def test_a_shard_with_a_frozen_rank_is_silent_although_its_sibling_speaks(fleet: Fleet) -> None:
    frozen = fleet.engine.pids()[2]
    os.kill(frozen, signal.SIGSTOP)
    pinged = fleet.threads.submit(fleet.shard.attend, PingOrder(fleet.epoch))
    sibling = fleet.shard._lines[0].ask("attend", PingOrder(fleet.epoch))  # type: ignore[attr-defined]
    assert isinstance(sibling.result(WAIT_S), Pong)
    assert not pinged.done()
    os.kill(frozen, signal.SIGCONT)
    assert isinstance(pinged.result(WAIT_S), Pong)


def test_an_abort_frees_every_rank_and_the_retry_reaches_them_all(fleet: Fleet) -> None:
    fleet.build()
    receiving = fleet.threads.submit(fleet.shard.work, fleet.ready(3))
    wait_until(lambda: fleet.beacon().phase == "in_collective", WAIT_S)
    assert fleet.settle(3).applied_through == -1
    assert isinstance(receiving.result(WAIT_S), Testimony)
    fleet.trainer.settle(SettleOrder(fleet.epoch, 3, "a test", roll_back=False))
    fleet.refit(3)
    assert fleet.told(3)[-2:] == ["begin", "finish 3"]


def test_a_shard_that_rolls_back_closes_the_update_of_every_rank_and_serves_nothing(fleet: Fleet) -> None:
    fleet.build()
    for each in fleet.transfer(4):
        each.result(WAIT_S)
    assert fleet.settle(4, roll_back=True).serving_version is None
    assert fleet.told(4)[-2:] == ["begin", "rollback"]
    assert fleet.shard.serving_version is None


def test_a_pause_that_hangs_is_seen_in_the_ranks_and_ended_by_an_abort(fleet: Fleet) -> None:
    fleet.build()
    fleet.engine._everywhere("hold_pause")
    pausing = fleet.threads.submit(fleet.shard.work, ReadyOrder(fleet.epoch, 5, 0))
    wait_until(lambda: fleet.beacon().phase == "pausing", WAIT_S)
    fleet.settle(5)
    fleet.engine._everywhere("may_pause")
    assert isinstance(pausing.result(WAIT_S), Testimony)


def test_a_rank_that_hangs_is_heard_of_and_one_that_dies_ends_the_shard(fleet: Fleet) -> None:
    told: Future[str] = Future()
    fleet.engine.when_dead(told.set_result)
    fleet.engine.in_workers(partial(feeds_until, "w3", 1))
    fleet.build()
    _, received = fleet.transfer(6)
    wait_until(fleet.slowest_is_heard, WAIT_S)
    assert not received.done()
    pids = fleet.engine.pids()
    os.kill(pids[2], signal.SIGKILL)
    answer = received.result(WAIT_S)
    assert isinstance(answer, Fault)
    assert answer.signature == "ShardDied"
    assert str(pids[2]) in told.result(WAIT_S)
    assert isinstance(fleet.shard.attend(PingOrder(fleet.epoch)), Fault)
    fleet.engine.close()
    assert not any(psutil.pid_exists(pid) for pid in pids[1:])
    with pytest.raises(ShardError, match="closed"):
        fleet.engine.resume()
