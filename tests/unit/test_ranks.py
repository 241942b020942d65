"""A member of several ranks: its names, and its answer from theirs."""

from __future__ import annotations

import pytest

from elastic_refit.core.evidence import Beacon, Testimony
from elastic_refit.core.ids import ProcessId, ShardId, TrainerId
from elastic_refit.core.manifest import differing_buckets
from elastic_refit.core.membership import plan_membership
from elastic_refit.core.messages import Answer, Committed, Done, Fault, Pong, Prepared, Received, Settled
from elastic_refit.ranks import furthest_behind, identities_in, member_of, rank_name, worst_of

OWN = range(3, 5)
FAULT = Fault("RuntimeError: no", "RuntimeError: no")


def process(pid: int) -> ProcessId:
    return ProcessId("here", pid, 7, pid)


def test_the_first_rank_has_the_members_name_and_each_name_tells_the_member() -> None:
    names = [rank_name(ShardId(2, 1), rank) for rank in range(3)]
    assert names == ["shard[2]#1", "shard[2]#1/1", "shard[2]#1/2"]
    assert {member_of(name) for name in names} == {"shard[2]#1"}
    assert member_of(str(TrainerId(0))) == "trainer[0]"


def test_every_rank_of_a_group_has_an_identity_of_its_own_in_rank_order() -> None:
    group = plan_membership(2, [2, 1], [ShardId(0), ShardId(1)], epoch=1)
    assert identities_in(group) == ("trainer[0]", "trainer[1]", "shard[0]", "shard[0]/1", "shard[1]")


def test_a_lone_rank_answers_in_its_own_words() -> None:
    answers: list[Answer] = [Done(), FAULT, Received((1, 2)), Committed(3), Testimony("aborted", None, "so")]
    for answer in answers:
        assert worst_of([answer]) == answer


def test_a_fault_beats_a_testimony_and_a_testimony_any_success() -> None:
    lost = Testimony("peer_lost", 1, "gone")
    assert worst_of([Done(), lost, FAULT]) == Fault(FAULT.signature, f"rank 2: {FAULT.sentence}")
    assert worst_of([Done(), lost]) == lost


def test_a_testimony_about_somebody_else_beats_one_about_a_sibling() -> None:
    sibling, other = Testimony("peer_lost", 4, "sibling"), Testimony("peer_lost", 1, "other")
    unnamed = Testimony("aborted", None, "nobody")
    assert worst_of([sibling, other, unnamed], OWN) == other
    assert worst_of([unnamed, sibling], OWN) == sibling


def test_a_member_is_prepared_with_the_addresses_of_all_its_ranks_in_their_order() -> None:
    answer = worst_of([Prepared(("b",), (), (process(1), process(2))), Prepared(("a",), (), (process(1), process(3)))])
    assert answer == Prepared(("b", "a"), (), (process(1), process(2), process(3)))


def test_buckets_in_which_ranks_differ_equal_no_digest_that_was_sent() -> None:
    answer = worst_of([Received((5, 6, 7)), Received((5, 9, 7))])
    assert isinstance(answer, Received)
    for sent in ((5, 6, 7), (5, 9, 7)):
        assert differing_buckets(sent, answer.digests) == [1]
    assert worst_of([Received((5,)), Received((5, 6))]) == Received((5,))


def test_a_member_has_settled_as_far_as_its_slowest_rank() -> None:
    answers = [Settled(4, 0.1, serving_version=2, is_beside=True), Settled(1, 0.3, serving_version=None)]
    assert worst_of(answers) == Settled(1, 0.3, serving_version=None, is_beside=False, furthest=4)
    assert worst_of([Settled(4, 0.1, 2), Settled(4, 0.1, 2)]) == Settled(4, 0.1, 2, furthest=4)


@pytest.mark.parametrize(
    ("ranks", "mixed_through"),
    [
        ([Settled(3, 0.1), Settled(-1, 0.1, serving_version=1)], 3),
        ([Settled(2, 0.1), Settled(0, 0.1)], 2),
        ([Settled(-1, 0.1, serving_version=1), Settled(-1, 0.1, serving_version=1)], None),
        ([Settled(5, 0.1, serving_version=2), Settled(5, 0.1, serving_version=2)], None),
        ([Settled(3, 0.1, serving_version=1, is_beside=True), Settled(-1, 0.1, 1, is_beside=True)], None),
        ([Settled(5, 0.1, serving_version=2, is_beside=True), Settled(5, 0.1, 1, is_beside=True)], 5),
    ],
)
def test_a_member_is_a_mixture_as_soon_as_one_of_its_ranks_is(ranks: list[Settled], mixed_through: int | None) -> None:
    answer = worst_of(ranks)
    assert isinstance(answer, Settled)
    assert answer.mixed_through == mixed_through


@pytest.mark.parametrize("answers", [[Committed(1), Committed(2)], [Done(), Committed(1)]])
def test_ranks_that_disagree_are_a_fault_of_the_member(answers: list[Answer]) -> None:
    answer = worst_of(answers)
    assert isinstance(answer, Fault)
    assert answer.signature == "RanksDiffer"


def test_the_beacon_is_that_of_the_rank_that_holds_the_others_up() -> None:
    ahead = Beacon(3, entered=5, completed=4, applied=4, phase="in_collective")
    behind = Beacon(3, entered=2, completed=2, applied=1, phase="applying", tick_age_s=0.1)
    stuck = Beacon(3, entered=2, completed=2, applied=1, phase="applying", tick_age_s=9.0)
    late = Beacon(2, entered=8, completed=8, applied=8)
    assert furthest_behind([ahead, behind]) == behind
    assert furthest_behind([behind, stuck, ahead]) == stuck
    assert furthest_behind([behind, late]) == late
    assert worst_of([Pong(ahead, (process(1),)), Pong(behind, (process(2),))]) == Pong(behind, (process(1), process(2)))
