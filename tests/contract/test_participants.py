"""A refit between participants in threads of one process, over real sockets: what outlives a broken attempt."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch

from elastic_refit.control.host import ControlHost
from elastic_refit.control.setup import ChannelPlan
from elastic_refit.core.evidence import Beacon, Testimony
from elastic_refit.core.ids import Member, ShardId, TrainerId
from elastic_refit.core.membership import Membership
from elastic_refit.core.messages import (
    Answer,
    Committed,
    Fault,
    JoinOrder,
    PingOrder,
    PrepareOrder,
    Ready,
    ReadyOrder,
    Received,
    Settled,
    SettleOrder,
    TransferOrder,
)
from elastic_refit.participant import RefitParticipant
from tests.refit_group import Group, Weights, digests_sent
from tests.waiting import wait_until


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group(shards=3)
    yield group
    group.close()


def _break_in_bucket_2(group: Group, victim: int, version: int = 1) -> tuple[Membership, dict[Member, Answer]]:
    """A refit in which the victim's process, as far as the others can tell, dies as it applies a third bucket."""
    membership = group.build(1, [0, 1, 2])

    def die(fed: int) -> None:
        if len(group.members[ShardId(victim)]._update.digests) >= 2:  # type: ignore[union-attr]
            raise RuntimeError("the process is gone")

    group.engines[ShardId(victim)].on_feed = die
    answers, manifest = group.transfer(membership, version)
    assert manifest.num_buckets > 6, "too few buckets to break off in the middle"
    return membership, answers


def test_a_whole_refit_is_bit_for_bit_and_served_only_after_the_commit(group: Group) -> None:
    membership = group.build(1, [0, 1, 2])
    answers, _ = group.transfer(membership, 1)
    digests = digests_sent(answers)
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
    digests = digests_sent(answers)
    assert len(digests) == manifest.num_buckets
    for shard in (0, 2):
        assert answers[ShardId(shard)] == Received(digests)
        assert group.commit(shard, 2, 1, digests) == Committed(1)
        assert group.holds_all(shard)
        assert sorted(group.engines[ShardId(shard)].fed) == sorted(spec.name for spec in group.weights.specs())
        assert group.engines[ShardId(shard)].calls == ["begin", "finish 1"]


def test_a_trainer_leaves_a_broken_attempt_only_when_it_has_packed_what_it_had_begun(group: Group) -> None:
    """Or the retry would pack into a buffer that the attempt before still writes to."""
    packing, may_pack = threading.Event(), threading.Event()

    class Slow(Weights):
        def materialize(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
            if "w4" in names and not may_pack.is_set():
                packing.set()
                assert may_pack.wait(30)
            return super().materialize(names)

    def die(member: Member, phase: str) -> None:
        if (member, phase) == (ShardId(0), "before"):
            assert packing.wait(30)
            raise RuntimeError("the process is gone")

    group.weights, group.on_reach = Slow(1), die
    with ThreadPoolExecutor(max_workers=2) as thread:
        attempt = thread.submit(group.transfer, group.build(1, [0, 1]), 1)
        assert packing.wait(30)
        order = SettleOrder(1, 1, "a test", roll_back=False)
        settling = thread.submit(group.members[TrainerId(0)].settle, order)
        assert not attempt.done()
        may_pack.set()
        attempt.result(timeout=60)
        assert isinstance(settling.result(timeout=60), Settled)
    group.on_reach = lambda member, phase: None
    group.refit(1, epoch=2, shards=[1], start=group.settle(ShardId(1), 1).applied_through + 1)
    assert group.holds_all(1)


def test_an_update_that_is_rolled_back_leaves_nothing_of_it_for_the_next(group: Group) -> None:
    _break_in_bucket_2(group, victim=1)
    settled = group.settle(ShardId(0), 1, roll_back=True)
    assert settled.applied_through >= 0, "the ledger must hear of what was taken in"
    assert settled.serving_version is None
    assert group.settle(ShardId(0), 1).applied_through == -1
    assert group.engines[ShardId(0)].calls == ["begin", "rollback"]
    group.weights = Weights(2)
    answers, _ = group.transfer(group.build(2, [0]), 2)
    assert group.commit(0, 2, 2, digests_sent(answers)) == Committed(2)
    assert group.holds_all(0)


def test_a_shard_that_had_committed_takes_part_in_the_retry_and_is_fed_nothing(group: Group) -> None:
    answers, manifest = group.transfer(group.build(1, [0, 1, 2]), 1)
    digests = digests_sent(answers)
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
    assert group.commit(0, 1, 1, digests_sent(answers)) == Committed(1)
    settled = group.settle(ShardId(0), 1, version=2)
    assert settled.applied_through == -1
    assert settled.serving_version == 1


def test_other_digests_than_the_senders_are_refused_and_never_served(group: Group) -> None:
    answers, _ = group.transfer(group.build(1, [0, 1, 2]), 1)
    digests = digests_sent(answers)
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
    answer = group.members[TrainerId(0)].pin(order, group.weights, group.packing)
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
            late = group.members[TrainerId(0)].pin(ReadyOrder(1, 1, 0), group.weights, group.packing)
            assert isinstance(late, Testimony), "an order of an epoch that was aborted is not carried out"


def _waits_for_bytes(host: ControlHost, name: str) -> Beacon | None:
    heard = host.heard().get(name)
    return heard.beacon if heard is not None and heard.beacon.waiting_on == "recv" else None


def _wait_until_in_the_collective(participant: RefitParticipant) -> None:

    wait_until(lambda: participant.ping(PingOrder(1)).beacon.waiting_on == "recv", timeout_s=30)


def test_what_a_rank_waited_for_is_still_known_after_it_was_broken_off(group: Group) -> None:
    group.build(1, [0, 1, 2])
    ready = group.members[TrainerId(0)].pin(ReadyOrder(1, 1, 0), group.weights, group.packing)
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
