"""What holds of every verdict, whatever was observed."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from elastic_refit.core.attribution import AttributionView, attribute
from elastic_refit.core.evidence import Beacon, MemberEvidence, WaitingOn
from elastic_refit.core.ids import Member, ShardId, TrainerId
from elastic_refit.core.verdict import Culprits, Finding, LinkFault, Unattributed, Verdict
from tests.chains import EPOCH, LIMITS, aborted, lost

Evidence = list[MemberEvidence]

BUCKETS = st.integers(0, 3)
PHASES = st.sampled_from(
    ["preparing", "joining", "pausing", "packing", "in_collective", "applying", "finalizing", "done", "aborted"]
)
WAITING: st.SearchStrategy[WaitingOn] = st.sampled_from(get_args(WaitingOn))
MAYBE = st.sampled_from([None, None, True, False])


@st.composite
def beacons(draw: st.DrawFn, num_buckets: int) -> Beacon:
    completed = draw(st.integers(-2, num_buckets))
    return Beacon(
        epoch=draw(st.sampled_from([EPOCH, EPOCH, EPOCH, EPOCH - 1])),
        entered=min(num_buckets, completed + draw(st.integers(0, 1))),
        completed=completed,
        applied=min(max(completed, -1), draw(st.integers(-1, num_buckets))),
        waiting_on=draw(WAITING),
        waiting_peer=draw(st.none() | st.integers(0, 6)),
        phase=draw(PHASES),
        tick_age_s=draw(st.floats(0, 100)),
    )


@st.composite
def evidence_of(draw: st.DrawFn, member: Member, rank: int, num_buckets: int) -> MemberEvidence:
    rare = st.sampled_from([False, False, False, True])
    testimony = st.builds(lost, st.none() | st.integers(0, 6)) | st.builds(aborted)
    return MemberEvidence(
        member,
        rank,
        died="SIGKILL" if draw(rare) else None,
        fault=draw(st.sampled_from(["ValueError: a", "ValueError: b"])) if draw(rare) else None,
        testimony=draw(testimony) if draw(rare) else None,
        answered_ping=draw(MAYBE),
        beacon=draw(st.none() | beacons(num_buckets)),
        finished=draw(rare),
        beacon_age_s=draw(st.none() | st.floats(0, 10)),
        answered_abort=draw(MAYBE),
        context_lost="orphaned" if draw(rare) and draw(rare) else None,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Evidence, AttributionView]:
    """Up to two trainers and three shards of one or two ranks, in any state, and any view of them."""
    members: list[Member] = [TrainerId(i) for i in range(draw(st.integers(1, 2)))]
    for index in range(draw(st.integers(1, 3))):
        members += [ShardId(index)] * draw(st.integers(1, 2))
    num_buckets = draw(BUCKETS)
    seen = AttributionView(
        epoch=EPOCH,
        num_buckets=draw(st.sampled_from([num_buckets, None])),
        deadlines=LIMITS,
        suspects=frozenset(draw(st.sets(st.sampled_from([ShardId(i) for i in range(3)])))),
        chain=draw(st.sampled_from([None, tuple(range(len(members)))])),
        observer_late_s=draw(st.sampled_from([0.0, 0.0, 5.0])),
    )
    return [draw(evidence_of(member, rank, num_buckets)) for rank, member in enumerate(members)], seen


def by_rule(verdict: Verdict, rule: int) -> set[Member]:
    return {finding.member for finding in verdict.findings if finding.rule == rule}


def ranks_of(evidence: Evidence, finding: Finding) -> Evidence:
    return [each for each in evidence if each.member == finding.member]


@given(cases(), st.randoms())
def test_the_order_of_the_evidence_does_not_matter(case: tuple[Evidence, AttributionView], random: Random) -> None:
    evidence, seen = case
    assert attribute(random.sample(evidence, len(evidence)), seen) == attribute(evidence, seen)


@given(cases())
def test_every_verdict_has_one_sentence_of_one_line(case: tuple[Evidence, AttributionView]) -> None:
    sentence = attribute(*case).sentence
    assert sentence
    assert "\n" not in sentence


@given(cases())
def test_nobody_is_condemned_without_evidence(case: tuple[Evidence, AttributionView]) -> None:
    evidence, seen = case
    for finding in attribute(evidence, seen).findings:
        of_member = ranks_of(evidence, finding)
        match finding.rule:
            case 1:
                assert any(each.died or each.fault or each.context_lost for each in of_member)
            case 2:
                assert any(each.answered_ping is False or each.answered_abort is False for each in of_member)
            case 3:
                assert any(each.beacon and each.beacon.tick_age_s >= LIMITS.stall_s for each in of_member)
            case _:
                assert finding.member in seen.suspects


@given(cases())
def test_every_death_is_named_whatever_else_was_observed(case: tuple[Evidence, AttributionView]) -> None:
    evidence, seen = case
    verdict = attribute(evidence, seen)
    if not verdict.findings or isinstance(verdict, Culprits):
        assert {each.member for each in evidence if each.died} <= by_rule(verdict, 1)


@given(cases(), st.integers(0, 6), st.integers(0, 6))
def test_testimony_never_removes_a_death_and_never_makes_a_fault(
    case: tuple[Evidence, AttributionView], by: int, about: int
) -> None:
    evidence, seen = case
    told = list(evidence)
    told[by % len(told)] = replace(told[by % len(told)], testimony=lost(about))
    before, after = attribute(evidence, seen), attribute(told, seen)
    assert by_rule(after, 1) == by_rule(before, 1)


@given(cases())
def test_who_testified_is_never_behind(case: tuple[Evidence, AttributionView]) -> None:
    evidence, seen = case
    for finding in attribute(evidence, seen).findings:
        if finding.rule == 3:
            assert any(each.testimony is None for each in ranks_of(evidence, finding))


@given(cases())
def test_who_is_past_the_frontier_or_waits_for_a_peer_is_never_behind(case: tuple[Evidence, AttributionView]) -> None:
    evidence, seen = case
    known = [each.beacon for each in evidence if each.beacon and each.beacon.epoch == seen.epoch]
    frontier = min((beacon.completed for beacon in known), default=-2) + 1
    for finding in attribute(evidence, seen).findings:
        if finding.rule == 3:
            blamed = [each.beacon for each in ranks_of(evidence, finding) if each.beacon]
            assert any(beacon.completed <= frontier for beacon in blamed)
            assert any(beacon.waiting_on not in ("recv", "send") for beacon in blamed)


@given(cases())
def test_a_late_observer_calls_nobody_silent(case: tuple[Evidence, AttributionView]) -> None:
    evidence, seen = case
    assert not by_rule(attribute(evidence, replace(seen, observer_late_s=60.0)), 2)


@given(cases())
def test_suspicion_made_by_the_hang_names_nobody(case: tuple[Evidence, AttributionView]) -> None:
    """The suspects are those of the moment the refit opened; without any, rule 4 has nobody."""
    evidence, seen = case
    assert not by_rule(attribute(evidence, replace(seen, suspects=frozenset())), 4)


@given(cases())
def test_suspicion_adds_nobody_where_anybody_is_named_without_it(case: tuple[Evidence, AttributionView]) -> None:
    evidence, seen = case
    plain = attribute(evidence, replace(seen, suspects=frozenset()))
    if plain.findings:
        assert attribute(evidence, seen) == plain
    else:
        assert len(attribute(evidence, seen).findings) <= 1


@given(cases())
def test_a_verdict_that_names_nobody_says_when_asking_again_helps_or_that_it_does_not(
    case: tuple[Evidence, AttributionView],
) -> None:
    verdict = attribute(*case)
    if isinstance(verdict, Unattributed) and verdict.decidable_in_s is not None:
        assert 0 <= verdict.decidable_in_s <= LIMITS.pause_s
    if isinstance(verdict, LinkFault):
        assert verdict.edge[0] != verdict.edge[1]
