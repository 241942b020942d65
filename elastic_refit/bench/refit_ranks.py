"""Refits between real processes without Ray: what the broadcast benchmark and the memory tests are made of.

Each rank is a process with a :class:`RefitParticipant`; this process gives the orders that the coordinator would give.
"""

from __future__ import annotations

import ctypes
import gc
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from elastic_refit.bench.communicators import BenchSeat
from elastic_refit.chaos import Moment
from elastic_refit.communicators.base import CommunicatorBackend
from elastic_refit.communicators.rank_processes import RankProcess
from elastic_refit.config import DeadlinesConfig
from elastic_refit.core.events import CommitMode
from elastic_refit.core.ids import Member, ShardId, TrainerId
from elastic_refit.core.manifest import Manifest
from elastic_refit.core.membership import Membership, plan_membership
from elastic_refit.core.messages import (
    Answer,
    CommitOrder,
    Committed,
    Done,
    JoinOrder,
    Order,
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
from elastic_refit.engines.torch_engine import TorchReceiver
from elastic_refit.participant import RefitParticipant
from elastic_refit.transports.base import HeldWeights, Packing, WeightSource
from elastic_refit.transports.digests import digest_bucket
from elastic_refit.transports.registry import build_transport

__all__ = ["Layout", "RefitRanks", "RefitSeat", "RefitTimes"]

_WAIT_S = 300.0
_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES = -3, 256 << 10  # mallopt(3)
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Layout:
    """A model of ``num_tensors`` equal float32 tensors, ``size_bytes`` in all, and how it is packed."""

    size_bytes: int
    num_tensors: int
    packing: Packing

    def tensors(self) -> dict[str, torch.Tensor]:
        rows = self.size_bytes // self.num_tensors // 4
        return {f"w{number}": torch.full((rows,), float(number)) for number in range(self.num_tensors)}


class RefitSeat(BenchSeat):
    """The verbs of a rank that takes part in refits, as a trainer or as a shard with the plain torch receiver."""

    def __init__(self, backend: CommunicatorBackend) -> None:
        super().__init__(backend)
        torch.set_num_threads(1)
        self._participant: RefitParticipant | None = None
        self._fails_at: str | None = None
        self._resident = 0

    def take_part(self, member: Member, layout: Layout) -> None:
        limits = DeadlinesConfig().limits
        transport = build_transport("broadcast", self._backend)
        if self._participant is not None:
            self._participant.close()
        self._participant = RefitParticipant(member, transport, deadlines=limits, reach=self._reach)
        self._layout = layout
        if isinstance(member, TrainerId):
            self._source = self.make_source(member, layout)
        else:
            parameters = {name: torch.nn.Parameter(tensor) for name, tensor in layout.tensors().items()}
            self._receiver = TorchReceiver(torch.nn.ParameterDict(parameters), 0)

    def make_source(self, trainer: TrainerId, layout: Layout) -> WeightSource:
        return HeldWeights(layout.tensors())

    def carry_out(self, order: Order, secret: bytes = b"") -> Answer:
        participant = self._participant
        assert participant is not None, "take_part comes first"
        match order:
            case PrepareOrder():
                return participant.prepare(order)
            case JoinOrder():
                return participant.join(order, secret)
            case ReadyOrder() if isinstance(participant.member, TrainerId):
                return participant.pin(order, self._source, self._layout.packing)
            case ReadyOrder():
                return participant.pause(order, lambda: None)
            case TransferOrder() if isinstance(participant.member, TrainerId):
                return participant.send(order)
            case TransferOrder():
                return participant.receive(order, self._receiver)
            case CommitOrder():
                return participant.commit(order, self._receiver)
            case SettleOrder():
                return participant.settle(order, lambda function: function(self._receiver))
            case _:
                raise TypeError(f"not an order of these refits: {type(order).__name__}")

    def fail_at(self, phase: str | None) -> None:
        """Raise when the transfer has come to ``phase``; None: never."""
        self._fails_at = phase

    def mark_memory(self) -> None:
        """Count :meth:`peak_extra_bytes` from here. What is freed is given back at once, or it would be counted."""
        gc.collect()
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        libc.malloc_trim(0)
        with open("/proc/self/clear_refs", "w", encoding="ascii") as clear:
            clear.write("5")  # proc(5): the peak is what is resident now
        self._resident = _status_bytes("VmRSS")

    def peak_extra_bytes(self) -> int:
        """The most memory that was resident since, beyond what was resident then."""
        return _status_bytes("VmHWM") - self._resident

    def timed_digest(self, size: int, algorithm: str) -> float:
        buffer = torch.frombuffer(self.scratch(size), dtype=torch.uint8)
        digest_bucket(buffer[: 1 << 20], algorithm)
        start = time.perf_counter()
        digest_bucket(buffer, algorithm)
        return time.perf_counter() - start

    def _reach(self, moment: Moment) -> None:
        if moment.phase == self._fails_at:
            raise RuntimeError(f"told to fail at {moment.phase}")


def _status_bytes(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(f"{name}:"))


@dataclass(frozen=True, slots=True)
class RefitTimes:
    """Seconds of one refit: getting ready, moving the bytes, committing."""

    ready_s: float
    transfer_s: float
    commit_s: float

    @property
    def total_s(self) -> float:
        return self.ready_s + self.transfer_s + self.commit_s


class RefitRanks:
    """Processes that are trainers and shards. ``stop`` must be called, whatever happened."""

    def __init__(
        self,
        layout: Layout,
        *,
        trainers: int = 1,
        shards: int = 1,
        seat: type[RefitSeat] = RefitSeat,
        chunk_bytes: int = 1 << 20,
    ) -> None:
        self.epoch = 0
        self._num_trainers, self._num_shards = trainers, shards
        members: tuple[Member, ...] = (*map(TrainerId, range(trainers)), *map(ShardId, range(shards)))
        self.processes: dict[Member, RankProcess] = {
            member: RankProcess("tcp", seat=seat, chunk_bytes=chunk_bytes) for member in members
        }
        self._layout = layout
        self.take_part(members)

    def take_part(self, members: Iterable[Member]) -> None:
        """Give ``members`` new participants, which have joined and allocated nothing."""
        self.each(members, lambda member: ("take_part", (member, self._layout)))

    def stop(self) -> None:
        for process in self.processes.values():
            process.stop()

    def each(
        self, members: Iterable[Member], verb: Callable[[Member], tuple[str, tuple[object, ...]]]
    ) -> dict[Member, Any]:
        """Have all ``members`` do their verb at once; their results."""
        asked = list(members)
        for member in asked:
            name, arguments = verb(member)
            self.processes[member].start(name, *arguments)
        return {member: self.processes[member].finish(_WAIT_S) for member in asked}

    def build(self, *, without: ShardId | None = None) -> Membership:
        """A new group of everybody, or of everybody but one."""
        self.epoch += 1
        present = [shard for shard in map(ShardId, range(self._num_shards)) if shard != without]
        group = plan_membership(self._num_trainers, [1] * self._num_shards, present, epoch=self.epoch)
        prepared = self._order(group.members, PrepareOrder(self.epoch, 0), Prepared)
        addresses = tuple(each.addresses[0] for each in prepared.values())
        join, secret = JoinOrder(self.epoch, group, addresses), secrets.token_bytes(32)
        joined = self.each(group.members, lambda member: ("carry_out", (join, secret)))
        assert set(joined.values()) == {Done()}, joined
        return group

    def refit(self, group: Membership, version: int, *, commit: CommitMode = "streamed", start: int = 0) -> RefitTimes:
        """Push ``version``, from bucket ``start`` on; raises AssertionError if anybody does not come through."""
        began = time.perf_counter()
        manifest = self.ready(group, version, start)
        was_ready = time.perf_counter()
        answers = self.transfer(group, version, manifest, commit=commit, start=start)
        moved = time.perf_counter()
        sent = answers[TrainerId(0)]
        assert isinstance(sent, Sent), sent
        for shard in group.shard_ids:
            assert answers[shard] == Received(sent.digests), answers[shard]
        self._order(group.shard_ids, CommitOrder(group.epoch, version, sent.digests), Committed)
        return RefitTimes(was_ready - began, moved - was_ready, time.perf_counter() - moved)

    def ready(self, group: Membership, version: int, start: int = 0) -> Manifest:
        order = ReadyOrder(group.epoch, version, start)
        first = self.each(group.members, lambda member: ("carry_out", (order,)))[TrainerId(0)]
        assert isinstance(first, Ready), first
        assert first.manifest is not None
        return first.manifest

    def transfer(
        self, group: Membership, version: int, manifest: Manifest, *, commit: CommitMode, start: int = 0
    ) -> Mapping[Member, Answer]:
        order = TransferOrder(group.epoch, version, manifest, start, commit)
        return self.each(group.members, lambda member: ("carry_out", (order,)))

    def settle(self, members: Iterable[Member], version: int, *, roll_back: bool = False) -> dict[Member, Settled]:
        return self._order(members, SettleOrder(self.epoch, version, "measured", roll_back), Settled)

    def _order(self, members: Iterable[Member], order: Order, expected: type[A]) -> dict[Member, A]:
        answers = self.each(members, lambda member: ("carry_out", (order,)))
        good = {member: answer for member, answer in answers.items() if isinstance(answer, expected)}
        assert good.keys() == answers.keys(), answers
        return good
