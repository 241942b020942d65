"""A trainer in the test's process and one shard whose engine has workers; the test is the coordinator."""

from __future__ import annotations

import secrets
from concurrent.futures import Future, ThreadPoolExecutor

from elastic_refit.communicators.tcp import TcpBackend
from elastic_refit.control.host import ControlHost
from elastic_refit.control.setup import ChannelPlan
from elastic_refit.control.stall import StallWatch
from elastic_refit.core.events import CommitMode
from elastic_refit.core.evidence import Beacon
from elastic_refit.core.ids import ShardId, TrainerId
from elastic_refit.core.membership import Membership, plan_membership
from elastic_refit.core.messages import (
    Answer,
    CommitOrder,
    Committed,
    Done,
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
from elastic_refit.engines.base import ShardEngine
from elastic_refit.participant import RefitParticipant
from elastic_refit.participant_setup import RankSetup
from elastic_refit.ranks import rank_name
from elastic_refit.shard_ranks import seat_ranks
from elastic_refit.transports.base import Packing, WeightSource
from elastic_refit.transports.broadcast import BroadcastTransport
from tests.refit_group import LIMITS, digests_sent

__all__ = ["WideFleet"]

SHARD, TRAINER = ShardId(0), TrainerId(0)
WAIT_S = 60.0


class WideFleet:
    """``engine`` stays the caller's; its ranks take their seats here, once."""

    def __init__(self, engine: ShardEngine, folder: str, packing: Packing) -> None:
        self.plan = ChannelPlan()
        self.width = engine.width
        ends = tuple(self.plan.end(rank_name(SHARD, rank)) for rank in range(self.width))
        self.host = ControlHost(self.plan.host())
        self.packing = packing
        self.shard = seat_ranks(engine, RankSetup(SHARD, LIMITS, packing, ends, folder), "here")
        backend = TcpBackend(chunk_bytes=packing.bucket_bytes // 4)  # as the setup has it: all ranks must agree
        self.trainer = RefitParticipant(TRAINER, BroadcastTransport(backend), deadlines=LIMITS)
        self.threads = ThreadPoolExecutor(8)
        self.epoch = 0

    def close(self) -> None:
        self.trainer.close()
        self.shard.close()
        self.host.close()
        self.plan.close()
        self.threads.shutdown()

    def build(self) -> Membership:
        self.epoch += 1
        group = plan_membership(1, [self.width], [SHARD], epoch=self.epoch)
        self.host.open_epoch(self.epoch)
        order = PrepareOrder(self.epoch, 0)
        prepared = [self.trainer.prepare(order), self.shard.work(order)]
        addresses = tuple(a for each in prepared if isinstance(each, Prepared) for a in each.addresses)
        assert len(addresses) == 1 + self.width
        join, secret = JoinOrder(self.epoch, group, addresses), secrets.token_bytes(32)
        joining = self.threads.submit(self.shard.work, join, secret)
        assert (self.trainer.join(join, secret), joining.result(WAIT_S)) == (Done(), Done())
        return group

    def ready(
        self, version: int, source: WeightSource, *, start: int = 0, commit: CommitMode = "streamed"
    ) -> TransferOrder:
        """The trainer has packed, the shard has paused: the order that would move the bytes."""
        order = ReadyOrder(self.epoch, version, start)
        ready = self.trainer.pin(order, source, self.packing)
        assert isinstance(ready, Ready), ready
        assert ready.manifest is not None
        assert self.shard.work(order) == Done()
        return TransferOrder(self.epoch, version, ready.manifest, start, commit)

    def transfer(self, moving: TransferOrder) -> tuple[Future[Answer], Future[Answer]]:
        """The trainer's answer and the shard's, when they come."""
        return self.threads.submit(self.trainer.send, moving), self.threads.submit(self.shard.work, moving)

    def refit(self, version: int, source: WeightSource, *, start: int = 0, commit: CommitMode = "streamed") -> None:
        """A whole refit, from ``start`` on, that must succeed on every rank."""
        self.build()
        moving = self.ready(version, source, start=start, commit=commit)
        sent, received = (each.result(WAIT_S) for each in self.transfer(moving))
        digests = digests_sent({TRAINER: sent})
        assert received == Received(digests)
        assert self.shard.serving_version != version
        assert self.shard.work(CommitOrder(self.epoch, version, digests)) == Committed(version)
        assert self.shard.serving_version == version

    def settle(self, version: int, *, roll_back: bool = False) -> Settled:
        """The trainer and the shard leave the epoch; the shard's answer."""
        order = SettleOrder(self.epoch, version, "a test", roll_back)
        assert isinstance(self.trainer.settle(order), Settled)
        answer = self.shard.attend(order)
        assert isinstance(answer, Settled), answer
        return answer

    def beacon(self) -> Beacon:
        pong = self.shard.attend(PingOrder(self.epoch))
        assert isinstance(pong, Pong)
        return pong.beacon

    def slowest_is_heard(self) -> bool:
        """The channel tells of the shard what rank 1 says, which is behind its sibling."""
        heard = self.host.heard()
        if not {"shard[0]", "shard[0]/1"} <= heard.keys() or heard["shard[0]/1"].beacon.phase != "applying":
            return False
        beacon, _ = StallWatch(self.host.heard, LIMITS).beacons({SHARD: self.width}, 0.0)[SHARD]
        return beacon.applied == heard["shard[0]/1"].beacon.applied < heard["shard[0]"].beacon.applied
