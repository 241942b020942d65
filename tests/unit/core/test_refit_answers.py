"""Which answers count: those that are waited for, and that fit what was asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_refit.core import events as ev
from elastic_refit.core.evidence import Beacon, Testimony
from elastic_refit.core.ids import Member, ShardId
from elastic_refit.core.messages import (
    Answer,
    Committed,
    Done,
    Fault,
    Fenced,
    Op,
    Pong,
    Prepared,
    Ready,
    Received,
    Sent,
    Settled,
)
from elastic_refit.core.refit_state import (
    Answered,
    Died,
    Ended,
    Event,
    Fleet,
    Ignored,
    Landed,
    RefitRequested,
    RoundTimedOut,
)
from tests.unit.core.refit_driver import DIGESTS, MANIFEST, S0, S1, S2, T0, T1, FakeFleet, names

LATE_FAULT = Fault("E/1", "E: late")


def in_round(op: Op, version: int = 1) -> FakeFleet:
    """A fleet in the first ``op`` of its refit of ``version``."""
    fleet = FakeFleet()
    for landed in range(1, version):
        assert isinstance(fleet.refit(landed), Landed)
    fleet.begin(version)
    while fleet.op is not op:
        fleet.advance()
    return fleet


def reason_of(fleet: FakeFleet, event: Event) -> str:
    """Why ``event`` is ignored; it changes nothing."""
    before = fleet.state
    (command,) = fleet.send(event)
    assert fleet.state == before
    assert isinstance(command, Ignored)
    return command.reason


# -- what is over is ignored, with a reason


def test_an_answer_of_an_earlier_epoch_is_ignored() -> None:
    fleet = in_round(Op.TRANSFER)
    assert reason_of(fleet, Answered(Op.TRANSFER, 0, S0, LATE_FAULT)) == "transfer of epoch 0, now 1"


def test_an_answer_to_an_earlier_refit_of_the_same_epoch_is_ignored() -> None:
    fleet = in_round(Op.TRANSFER, version=2)
    assert fleet.state.epoch == 1
    late = Answered(Op.TRANSFER, 1, S0, Received(DIGESTS), token=4)
    assert reason_of(fleet, late) == "transfer of a refit before v2"


def test_a_repeated_answer_is_ignored() -> None:
    fleet = in_round(Op.TRANSFER)
    fleet.answer(S0)
    assert "who is not waited for" in reason_of(fleet, Answered(Op.TRANSFER, 1, S0, Received(DIGESTS)))


def test_an_answer_to_a_round_that_is_over_does_not_count_for_the_next() -> None:
    fleet = in_round(Op.TRANSFER)
    assert "in round transfer" in reason_of(fleet, Answered(Op.READY, 1, S0, LATE_FAULT))


def test_an_answer_of_another_incarnation_is_ignored() -> None:
    fleet = in_round(Op.TRANSFER)
    assert "shard[0]#1" in reason_of(fleet, Answered(Op.TRANSFER, 1, ShardId(0, 1), Received(DIGESTS)))


@pytest.mark.parametrize("event", [Answered(Op.PROBE, 0, S0, LATE_FAULT), Died(S0, "exit"), RoundTimedOut(0)])
def test_whatever_comes_between_refits_is_ignored(event: Event) -> None:
    assert "no refit is in progress" in reason_of(FakeFleet(), event)


def test_the_timer_of_a_round_that_is_over_is_ignored() -> None:
    fleet = in_round(Op.TRANSFER)
    assert "is over" in reason_of(fleet, RoundTimedOut(fleet.timer.token - 1))


def test_a_death_is_news_once() -> None:
    fleet = in_round(Op.TRANSFER)
    fleet.send(Died(S0, "SIGKILL"))
    assert "is known" in reason_of(fleet, Died(S0, "again"))


def test_a_second_refit_does_not_begin_while_one_is_in_progress() -> None:
    fleet = in_round(Op.TRANSFER)
    request = RefitRequested(2, Fleet(2, (1, 1, 1), frozenset({S0})))
    assert reason_of(fleet, request) == "refit v1 is in progress"


# -- an answer that does not fit is the error of who gave it


@pytest.mark.parametrize(
    ("op", "member", "answer", "why"),
    [
        (Op.PREPARE, S0, Done(), "answered prepare with Done instead of Prepared"),
        (Op.PREPARE, S0, Prepared(("a", "b")), "bound 2 listeners for 1 ranks"),
        (Op.JOIN, S0, Fenced("gone"), "answered join with Fenced instead of Done"),
        (Op.READY, S0, Ready(MANIFEST), "answered ready with Ready instead of Done"),
        (Op.TRANSFER, S0, Sent(DIGESTS), "answered transfer with Sent instead of Received"),
        (Op.COMMIT, S0, Committed(7), "committed v7 instead of v1"),
    ],
)
def test_a_shard_whose_answer_does_not_fit_is_named_for_it(op: Op, member: Member, answer: Answer, why: str) -> None:
    fleet = in_round(op)
    fleet.send(Answered(op, 1, member, answer))
    fleet.raised.add(member)
    outcome = fleet.finish()
    assert isinstance(outcome, Landed)
    assert names(outcome) == {"shard[0]": 1}
    assert why in outcome.findings[0].why


@pytest.mark.parametrize(
    ("op", "member", "answer", "why"),
    [
        (Op.READY, T0, Ready(None), "gave no manifest"),
        (Op.TRANSFER, T0, Sent(DIGESTS[:-1]), "gave 5 digests for 6 buckets"),
        (Op.TRANSFER, T1, Received(()), "answered transfer with Received instead of Sent"),
    ],
)
def test_a_trainer_whose_answer_does_not_fit_ends_the_run(op: Op, member: Member, answer: Answer, why: str) -> None:
    fleet = in_round(op)
    fleet.send(Answered(op, 1, member, answer))
    fleet.raised.add(member)
    outcome = fleet.finish()
    assert isinstance(outcome, Ended)
    assert outcome.error == "TrainerLost"
    assert why in outcome.sentence


def test_a_shard_that_answers_the_probe_with_an_error_is_named_for_the_error_and_not_for_silence() -> None:
    fleet = in_round(Op.PROBE)
    fleet.send(Answered(Op.PROBE, 0, S0, Fault("E/1", "E: no device")))
    outcome = fleet.finish()
    assert isinstance(outcome, Landed)
    assert names(outcome) == {"shard[0]": 1}
    assert outcome.findings[0].why == "raised: E: no device"


def test_a_shard_that_cannot_leave_its_call_is_left_behind() -> None:
    fleet = in_round(Op.TRANSFER)
    fleet.plan("kill", S0, Op.PING)
    fleet.send(Answered(Op.TRANSFER, 1, S1, Fault("E/1", "E: no")))
    fleet.dead.add(S0)
    while fleet.op is not Op.SETTLE:
        fleet.advance()
    fleet.send(Answered(Op.SETTLE, 1, S2, Fault("StillBusy", "still applying")))
    outcome = fleet.finish()
    assert isinstance(outcome, Ended)
    assert outcome.error == "NoSurvivingShards"
    assert names(outcome) == {"shard[0]": 1, "shard[1]": 1, "shard[2]": 1}


# -- late answers to an attempt that was broken off are evidence


def all_answer_the_ping(fleet: FakeFleet) -> None:
    for member in (T0, T1, S0, S1, S2):
        fleet.send(Answered(Op.PING, 1, member, Pong(Beacon(1, 2, 1, 1, "recv", None, "in_collective"))))


def test_the_verdict_on_an_error_waits_for_whoever_may_raise_the_same_and_no_longer() -> None:
    fleet = in_round(Op.TRANSFER)
    fleet.send(Answered(Op.TRANSFER, 1, S0, LATE_FAULT))
    all_answer_the_ping(fleet)
    for member in (T0, T1, S1):
        fleet.send(Answered(Op.TRANSFER, 1, member, Testimony("aborted", None, "broken")))
    before = fleet.op
    fleet.send(Answered(Op.TRANSFER, 1, S2, Testimony("aborted", None, "broken")))
    assert (before, fleet.op) == (Op.PING, Op.FENCE)


def test_a_link_that_both_ends_lost_is_named_by_what_they_testify() -> None:
    fleet = in_round(Op.TRANSFER)
    fleet.send(Answered(Op.TRANSFER, 1, S0, Testimony("peer_lost", 3, "the connection ended")))
    fleet.send(Answered(Op.TRANSFER, 1, S1, Testimony("peer_lost", 2, "the connection ended")))
    for member in (T0, T1, S2):
        fleet.send(Answered(Op.TRANSFER, 1, member, Testimony("aborted", None, "broken")))
    all_answer_the_ping(fleet)
    outcome = fleet.finish()
    assert isinstance(outcome, Ended)
    assert outcome.error == "UnattributedHang"
    assert "the link from rank 2 (shard[0]) to rank 3 (shard[1])" in outcome.sentence


def test_a_suspect_whose_last_answer_says_that_it_has_everything_is_not_named() -> None:
    fleet = FakeFleet(suspects=frozenset({S0}))
    fleet.begin(1)
    while fleet.op is not Op.TRANSFER:
        fleet.advance()
    fleet.cut = (2, 3)
    fleet.send(RoundTimedOut(fleet.timer.token))
    fleet.send(Answered(Op.TRANSFER, 1, S0, Received(DIGESTS)))
    outcome = fleet.finish()
    assert isinstance(outcome, Ended)
    assert (outcome.error, names(outcome)) == ("UnattributedHang", {})


def test_a_commit_that_is_heard_after_the_attempt_was_broken_off_is_recorded() -> None:
    fleet = in_round(Op.COMMIT)
    fleet.send(Died(S0, "SIGKILL"))
    fleet.dead.add(S0)
    fleet.answer(S1)
    assert fleet.recorded(ev.ShardCommitted) == [ev.ShardCommitted(S1, 1, 1)]
    assert isinstance(fleet.finish(), Landed)


def test_what_comes_of_the_attempt_after_its_member_has_settled_is_no_news() -> None:
    fleet = in_round(Op.TRANSFER)
    fleet.cut = (2, 3)
    fleet.send(Died(S0, "SIGKILL"))
    while fleet.op is not Op.SETTLE:
        fleet.advance()
    fleet.send(Answered(Op.SETTLE, 1, S1, Settled(1, 0.1)))
    assert "not waited for" in reason_of(fleet, Answered(Op.TRANSFER, 1, S1, Received(DIGESTS)))


def test_a_manifest_that_changes_between_an_attempt_and_its_retry_ends_the_run() -> None:
    fleet = in_round(Op.TRANSFER)
    fleet.plan("kill", S0, Op.PING)
    fleet.send(Answered(Op.TRANSFER, 1, S0, LATE_FAULT))
    while fleet.op is not Op.READY:
        fleet.advance()
    fleet.send(Answered(Op.READY, 2, T0, Ready(replace(MANIFEST, digest="other"))))
    outcome = fleet.finish()
    assert isinstance(outcome, Ended)
    assert outcome.error == "PlanMismatch"


def test_a_fleet_that_no_membership_could_hold_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="have a width"):
        Fleet(1, (1,), frozenset({S1}))
