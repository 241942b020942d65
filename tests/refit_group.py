"""A refit group in threads of one process, over real sockets, and the orders that a coordinator would give it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_refit.chaos import Fault, FaultRecord, Moment, Saboteur
from elastic_refit.communicators.base import CommunicatorBackend
from elastic_refit.communicators.tcp import TcpBackend
from elastic_refit.config import DeadlinesConfig
from elastic_refit.core.events import CommitMode
from elastic_refit.core.ids import Member, ProcessId, ShardId, TrainerId
from elastic_refit.core.manifest import Manifest, build_manifest
from elastic_refit.core.membership import Membership, plan_membership
from elastic_refit.core.messages import (
    Answer,
    CommitOrder,
    Committed,
    Done,
    JoinOrder,
    PingOrder,
    Prepared,
    PrepareOrder,
    Ready,
    ReadyOrder,
    Received,
    Sent,
    Settled,
    SettleOrder,
    TransferOrder,
)
from elastic_refit.engines.base import WeightReceiver
from elastic_refit.participant import RefitParticipant
from elastic_refit.transports.base import HeldWeights, Packing, WeightSource, WeightTransport
from elastic_refit.transports.broadcast import BroadcastTransport
from tests.waiting import wait_until

__all__ = ["BUCKET_BYTES", "LIMITS", "Engine", "FailingWeights", "Group", "Weights", "digests_sent", "is_equal"]

LIMITS = DeadlinesConfig().limits
MakeTransport = Callable[[CommunicatorBackend], WeightTransport]
InWorker = Callable[[Callable[[WeightReceiver], Any]], Any]
BUCKET_BYTES = 4096


class Weights(HeldWeights):
    """Seven tensors of odd sizes, some larger than a bucket; other values for every version."""

    def __init__(self, version: int) -> None:
        dice = torch.Generator().manual_seed(version)
        super().__init__({f"w{n}": torch.randn(n * 331 + 7, generator=dice) for n in range(7)})


class FailingWeights(Weights):
    """A trainer that breaks once, when it packs a bucket in the middle and the shards have taken two."""

    def __init__(self, version: int, group: Group) -> None:
        super().__init__(version)
        self._group = group
        self.breaks_at = "w5"
        self._has_failed = False

    def materialize(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        if self.breaks_at in names and not self._has_failed:
            self._has_failed = True
            wait_until(lambda: min(map(self._group.applied, self._group.engines)) >= 1, timeout_s=30)
            raise RuntimeError("no more weights for now")
        return super().materialize(names)


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


def _calling(engine: Engine) -> InWorker:
    return lambda function: function(engine)


class Group:
    """Trainers and shards; carries out what a coordinator would order, each member on a thread of its own."""

    def __init__(
        self,
        shards: int,
        *,
        trainers: int = 1,
        transport: MakeTransport = BroadcastTransport,
        commit: CommitMode = "streamed",
        chaos: Sequence[ProcessId] | None = None,
    ) -> None:
        """``chaos``: every member may be struck by faults, and consists of these processes."""
        self.trainers = tuple(TrainerId(rank) for rank in range(trainers))
        self.weights: WeightSource = Weights(0)
        self.sources: dict[TrainerId, WeightSource] = {}
        """Of trainers whose source is not ``weights``."""
        self.on_reach: Callable[[Member, str], None] = lambda member, phase: None
        """Called on the member's own thread when it has come to a phase; what it raises is the member's own error."""
        self.packing = Packing(BUCKET_BYTES)
        self.commit_mode: CommitMode = commit
        self.engines = {ShardId(index): Engine() for index in range(shards)}
        self.workers: dict[ShardId, InWorker] = {shard: _calling(engine) for shard, engine in self.engines.items()}
        """How each shard's receiver is reached; a test may put another engine's in its place."""
        everybody: tuple[Member, ...] = (*self.trainers, *self.engines)
        self.records: list[FaultRecord] = []
        """Of the faults that struck."""
        self.keep: Callable[[FaultRecord], None] = self.records.append
        self.saboteurs = {} if chaos is None else {member: self._saboteur(member, chaos) for member in everybody}
        self.members: dict[Member, RefitParticipant] = {
            member: self._participant(member, transport) for member in everybody
        }
        self._threads = ThreadPoolExecutor(max_workers=2 * len(self.members))

    def _participant(self, member: Member, transport: MakeTransport) -> RefitParticipant:
        saboteur = self.saboteurs.get(member)
        backend = TcpBackend(chunk_bytes=1024, tap=None if saboteur is None else saboteur.tap)
        reach = self._reaching(member)
        participant = RefitParticipant(member, transport(backend), deadlines=LIMITS, reach=reach)
        if saboteur is not None:
            saboteur.cut_channel = participant.cut_channel
        return participant

    def _saboteur(self, member: Member, processes: Sequence[ProcessId]) -> Saboteur:
        return Saboteur(member, lambda record: self.keep(record), processes=processes)

    def arm(self, fault: Fault) -> None:
        self.saboteurs[fault.striker].arm(fault)

    def disarm(self) -> None:
        for saboteur in self.saboteurs.values():
            saboteur.disarm()

    def landed(self) -> list[tuple[str, str]]:
        """Which faults struck, and in which phases, by their own records."""
        return [(record.fault.kind, record.phase) for record in self.records]

    def close(self) -> None:
        self.disarm()
        for participant in self.members.values():
            participant.close()
        self._threads.shutdown()

    def everywhere(self, group: Membership, do: Callable[[Member], Answer]) -> dict[Member, Answer]:
        calls = {member: self._threads.submit(do, member) for member in group.members}
        return {member: call.result(timeout=60) for member, call in calls.items()}

    def build(self, epoch: int, shards: Sequence[int], version: int = 1) -> Membership:
        group = plan_membership(len(self.trainers), [1] * len(self.engines), [ShardId(s) for s in shards], epoch=epoch)
        prepared = self.everywhere(group, lambda m: self.members[m].prepare(PrepareOrder(epoch, 0, version)))
        addresses: list[str] = []
        for answer in prepared.values():
            assert isinstance(answer, Prepared)
            addresses += answer.addresses
        secret, order = secrets.token_bytes(32), JoinOrder(epoch, group, tuple(addresses), version)
        joined = self.everywhere(group, lambda m: self.members[m].join(order, secret))
        assert set(joined.values()) == {Done()}
        return group

    def transfer(self, group: Membership, version: int, start: int = 0) -> tuple[dict[Member, Answer], Manifest]:
        ready = self.pin(ReadyOrder(group.epoch, version, start))
        assert isinstance(ready, Ready), ready
        assert ready.manifest is not None
        order = TransferOrder(group.epoch, version, ready.manifest, start, self.commit_mode)

        def move(member: Member) -> Answer:
            if isinstance(member, TrainerId):
                return self.members[member].send(order)
            answer: Answer = self.workers[member](lambda receiver: self.members[member].receive(order, receiver))
            return answer

        return self.everywhere(group, move), ready.manifest

    def receive_from_nobody(self, group: Membership) -> tuple[ShardId, Future[Answer]]:
        """The last shard, told to receive what the trainers have ready and do not send."""
        ready = self.pin(ReadyOrder(group.epoch, 1, 0))
        assert isinstance(ready, Ready), ready
        assert ready.manifest is not None
        order, shard = TransferOrder(group.epoch, 1, ready.manifest, 0), group.shard_ids[-1]
        return shard, self._threads.submit(self.members[shard].receive, order, self.engines[shard])

    @property
    def num_buckets(self) -> int:
        """Of the weights as they are."""
        return build_manifest(self.weights.specs(), self.packing.bucket_bytes).num_buckets

    def pin(self, order: ReadyOrder) -> Answer:
        """Every trainer gets ready; the answer of the first."""

        def pin(trainer: TrainerId) -> Answer:
            return self.members[trainer].pin(order, self.sources.get(trainer, self.weights), self.packing)

        pinned = [self._threads.submit(pin, trainer) for trainer in self.trainers]
        answers = [each.result(timeout=60) for each in pinned]
        return answers[0]

    def _reaching(self, member: Member) -> Callable[[Moment], None]:
        def reached(moment: Moment) -> None:
            self.on_reach(member, moment.phase)
            if member in self.saboteurs:
                self.saboteurs[member].reach(moment)

        return reached

    def applied(self, shard: ShardId) -> int:
        """The highest bucket that the shard has taken in this attempt, by its own word."""
        return self.members[shard].ping(PingOrder(0)).beacon.applied

    def refit(self, version: int, *, epoch: int, shards: Sequence[int], start: int = 0) -> None:
        """A whole refit, from ``start`` on, that must succeed everywhere."""
        answers, _ = self.transfer(self.build(epoch, shards, version), version, start)
        digests = digests_sent(answers)
        for shard in shards:
            assert answers[ShardId(shard)] == Received(digests)
            assert self.commit(shard, epoch, version, digests) == Committed(version)

    def settle(self, member: Member, epoch: int, version: int = 1, *, roll_back: bool = False) -> Settled:
        in_worker = self.workers[member] if isinstance(member, ShardId) else None
        answer = self.members[member].settle(SettleOrder(epoch, version, "a test", roll_back), in_worker)
        assert isinstance(answer, Settled)
        return answer

    def commit(self, shard: int, epoch: int, version: int, digests: tuple[int, ...]) -> Answer:
        member, order = self.members[ShardId(shard)], CommitOrder(epoch, version, digests)
        answer: Answer = self.workers[ShardId(shard)](lambda receiver: member.commit(order, receiver))
        return answer

    def holds_all(self, shard: int) -> bool:
        """Whether the shard's engine holds exactly what the trainer has, bit for bit."""
        names = [spec.name for spec in self.weights.specs()]
        held, sent = self.engines[ShardId(shard)].held, self.weights.materialize(names)
        return held.keys() == sent.keys() and all(is_equal(held[name], sent[name]) for name in names)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit: NaNs equal themselves, and zeros have a sign."""
    same_kind = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same_kind and torch.equal(_bytes_of(one), _bytes_of(other))
