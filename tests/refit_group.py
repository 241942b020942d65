"""A refit group in threads of one process, over real sockets, and the orders that a coordinator would give it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from elastic_refit.communicators.base import CommunicatorBackend
from elastic_refit.communicators.tcp import TcpBackend
from elastic_refit.config import DeadlinesConfig
from elastic_refit.core.ids import Member, ShardId, TrainerId
from elastic_refit.core.manifest import Manifest, TensorSpec
from elastic_refit.core.membership import Membership, plan_membership
from elastic_refit.core.messages import (
    Answer,
    CommitOrder,
    Done,
    JoinOrder,
    Prepared,
    PrepareOrder,
    Ready,
    ReadyOrder,
    Sent,
    Settled,
    SettleOrder,
    TransferOrder,
)
from elastic_refit.engines.base import WeightReceiver
from elastic_refit.participant import RefitParticipant
from elastic_refit.transports.base import WeightSource, WeightTransport
from elastic_refit.transports.broadcast import BroadcastTransport
from elastic_refit.transports.packing import tensor_specs

__all__ = ["BUCKET_BYTES", "LIMITS", "Engine", "Group", "Weights", "digests_sent"]

LIMITS = DeadlinesConfig().limits
MakeTransport = Callable[[CommunicatorBackend], WeightTransport]
BUCKET_BYTES = 4096


class Weights(WeightSource):
    """Seven tensors of odd sizes, some larger than a bucket; other values for every version."""

    def __init__(self, version: int) -> None:
        dice = torch.Generator().manual_seed(version)
        self.tensors = {f"w{n}": torch.randn(n * 331 + 7, generator=dice) for n in range(7)}

    def specs(self) -> list[TensorSpec]:
        return tensor_specs(self.tensors.items())

    def materialize(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        return {name: self.tensors[name] for name in names}


def digests_sent(answers: Mapping[Member, Answer]) -> tuple[int, ...]:
    """What trainer 0 answered after it had sent everything."""
    sent = answers[TrainerId(0)]
    assert isinstance(sent, Sent), sent
    return sent.digests


@dataclass
class Engine(WeightReceiver):
    """Keeps what it is fed, and what happened to it."""

    held: dict[str, torch.Tensor] = field(default_factory=dict)
    fed: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    on_feed: Callable[[int], None] | None = None

    def begin(self, manifest: Manifest) -> None:
        self.calls.append("begin")
        self.fed = []

    def feed(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        if self.on_feed is not None:
            self.on_feed(len(self.fed))
        for name, tensor in tensors:
            self.fed.append(name)
            self.held[name] = tensor

    def finish(self, version: int) -> None:
        self.calls.append(f"finish {version}")

    def rollback(self) -> None:
        self.calls.append("rollback")


class Group:
    """One trainer and some shards; carries out what a coordinator would order, each member on a thread of its own."""

    def __init__(self, shards: int, *, transport: MakeTransport = BroadcastTransport) -> None:
        self.weights: WeightSource = Weights(0)
        self.bucket_bytes = BUCKET_BYTES
        self.engines = {ShardId(index): Engine() for index in range(shards)}
        everybody: tuple[Member, ...] = (TrainerId(0), *self.engines)
        backend = TcpBackend(chunk_bytes=1024)
        self.members: dict[Member, RefitParticipant] = {
            member: RefitParticipant(member, transport(backend), deadlines=LIMITS) for member in everybody
        }
        self._threads = ThreadPoolExecutor(max_workers=2 * len(self.members))

    def close(self) -> None:
        for participant in self.members.values():
            participant.close()
        self._threads.shutdown()

    def everywhere(self, group: Membership, do: Callable[[Member], Answer]) -> dict[Member, Answer]:
        calls = {member: self._threads.submit(do, member) for member in group.members}
        return {member: call.result(timeout=60) for member, call in calls.items()}

    def build(self, epoch: int, shards: Sequence[int]) -> Membership:
        group = plan_membership(1, [1] * len(self.engines), [ShardId(s) for s in shards], epoch=epoch)
        prepared = self.everywhere(group, lambda m: self.members[m].prepare(PrepareOrder(epoch, 0)))
        addresses: list[str] = []
        for answer in prepared.values():
            assert isinstance(answer, Prepared)
            addresses += answer.addresses
        secret, order = secrets.token_bytes(32), JoinOrder(epoch, group, tuple(addresses))
        joined = self.everywhere(group, lambda m: self.members[m].join(order, secret))
        assert set(joined.values()) == {Done()}
        return group

    def transfer(self, group: Membership, version: int, start: int = 0) -> tuple[dict[Member, Answer], Manifest]:
        ready = self.members[TrainerId(0)].pin(ReadyOrder(group.epoch, version, start), self.weights, self.bucket_bytes)
        assert isinstance(ready, Ready)
        assert ready.manifest is not None
        order = TransferOrder(group.epoch, version, ready.manifest, start)

        def move(member: Member) -> Answer:
            if isinstance(member, TrainerId):
                return self.members[member].send(order)
            return self.members[member].receive(order, self.engines[member])

        return self.everywhere(group, move), ready.manifest

    def settle(self, member: Member, epoch: int, version: int = 1, *, roll_back: bool = False) -> Settled:
        engine = self.engines.get(member) if isinstance(member, ShardId) else None
        in_worker = None if engine is None else (lambda function: function(engine))
        answer = self.members[member].settle(SettleOrder(epoch, version, "a test", roll_back), in_worker)
        assert isinstance(answer, Settled)
        return answer

    def commit(self, shard: int, epoch: int, version: int, digests: tuple[int, ...]) -> Answer:
        return self.members[ShardId(shard)].commit(CommitOrder(epoch, version, digests), self.engines[ShardId(shard)])

    def holds_all(self, shard: int) -> bool:
        """Whether the shard's engine holds exactly what the trainer has, bit for bit."""
        names = [spec.name for spec in self.weights.specs()]
        held, sent = self.engines[ShardId(shard)].held, self.weights.materialize(names)
        return held.keys() == sent.keys() and all(_is_equal(held[name], sent[name]) for name in names)


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit: NaNs equal themselves, and zeros have a sign."""
    same_kind = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same_kind and torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))
