"""Every fault does what it promises to a refit between real participants, and its record says where it landed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest

from elastic_refit.chaos import Fault, phases_of
from elastic_refit.control.host import ControlHost
from elastic_refit.control.setup import ChannelPlan
from elastic_refit.core import messages
from elastic_refit.core.attribution import AttributionView, attribute
from elastic_refit.core.evidence import Beacon, MemberEvidence, Testimony
from elastic_refit.core.ids import Member, ShardId, TrainerId
from elastic_refit.core.manifest import Manifest
from elastic_refit.core.membership import Membership, plan_membership
from elastic_refit.core.messages import Answer, Committed, PingOrder, Received, SettleOrder
from elastic_refit.core.verdict import Culprits, LinkFault, RefitRejected, TrainerFault, Verdict
from tests.refit_group import BUCKET_BYTES, LIMITS, Group, digests_sent
from tests.waiting import wait_until

T0, T1 = TrainerId(0), TrainerId(1)
S0, S1, S2 = SHARDS = ShardId(0), ShardId(1), ShardId(2)
ALL = (0, 1, 2)
DEADLINE_S = 30.0
NO_PATIENCE = dataclasses.replace(LIMITS, stall_s=1e-3, apply_s=1e-3, pack_s=1e-3, finalize_s=1e-3)
"""Whoever stands still is overdue at once."""


Attempt = Future[tuple[dict[Member, Answer], Manifest]]


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group(3, trainers=2, chaos=())
    yield group
    group.close()


@contextmanager
def one_thread(group: Group) -> Iterator[ThreadPoolExecutor]:
    """A thread for what hangs; nothing holds it any longer than the ``with`` body."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        try:
            yield thread
        finally:
            group.disarm()


@contextmanager
def under_way(group: Group, membership: Membership) -> Iterator[Attempt]:
    """A transfer that hangs; at the end everybody is freed."""
    with one_thread(group) as thread:
        attempt = thread.submit(group.transfer, membership, 1)
        try:
            yield attempt
        finally:
            group.disarm()
            for member in membership.members:
                group.settle(member, membership.epoch)
            attempt.result(timeout=DEADLINE_S)


def beacon_of(group: Group, member: Member) -> Beacon:
    return group.members[member].ping(PingOrder(0)).beacon


def verdict(
    group: Group,
    membership: Membership,
    answers: dict[Member, Answer] | None = None,
    *,
    suspects: Sequence[ShardId] = (),
) -> Verdict:
    """What follows from everybody's beacon, and from what they have answered."""
    evidence = []
    for rank, member in enumerate(membership.members):
        answer = (answers or {}).get(member)
        evidence.append(
            MemberEvidence(
                member,
                rank,
                fault=answer.sentence if isinstance(answer, messages.Fault) else None,
                fault_signature=answer.signature if isinstance(answer, messages.Fault) else None,
                testimony=answer if isinstance(answer, Testimony) else None,
                answered_ping=True,
                beacon=beacon_of(group, member),
            )
        )
    view = AttributionView(
        epoch=membership.epoch,
        num_buckets=group.num_buckets,
        deadlines=NO_PATIENCE,
        suspects=frozenset(suspects),
        chain=tuple(range(len(evidence))),
    )
    return attribute(evidence, view)


def wait_for_verdict(group: Group, membership: Membership, expected: object, suspects: Sequence[ShardId] = ()) -> None:
    """Return when everybody stands so that the evidence names whom it should; on a busy machine that takes a while."""
    wait_until(lambda: named_by(verdict(group, membership, suspects=suspects)) == expected, DEADLINE_S)


def named_by(found: Verdict) -> object:
    """The members with their rules, or the edge, or what else it is."""
    if isinstance(found, LinkFault):
        return found.edge
    if isinstance(found, Culprits | TrainerFault):
        return [(finding.member, finding.rule) for finding in found.findings]
    return found


# -- the working thread


@pytest.mark.parametrize("phase", ["before", "bucket:2"])
def test_a_wedge_stops_the_working_thread_outside_the_collective_and_the_rest_of_the_process_lives(
    group: Group, phase: str
) -> None:
    membership = group.build(1, ALL)
    group.arm(Fault("wedge", S1, 1, phase))
    with under_way(group, membership) as attempt:
        wait_until(lambda: group.landed() == [("wedge", phase)], DEADLINE_S)
        wait_for_verdict(group, membership, [(S1, 3)])
        beacon = beacon_of(group, S1)
        assert beacon.waiting_on not in ("recv", "send")
        assert beacon.applied == (1 if phase == "bucket:2" else -1)
        assert not attempt.done()


@pytest.mark.parametrize("victim", [S1, T1], ids=str)
def test_who_is_wedged_when_told_to_join_is_behind_those_that_connect(group: Group, victim: Member) -> None:
    group.arm(Fault("wedge", victim, 1, "joining:prepare"))
    with one_thread(group) as thread:
        joining = thread.submit(group.build, 1, ALL)
        wait_until(lambda: group.landed() == [("wedge", "joining:prepare")], DEADLINE_S)
        membership = plan_membership(2, [1, 1, 1], SHARDS, epoch=1)
        wait_for_verdict(group, membership, [(victim, 3)])
        group.saboteurs[victim].disarm()
        assert joining.result(timeout=DEADLINE_S) == membership


def test_a_wedged_commit_is_behind_everybody(group: Group) -> None:
    membership = group.build(1, ALL)
    answers, _ = group.transfer(membership, 1)
    group.arm(Fault("wedge", S2, 1, "finalizing"))
    with one_thread(group) as thread:
        committing = thread.submit(group.commit, 2, 1, 1, digests_sent(answers))
        for shard in (0, 1):
            assert group.commit(shard, 1, 1, digests_sent(answers)) == Committed(1)
        wait_until(lambda: group.landed() == [("wedge", "finalizing")], DEADLINE_S)
        assert group.members[S2].serving_version is None
        assert beacon_of(group, S2).phase == "finalizing"
        wait_for_verdict(group, membership, [(S2, 3)])
        group.saboteurs[S2].disarm()
        assert committing.result(timeout=DEADLINE_S) == Committed(1)


def test_a_trainer_that_is_wedged_while_it_packs_is_named(group: Group) -> None:
    membership = group.build(1, ALL)
    group.arm(Fault("wedge", T1, 1, "packing"))
    with one_thread(group) as thread:
        pinning = thread.submit(group.pin, messages.ReadyOrder(1, 1, 0))
        wait_until(lambda: group.landed() == [("wedge", "packing")], DEADLINE_S)
        wait_for_verdict(group, membership, [(T1, 3)])
        group.saboteurs[T1].disarm()
        assert isinstance(pinning.result(timeout=DEADLINE_S), messages.Ready)


def test_a_wedge_ends_by_itself_where_it_was_told_how_long(group: Group) -> None:
    group.arm(Fault("wedge", S0, 1, "bucket:1", seconds=0.05))
    group.refit(1, epoch=1, shards=ALL)
    assert group.landed() == [("wedge", "bucket:1")]


def test_who_is_slow_is_late_in_every_bucket_and_the_refit_lands(group: Group) -> None:
    group.arm(Fault("slow", S1, 1, "bucket:*", seconds=0.02))
    began = time.monotonic()
    group.refit(1, epoch=1, shards=ALL)
    assert time.monotonic() - began >= 0.02 * group.num_buckets
    assert group.landed() == [("slow", f"bucket:{bucket}") for bucket in range(group.num_buckets)]
    assert group.holds_all(1)


@pytest.mark.parametrize(("member", "phase"), [(S1, "finalizing"), (T0, "packing")])
def test_a_delay_may_be_of_several_with_a_tick_after_each(group: Group, member: Member, phase: str) -> None:
    group.arm(Fault("slow", member, 1, phase, seconds=0.03, times=3))
    began = time.monotonic()
    group.refit(1, epoch=1, shards=ALL)
    assert time.monotonic() - began >= 0.09
    assert group.landed() == [("slow", phase)]


# -- what the receiver does with the bytes


def test_a_receiver_that_raises_reports_its_own_fault_and_is_named(group: Group) -> None:
    membership = group.build(1, ALL)
    group.arm(Fault("raise", S0, 1, "bucket:1"))
    answers, _ = group.transfer(membership, 1)
    assert isinstance(answers[S0], messages.Fault), answers[S0]
    assert group.landed() == [("raise", "bucket:1")]
    assert named_by(verdict(group, membership, answers)) == [(S0, 1)]


def test_receivers_that_all_raise_say_the_same_so_it_is_the_weights(group: Group) -> None:
    membership = group.build(1, ALL)
    for shard in SHARDS:
        group.arm(Fault("raise", shard, 1, "bucket:1"))
    answers, _ = group.transfer(membership, 1)
    found = verdict(group, membership, answers)
    assert isinstance(found, RefitRejected), found
    assert found.bucket == 1


def differing(group: Group, answers: dict[Member, Answer]) -> dict[ShardId, list[int]]:
    """By shard that differs from the trainer, the buckets in which it does."""
    sent = digests_sent(answers)
    found = {}
    for shard in SHARDS:
        received = answers[shard]
        assert isinstance(received, Received), received
        if wrong := [
            bucket for bucket, pair in enumerate(zip(sent, received.digests, strict=True)) if len({*pair}) > 1
        ]:
            found[shard] = wrong
    return found


@pytest.mark.parametrize("victim", SHARDS)
def test_what_is_corrupted_in_the_own_copy_differs_there_alone(group: Group, victim: ShardId) -> None:
    membership = group.build(1, ALL)
    group.arm(Fault("corrupt", victim, 1, "bucket:1"))
    answers, _ = group.transfer(membership, 1)
    assert differing(group, answers) == {victim: [1]}
    assert group.landed() == [("corrupt", "bucket:1")]
    refused = group.commit(victim.index, 1, 1, digests_sent(answers))
    assert isinstance(refused, messages.Fault)
    assert "DigestMismatch" in refused.sentence


@pytest.mark.parametrize("bucket_bytes", [BUCKET_BYTES, 512], ids=["shared window", "bytes on links"])
@pytest.mark.parametrize(("victim", "differ"), [(T1, SHARDS), (S0, SHARDS), (S1, (S1, S2)), (S2, (S2,))], ids=str)
def test_what_is_corrupted_on_a_link_differs_in_everybody_behind_it(
    group: Group, victim: Member, differ: tuple[ShardId, ...], bucket_bytes: int
) -> None:
    group.packing = dataclasses.replace(group.packing, bucket_bytes=bucket_bytes)
    membership = group.build(1, ALL)
    group.arm(Fault("corrupt_link", victim, 1, "bucket:1"))
    answers, _ = group.transfer(membership, 1)
    assert differing(group, answers) == {shard: [1] for shard in differ}
    assert group.landed() == [("corrupt_link", "bucket:1")]


def test_a_link_that_corrupts_always_does_so_to_what_is_resent(group: Group) -> None:
    group.arm(Fault("corrupt_link", S1, 1, "bucket:*"))
    for epoch in (1, 2):
        membership = group.build(epoch, ALL)
        answers, manifest = group.transfer(membership, 1)
        everything = list(range(manifest.num_buckets))
        assert differing(group, answers) == {S1: everything, S2: everything}
        for shard in SHARDS:
            group.settle(shard, epoch, roll_back=True)
    assert group.landed()[0] == ("corrupt_link", "bucket:0")
    assert group.landed()[-1] == ("corrupt_link", f"retry:{group.num_buckets - 1}")


# -- the network


@pytest.mark.parametrize(("victim", "peer"), [(S1, S2), (S2, S1), (S0, S1)], ids=str)
def test_a_partition_stops_two_live_neighbours_that_only_an_abort_frees(
    group: Group, victim: ShardId, peer: ShardId
) -> None:
    membership = group.build(1, ALL)
    group.arm(Fault("partition", victim, 1, "bucket:2", peer=peer))
    up, down = sorted([victim, peer])
    ranks = membership.rank_of(up), membership.rank_of(down)
    with under_way(group, membership) as attempt:
        wait_until(lambda: group.landed() == [("partition", "bucket:2")], DEADLINE_S)
        wait_for_verdict(group, membership, ranks)
        wait_for_verdict(group, membership, [(victim, 4)], suspects=[victim])
        assert (beacon_of(group, down).waiting_on, beacon_of(group, down).waiting_peer) == ("recv", ranks[0])
        assert not attempt.done(), "both ends are alive, and no byte moves between them"
    for member in (up, down):
        assert isinstance(attempt.result()[0][member], Testimony)
    group.refit(1, epoch=2, shards=ALL)


def test_an_end_that_is_cut_off_sends_no_beacon_and_obeys_no_order_until_it_is_back(group: Group) -> None:
    with closing(ChannelPlan()) as plan:
        ends = {member: plan.end(str(member)) for member in SHARDS}
        with closing(ControlHost(plan.host(), interval_s=0.01)) as host:
            for member, end in ends.items():
                group.members[member].open_channel(end)
            membership = group.build(1, ALL)
            group.arm(Fault("control_partition", S1, 1, "bucket:1"))
            group.arm(Fault("wedge", S0, 1, "bucket:3"))
            with under_way(group, membership):
                wait_until(lambda: len(group.records) == 2, DEADLINE_S)
                assert group.landed() == [("control_partition", "bucket:1"), ("wedge", "bucket:3")]
                _hear_on(host, S2)
                seen = host.heard().get(str(S1))
                _hear_on(host, S2)
                assert host.heard().get(str(S1)) == seen
                host.order_abort(1, "a test")
                wait_until(lambda: beacon_of(group, S2).phase == "aborted", DEADLINE_S)
                assert group.members[S1]._watchdog.aborted_through == -1
                group.saboteurs[S1].disarm()
                wait_until(lambda: group.members[S1]._watchdog.aborted_through == 1, DEADLINE_S)


def _hear_on(host: ControlHost, shard: ShardId) -> None:
    """Return when several more beacons of ``shard`` have come."""
    goal = time.monotonic() + 0.5
    wait_until(lambda: (heard := host.heard().get(str(shard))) is not None and heard.at_s > goal, DEADLINE_S)


def test_a_refit_lands_though_beacons_and_orders_of_a_rank_are_cut_off(group: Group) -> None:
    group.arm(Fault("control_partition", S1, 1, "bucket:1"))
    group.refit(1, epoch=1, shards=ALL)
    assert group.holds_all(1)


def test_a_stuck_abort_answers_no_settle_though_the_blocked_call_has_left(group: Group) -> None:
    shard, waiting = group.receive_from_nobody(group.build(1, ALL))
    group.arm(Fault("abort_stuck", shard, 1, "settle"))
    with one_thread(group) as thread:
        settling = thread.submit(group.members[shard].settle, SettleOrder(1, 1, "a test", roll_back=False))
        assert isinstance(waiting.result(timeout=DEADLINE_S), Testimony)
        wait_until(lambda: group.landed() == [("abort_stuck", "settle")], DEADLINE_S)
        assert not settling.done()
        group.saboteurs[shard].disarm()
        assert isinstance(settling.result(timeout=DEADLINE_S), messages.Settled)


# -- when


def test_a_fault_of_a_recovery_strikes_only_there_and_one_of_the_first_attempt_not_again(group: Group) -> None:
    for phase in sorted(phases_of("control_partition", S1) - {"idle", "loaded", "bucket", "retry"}):
        group.arm(Fault("control_partition", S1, 1, phase))
    for phase in ("retry", "bucket:1", "bucket:4", "retry:4"):
        group.arm(Fault("control_partition", S1, 1, phase))
    group.arm(Fault("raise", S0, 1, "bucket:2"))
    group.transfer(group.build(1, ALL), 1)
    start = 1 + min(group.settle(shard, 1).applied_through for shard in (S1, S2))
    first = [record.phase for record in group.records if record.epoch == 1]
    assert first == ["joining:prepare", "joining:connect", "before", "bucket:1", "bucket:2", "settle"]
    group.refit(1, epoch=2, shards=(1, 2), start=start)
    second = [record.phase for record in group.records if record.epoch == 2]
    assert second == ["rebuild", f"retry:{start}", "retry:4"]


def test_a_fault_that_was_armed_for_a_later_refit_waits_for_it(group: Group) -> None:
    group.arm(Fault("slow", S1, 2, "ack", seconds=0.0))
    group.refit(1, epoch=1, shards=ALL)
    assert group.landed() == []
    group.transfer(group.build(2, ALL, version=2), 2)
    assert group.landed() == [("slow", "ack")]


def test_a_trainer_is_struck_where_it_joins_packs_sends_and_has_sent(group: Group) -> None:
    phases = sorted(phases_of("control_partition", T1) - {"idle", "bucket", "retry", "rebuild", "settle"})
    for phase in (*phases, "bucket:1"):
        group.arm(Fault("control_partition", T1, 1, phase))
    group.refit(1, epoch=1, shards=ALL)
    assert [phase for _, phase in group.landed()] == [
        "joining:prepare",
        "joining:connect",
        "packing",
        "before",
        "bucket:1",
        "ack",
    ]
