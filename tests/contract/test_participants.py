"""A refit between participants in threads of one process, over real sockets: what outlives a broken attempt."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field

import pytest
import torch

from elastic_refit.communicators.tcp import TcpBackend
from elastic_refit.config import DeadlinesConfig
from elastic_refit.control.host import ControlHost
from elastic_refit.control.setup import ChannelPlan
from elastic_refit.core.evidence import Beacon, Testimony
from elastic_refit.core.ids import Member, ShardId, TrainerId
from elastic_refit.core.manifest import Manifest, TensorSpec
from elastic_refit.core.membership import Membership, plan_membership
from elastic_refit.core.messages import (
    Answer,
    CommitOrder,
    Committed,
    Done,
    Fault,
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
from elastic_refit.transports.base import WeightSource
from elastic_refit.transports.broadcast import BroadcastTransport
from elastic_refit.transports.packing import tensor_specs
from tests.waiting import wait_until

LIMITS = DeadlinesConfig().limits
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

    def __init__(self, shards: int) -> None:
        self.weights = Weights(0)
        self.engines = {ShardId(index): Engine() for index in range(shards)}
        everybody: tuple[Member, ...] = (TrainerId(0), *self.engines)
        self.members: dict[Member, RefitParticipant] = {
            member: RefitParticipant(member, TcpBackend(chunk_bytes=1024), BroadcastTransport(), deadlines=LIMITS)
            for member in everybody
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
        ready = self.members[TrainerId(0)].pin(ReadyOrder(group.epoch, version, start), self.weights, BUCKET_BYTES)
        assert isinstance(ready, Ready)
        assert ready.manifest is not None
        order = TransferOrder(group.epoch, version, ready.manifest, start)

        def move(member: Member) -> Answer:
            if isinstance(member, TrainerId):
                return self.members[member].send(order)
            return self.members[member].receive(order, self.engines[member])

        return self.everywhere(group, move), ready.manifest

    def receive_from_nobody(self, group: Membership) -> tuple[ShardId, Future[Answer]]:
        """The last shard, told to receive what the trainer has ready and does not send."""
        ready = self.members[TrainerId(0)].pin(ReadyOrder(group.epoch, 1, 0), self.weights, BUCKET_BYTES)
        assert isinstance(ready, Ready)
        assert ready.manifest is not None
        order, shard = TransferOrder(group.epoch, 1, ready.manifest, 0), group.shard_ids[-1]
        return shard, self._threads.submit(self.members[shard].receive, order, self.engines[shard])

    def settle(self, member: Member, epoch: int, version: int = 1, *, roll_back: bool = False) -> Settled:
        engine = self.engines.get(member) if isinstance(member, ShardId) else None
        in_worker = None if engine is None else (lambda function: function(engine))
        answer = self.members[member].settle(SettleOrder(epoch, version, "a test", roll_back), in_worker)
        assert isinstance(answer, Settled)
        return answer

    def commit(self, shard: int, epoch: int, version: int, digests: tuple[int, ...]) -> Answer:
        return self.members[ShardId(shard)].commit(CommitOrder(epoch, version, digests), self.engines[ShardId(shard)])

    def holds_all(self, shard: int) -> bool:
        held = self.engines[ShardId(shard)].held
        return held.keys() == self.weights.tensors.keys() and all(
            torch.equal(held[name], tensor) for name, tensor in self.weights.tensors.items()
        )


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group(shards=3)
    yield group
    group.close()


def _sent(answers: dict[Member, Answer]) -> tuple[int, ...]:
    sent = answers[TrainerId(0)]
    assert isinstance(sent, Sent)
    return sent.digests


def _break_in_bucket_2(group: Group, victim: int, version: int = 1) -> tuple[Membership, dict[Member, Answer]]:
    """A refit in which the victim's process, as far as the others can tell, dies while it applies bucket 2."""
    membership = group.build(1, [0, 1, 2])

    def die(fed: int) -> None:
        if len(group.members[ShardId(victim)]._update.digests) == 2:  # type: ignore[union-attr]
            raise RuntimeError("the process is gone")

    group.engines[ShardId(victim)].on_feed = die
    answers, manifest = group.transfer(membership, version)
    assert manifest.num_buckets > 6, "too few buckets to break off in the middle"
    return membership, answers


def test_a_whole_refit_is_bit_for_bit_and_served_only_after_the_commit(group: Group) -> None:
    membership = group.build(1, [0, 1, 2])
    answers, _ = group.transfer(membership, 1)
    digests = _sent(answers)
    for shard in range(3):
        assert answers[ShardId(shard)] == Received(digests)
        assert group.members[ShardId(shard)].serving_version is None
        assert group.commit(shard, 1, 1, digests) == Committed(1)
        assert group.members[ShardId(shard)].serving_version == 1
        assert group.holds_all(shard)


def test_the_victims_of_a_death_testify_and_only_the_member_itself_reports_a_fault(group: Group) -> None:
    _, answers = _break_in_bucket_2(group, victim=1)
    own = answers[ShardId(1)]
    assert isinstance(own, Fault)
    assert "the process is gone" in own.sentence
    for member in (ShardId(0), ShardId(2)):
        assert isinstance(answers[member], Testimony), answers[member]
    assert not isinstance(answers[TrainerId(0)], Fault)


def test_survivors_go_on_where_they_were_and_are_fed_each_tensor_once(group: Group) -> None:
    _break_in_bucket_2(group, victim=1)
    settled = {member: group.settle(member, 1) for member in (TrainerId(0), ShardId(0), ShardId(2))}
    start = min(settled[ShardId(0)].applied_through, settled[ShardId(2)].applied_through) + 1
    assert start >= 1, "nothing was kept"
    assert group.members[ShardId(2)].serving_version is None
    answers, manifest = group.transfer(group.build(2, [0, 2]), 1, start)
    digests = _sent(answers)
    assert len(digests) == manifest.num_buckets
    for shard in (0, 2):
        assert answers[ShardId(shard)] == Received(digests)
        assert group.commit(shard, 2, 1, digests) == Committed(1)
        assert group.holds_all(shard)
        assert sorted(group.engines[ShardId(shard)].fed) == sorted(group.weights.tensors)
        assert group.engines[ShardId(shard)].calls == ["begin", "finish 1"]


def test_an_update_that_is_rolled_back_leaves_nothing_of_it_for_the_next(group: Group) -> None:
    _break_in_bucket_2(group, victim=1)
    settled = group.settle(ShardId(0), 1, roll_back=True)
    assert settled.applied_through >= 0, "the ledger must hear of what was taken in"
    assert settled.serving_version is None
    assert group.settle(ShardId(0), 1).applied_through == -1
    assert group.engines[ShardId(0)].calls == ["begin", "rollback"]
    group.weights = Weights(2)
    answers, _ = group.transfer(group.build(2, [0]), 2)
    assert group.commit(0, 2, 2, _sent(answers)) == Committed(2)
    assert group.holds_all(0)


def test_a_shard_that_had_committed_takes_part_in_the_retry_and_is_fed_nothing(group: Group) -> None:
    answers, manifest = group.transfer(group.build(1, [0, 1, 2]), 1)
    digests = _sent(answers)
    assert group.commit(0, 1, 1, digests) == Committed(1)
    through = {shard: group.settle(ShardId(shard), 1).applied_through for shard in (0, 1)}
    assert through == {0: manifest.num_buckets - 1, 1: manifest.num_buckets - 1}
    answers, _ = group.transfer(group.build(2, [0, 1]), 1, manifest.num_buckets)
    for shard in (0, 1):
        assert answers[ShardId(shard)] == Received(digests)
        assert group.commit(shard, 2, 1, digests) == Committed(1)
    assert group.engines[ShardId(0)].calls == ["begin", "finish 1"]
    assert group.holds_all(1)


def test_what_a_shard_holds_of_an_older_version_is_no_progress_with_this_one(group: Group) -> None:
    answers, _ = group.transfer(group.build(1, [0, 1, 2]), 1)
    assert group.commit(0, 1, 1, _sent(answers)) == Committed(1)
    settled = group.settle(ShardId(0), 1, version=2)
    assert settled.applied_through == -1
    assert settled.serving_version == 1


def test_other_digests_than_the_senders_are_refused_and_never_served(group: Group) -> None:
    answers, _ = group.transfer(group.build(1, [0, 1, 2]), 1)
    digests = _sent(answers)
    refused = group.commit(0, 1, 1, (digests[0] ^ 1, *digests[1:]))
    assert isinstance(refused, Fault)
    assert "DigestMismatch" in refused.sentence
    assert group.members[ShardId(0)].serving_version is None
    assert "finish 1" not in group.engines[ShardId(0)].calls


def test_orders_of_an_epoch_that_is_over_are_refused(group: Group) -> None:
    group.build(1, [0, 1, 2])
    second = group.build(2, [0, 1, 2])
    shard = group.members[ShardId(0)]
    for late in (shard.prepare(PrepareOrder(1, 0)), shard.join(JoinOrder(1, second, ()), b"")):
        assert isinstance(late, Testimony), "an order that is too late is not the fault of who gets it"
        assert late.kind == "aborted"


def test_an_epoch_that_was_aborted_before_the_order_came_is_not_entered(group: Group) -> None:
    membership = group.build(1, [0, 1, 2])
    for member in membership.members:
        group.settle(member, 1)
    order = ReadyOrder(1, 1, 0)
    answer = group.members[TrainerId(0)].pin(order, group.weights, BUCKET_BYTES)
    assert isinstance(answer, Testimony)
    assert answer.kind == "aborted"


def test_a_settle_frees_whoever_waits_for_a_peer_that_never_comes(group: Group) -> None:
    shard, waiting = group.receive_from_nobody(group.build(1, [0, 1, 2]))
    _wait_until_in_the_collective(group.members[shard])
    assert group.settle(shard, 1).applied_through == -1
    assert isinstance(waiting.result(timeout=30), Testimony)
    assert group.engines[shard].calls == []


def test_a_member_reports_to_the_channel_while_it_works_and_obeys_it(group: Group) -> None:
    with closing(ChannelPlan()) as plan:
        ends = {member: plan.end(str(member)) for member in group.members}
        with closing(ControlHost(plan.host())) as host:
            for member, end in ends.items():
                group.members[member].open_channel(end)
            membership = group.build(1, [0, 1, 2])
            shard, waiting = group.receive_from_nobody(membership)
            beacon = wait_until(lambda: _waits_for_bytes(host, str(shard)), timeout_s=30)
            assert beacon is not None
            assert (beacon.epoch, beacon.phase, beacon.entered, beacon.completed) == (1, "in_collective", 0, -1)
            host.order_abort(1, "shard[1] is frozen")
            answer = waiting.result(timeout=30)
            assert isinstance(answer, Testimony)
            assert "shard[1] is frozen" in answer.reason
            wait_until(lambda: host.heard()[str(shard)].beacon.phase == "aborted", timeout_s=30)
            late = group.members[TrainerId(0)].pin(ReadyOrder(1, 1, 0), group.weights, BUCKET_BYTES)
            assert isinstance(late, Testimony), "an order of an epoch that was aborted is not carried out"


def _waits_for_bytes(host: ControlHost, name: str) -> Beacon | None:
    heard = host.heard().get(name)
    return heard.beacon if heard is not None and heard.beacon.waiting_on == "recv" else None


def _wait_until_in_the_collective(participant: RefitParticipant) -> None:

    wait_until(lambda: participant.ping(PingOrder(1)).beacon.waiting_on == "recv", timeout_s=30)


def test_what_a_rank_waited_for_is_still_known_after_it_was_broken_off(group: Group) -> None:
    group.build(1, [0, 1, 2])
    ready = group.members[TrainerId(0)].pin(ReadyOrder(1, 1, 0), group.weights, BUCKET_BYTES)
    assert isinstance(ready, Ready)
    assert ready.manifest is not None
    order, shard = TransferOrder(1, 1, ready.manifest, 0), group.members[ShardId(1)]
    with ThreadPoolExecutor(max_workers=1) as thread:
        waiting = thread.submit(shard.receive, order, group.engines[ShardId(1)])
        _wait_until_in_the_collective(shard)
        group.settle(ShardId(1), 1)
        assert isinstance(waiting.result(timeout=30), Testimony)
    beacon = shard.ping(PingOrder(1)).beacon
    assert (beacon.phase, beacon.waiting_on, beacon.waiting_peer) == ("aborted", "recv", 1)
    assert (beacon.entered, beacon.completed) == (0, -1)
