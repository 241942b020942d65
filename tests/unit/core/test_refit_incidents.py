"""What becomes of a refit when a second thing goes wrong while the first is dealt with, and what is left at its end."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_refit.core import events as ev
from elastic_refit.core.events import CommitMode
from elastic_refit.core.evidence import Testimony
from elastic_refit.core.ids import ProcessId
from elastic_refit.core.ledger_queries import serving, stale
from elastic_refit.core.messages import FenceOrder, Op, Settled, SettleOrder, TransferOrder
from elastic_refit.core.refit_state import Answered, Call, Died, Ended, Landed, StartTimer
from tests.chains import LIMITS
from tests.unit.core.refit_driver import S0, S1, S2, S3, T0, T1, FakeFleet, Kind, names


def warm(num_shards: int = 4, **settings: Any) -> FakeFleet:
    """A fleet after its first refit."""
    fleet = FakeFleet(num_shards=num_shards, **settings)
    assert isinstance(fleet.refit(1), Landed)
    return fleet


# -- a second fault: same incident, or the next


@pytest.mark.parametrize(("kind", "rule"), [("kill", 1), ("freeze", 2)])
def test_a_second_loss_while_settling_is_the_same_incident_and_the_same_rebuild(kind: Kind, rule: int) -> None:
    fleet = warm()
    fleet.plan("kill", S0, Op.TRANSFER)
    fleet.plan(kind, S1, Op.SETTLE)
    outcome = fleet.refit(2)
    assert isinstance(outcome, Landed)
    assert names(outcome) == {"shard[0]": 1, "shard[1]": rule}
    assert (fleet.rebuilds, outcome.recoveries) == (1, 1)
    assert fleet.called(Op.FENCE) == [S0, S1]


def test_who_has_settled_is_not_asked_again_for_the_loss_of_another() -> None:
    fleet = warm()
    fleet.plan("kill", S0, Op.TRANSFER)
    fleet.plan("kill", S1, Op.SETTLE)
    fleet.refit(2)
    assert sorted(map(str, fleet.called(Op.SETTLE))) == ["shard[1]", "shard[2]", "shard[3]", "trainer[0]", "trainer[1]"]


def test_a_trainer_that_is_lost_while_settling_ends_the_run() -> None:
    fleet = warm()
    fleet.plan("kill", S0, Op.TRANSFER)
    fleet.plan("kill", T1, Op.SETTLE)
    outcome = fleet.refit(2)
    assert isinstance(outcome, Ended)
    assert (outcome.error, names(outcome)) == ("TrainerLost", {"shard[0]": 1, "trainer[1]": 1})


def test_the_evidence_says_who_answered_the_abort_order() -> None:
    fleet = warm(num_shards=3)
    fleet.plan("kill", S0, Op.TRANSFER)
    fleet.plan("freeze", T1, Op.SETTLE)
    outcome = fleet.refit(2)
    assert isinstance(outcome, Ended)
    answered = {str(each.member): each.answered_abort for each in outcome.evidence}
    expected = {"trainer[0]": True, "trainer[1]": False, "shard[0]": None, "shard[1]": True, "shard[2]": True}
    assert answered == expected


def test_nobody_answering_the_abort_is_the_coordinator_that_is_cut_off() -> None:
    fleet = warm()
    fleet.plan("kill", S0, Op.TRANSFER)
    for member in (T0, T1, S1, S2, S3):
        fleet.plan("freeze", member, Op.SETTLE)
    outcome = fleet.refit(2)
    assert isinstance(outcome, Ended)
    assert (outcome.error, names(outcome)) == ("CoordinatorLost", {"shard[0]": 1})


@pytest.mark.parametrize("op", [Op.JOIN, Op.TRANSFER])
def test_a_second_loss_after_the_rebuild_began_spends_the_budget(op: Op) -> None:
    fleet = warm()
    fleet.plan("kill", S0, Op.TRANSFER)
    fleet.plan("kill", S1, op, nth=2 if op is Op.TRANSFER else 1)
    outcome = fleet.refit(2)
    assert isinstance(outcome, Ended)
    assert outcome.error == "RecoveryBudgetExhausted"
    assert names(outcome) == {"shard[0]": 1, "shard[1]": 1}
    assert "after 1 of max_recoveries_per_refit=1" in outcome.sentence


@pytest.mark.parametrize("op", [Op.PREPARE, Op.JOIN, Op.READY, Op.TRANSFER, Op.COMMIT])
def test_a_second_loss_in_the_retry_is_recovered_from_if_the_budget_allows(op: Op) -> None:
    fleet = warm(max_recoveries=2)
    fleet.plan("kill", S0, Op.TRANSFER)
    fleet.plan("kill", S1, op, nth=2 if op is Op.TRANSFER else 1)
    outcome = fleet.refit(2)
    assert isinstance(outcome, Landed)
    assert names(outcome) == {"shard[0]": 1, "shard[1]": 1}
    assert outcome.recoveries == (1 if op is Op.PREPARE else 2)
    assert set(serving(fleet.ledger)) == {S2, S3}


def test_a_loss_before_the_rebuild_has_joined_spends_no_budget() -> None:
    fleet = warm(max_recoveries=1)
    fleet.plan("kill", S0, Op.TRANSFER)
    fleet.plan("kill", S1, Op.PREPARE)
    outcome = fleet.refit(2)
    assert isinstance(outcome, Landed)
    assert (fleet.rebuilds, outcome.recoveries) == (2, 1)


def test_without_any_recovery_the_first_failure_ends_the_run() -> None:
    fleet = warm(max_recoveries=0)
    fleet.plan("kill", S0, Op.TRANSFER)
    outcome = fleet.refit(2)
    assert isinstance(outcome, Ended)
    assert outcome.error == "RecoveryBudgetExhausted"
    assert fleet.called(Op.FENCE) == [S0]


def test_a_shard_that_dies_after_its_commit_does_not_fail_the_refit() -> None:
    fleet = warm(num_shards=2)
    fleet.plan("wedge", S1, Op.COMMIT)
    run_until(fleet, Op.COMMIT)
    fleet.answer(S0)
    fleet.send(Died(S0, "SIGKILL"))
    fleet.wedged.clear()
    outcome = fleet.finish()
    assert isinstance(outcome, Landed)
    assert not outcome.findings


def test_a_refit_after_which_too_few_are_left_has_not_landed_and_is_an_incident() -> None:
    fleet = warm(num_shards=2, min_healthy=2)
    fleet.plan("wedge", S1, Op.COMMIT)
    run_until(fleet, Op.COMMIT)
    fleet.answer(S0)
    fleet.send(Died(S0, "SIGKILL"))
    fleet.wedged.clear()
    fleet.answer(S1)
    assert fleet.op is Op.SETTLE
    assert fleet.state.running is not None
    assert fleet.state.running.in_incident
    outcome = fleet.finish()
    assert isinstance(outcome, Ended)
    assert outcome.error == "FleetExhausted"


def test_a_death_and_an_error_are_weighed_without_waiting_for_a_deadline() -> None:
    fleet = warm(num_shards=3)
    fleet.plan("kill", S0, Op.TRANSFER)
    fleet.plan("raise", S1, Op.TRANSFER)
    fleet.begin(2)
    while fleet.outcome is None:
        assert not fleet.advance(), "a deadline passed"
    assert names(fleet.outcome) == {"shard[0]": 1, "shard[1]": 1}


# -- evidence that ripens, and an observer that is late


def test_a_rank_within_its_limit_is_asked_again_and_named_once_it_has_overstayed() -> None:
    fleet = warm()
    fleet.plan("wedge", S0, Op.READY)
    fleet.hung_s = LIMITS.pause_s - 0.5
    run_until(fleet, Op.WAIT)
    assert fleet.timer == StartTimer(fleet.timer.token, Op.WAIT, 0.5)
    fleet.hung_s = LIMITS.pause_s + 0.5
    outcome = fleet.finish()
    assert isinstance(outcome, Landed)
    assert names(outcome) == {"shard[0]": 3}


def test_evidence_that_never_ripens_ends_the_run_after_a_bounded_number_of_rounds() -> None:
    fleet = warm()
    fleet.plan("wedge", S0, Op.READY)
    fleet.hung_s = LIMITS.pause_s - 20
    outcome = fleet.refit(2)
    assert isinstance(outcome, Ended)
    assert (outcome.error, names(outcome)) == ("UnattributedHang", {})
    assert fleet.called(Op.PING).count(T0) == fleet.state.policy.max_asks
    waits = [each.seconds for each in fleet.commands if isinstance(each, StartTimer) and each.op is Op.WAIT]
    assert waits == [LIMITS.evidence_s] * (fleet.state.policy.max_asks - 1)


def test_a_death_while_evidence_ripens_is_weighed_at_once() -> None:
    fleet = warm()
    fleet.plan("wedge", S0, Op.READY)
    fleet.hung_s = LIMITS.pause_s - 20
    run_until(fleet, Op.WAIT)
    fleet.dead.add(S0)
    fleet.send(Died(S0, "SIGKILL"))
    assert fleet.op is Op.PING
    assert names(fleet.finish()) == {"shard[0]": 1}


@pytest.mark.parametrize("op", [Op.PROBE, Op.TRANSFER, Op.SETTLE])
def test_an_observer_that_was_late_condemns_nobody_for_silence(op: Op) -> None:
    fleet = warm()
    fleet.late_s = LIMITS.ping_s
    if op is Op.SETTLE:
        fleet.plan("kill", S0, Op.TRANSFER)
    fleet.plan("freeze", S1, op)
    outcome = fleet.refit(2)
    assert isinstance(outcome, Ended)
    assert outcome.error == "UnattributedHang"
    assert "shard[1]" not in names(outcome)
    assert f"{LIMITS.ping_s:g} s late" in outcome.sentence


@pytest.mark.parametrize("op", [Op.PROBE, Op.TRANSFER, Op.SETTLE])
def test_an_observer_that_is_on_time_again_names_the_silent(op: Op) -> None:
    fleet = warm()
    if op is Op.SETTLE:
        fleet.plan("kill", S0, Op.TRANSFER)
    fleet.plan("freeze", S1, op)
    asked = Op.PING if op is Op.TRANSFER else op
    run_until(fleet, asked)
    fleet.late_s = LIMITS.ping_s
    while fleet.late_s:
        is_timer = fleet.advance()
        fleet.late_s = 0.0 if is_timer else fleet.late_s
    assert fleet.op is asked, "asked again"
    assert names(fleet.finish())["shard[1]"] == 2


# -- what is left at the end


def test_an_end_rolls_everybody_back_who_lives_though_they_had_settled() -> None:
    fleet = warm(num_shards=2)
    fleet.plan("kill", S0, Op.TRANSFER)
    fleet.plan("kill", S1, Op.SETTLE)
    outcome = fleet.refit(2)
    assert isinstance(outcome, Ended)
    assert outcome.error == "NoSurvivingShards"
    orders = [each for each in fleet.commands if isinstance(each, Call) and each.op is Op.SETTLE]
    asked = {each.member for each in orders if isinstance(each.order, SettleOrder) and each.order.roll_back}
    assert asked == {T0, T1}


def test_survivors_of_an_ended_refit_that_hold_a_mixture_serve_no_more() -> None:
    fleet = warm(num_shards=3)
    fleet.plan("kill", T1, Op.TRANSFER)
    assert isinstance(fleet.refit(2), Ended)
    assert stale(fleet.ledger) == (S0, S1, S2)
    assert serving(fleet.ledger) == ()


def test_a_shard_of_which_one_rank_took_in_buckets_and_another_none_serves_no_more() -> None:
    fleet = warm(num_shards=3)
    fleet.slowest_rank = -1
    fleet.plan("kill", T1, Op.TRANSFER)
    assert isinstance(fleet.refit(2), Ended)
    partial = [ev.WeightsPartial(shard, fleet.state.epoch, 2, fleet.reached) for shard in (S0, S1, S2)]
    assert fleet.recorded(ev.WeightsPartial) == partial
    assert serving(fleet.ledger) == ()


def test_survivors_of_an_ended_refit_that_took_nothing_in_serve_on() -> None:
    fleet = warm(num_shards=3)
    fleet.reached = -1
    fleet.plan("kill", T1, Op.READY)
    assert isinstance(fleet.refit(2), Ended)
    assert serving(fleet.ledger) == (S0, S1, S2)


def test_survivors_of_a_staged_commit_serve_their_old_version_on() -> None:
    fleet = warm(num_shards=3, commit="staged")
    fleet.plan("kill", T1, Op.TRANSFER)
    assert isinstance(fleet.refit(2), Ended)
    assert fleet.recorded(ev.WeightsPartial) == []
    assert serving(fleet.ledger) == (S0, S1, S2)


def test_a_staged_shard_that_has_served_nothing_yet_has_mixed_nothing() -> None:
    fleet = FakeFleet(commit="staged")
    fleet.plan("kill", T1, Op.TRANSFER)
    assert isinstance(fleet.refit(1), Ended)
    assert fleet.recorded(ev.WeightsPartial) == []


@pytest.mark.parametrize("commit", ["streamed", "staged"])
def test_the_policys_commit_is_journaled_and_is_in_every_transfer_order(commit: CommitMode) -> None:
    fleet = warm(commit=commit)
    fleet.plan("kill", S1, Op.TRANSFER)
    assert isinstance(fleet.refit(2), Landed)
    opened = [event.commit for event in fleet.recorded(ev.RefitOpened) if isinstance(event, ev.RefitOpened)]
    orders = [c.order.commit for c in fleet.commands if isinstance(c, Call) and isinstance(c.order, TransferOrder)]
    assert (set(opened), set(orders)) == ({commit}, {commit})
    assert (len(opened), len(orders)) == (2, 6 + 5)


def test_a_refit_that_ends_before_it_was_opened_is_not_recorded_as_ended() -> None:
    fleet = FakeFleet()
    fleet.plan("kill", T0, Op.JOIN)
    outcome = fleet.refit(1)
    assert isinstance(outcome, Ended)
    assert fleet.recorded(ev.RefitOpened) == fleet.recorded(ev.RefitEnded) == []


def test_a_refit_that_ends_is_recorded_as_ended_and_the_group_as_broken() -> None:
    fleet = warm(num_shards=3)
    fleet.plan("kill", T1, Op.TRANSFER)
    fleet.refit(2)
    assert fleet.recorded(ev.RefitEnded) == [ev.RefitEnded(1, 2, "TrainerLost")]
    assert fleet.ledger.refits.open is None
    assert fleet.state.built is None


def test_the_refit_after_an_end_builds_anew_and_carries_everybody() -> None:
    fleet = warm(num_shards=3)
    fleet.cut = (2, 3)
    assert isinstance(fleet.refit(2), Ended)
    fleet.cut = None
    outcome = fleet.refit(3)
    assert isinstance(outcome, Landed)
    assert outcome.rebuilt
    assert serving(fleet.ledger) == (S0, S1, S2)


def test_an_ended_refit_carries_the_evidence_of_every_member() -> None:
    fleet = warm(num_shards=3)
    fleet.plan("freeze", T1, Op.TRANSFER)
    outcome = fleet.refit(2)
    assert isinstance(outcome, Ended)
    assert [str(each.member) for each in outcome.evidence] == [
        "trainer[0]",
        "trainer[1]",
        "shard[0]",
        "shard[1]",
        "shard[2]",
    ]


# -- fencing


def test_a_shard_that_falls_silent_between_refits_is_fenced_by_the_processes_it_named_before() -> None:
    fleet = warm(num_shards=3)
    fleet.frozen.add(S0)
    fleet.refit(2)
    orders = [each.order for each in fleet.commands if isinstance(each, Call) and each.op is Op.FENCE]
    assert [order.processes for order in orders if isinstance(order, FenceOrder)] == [
        (ProcessId("node", 1000, 7, 1000),)
    ]


def test_a_fence_that_cannot_reach_the_node_does_not_hold_up_the_recovery() -> None:
    fleet = warm(num_shards=3)
    fleet.unreachable.add(S0)
    fleet.plan("freeze", S0, Op.TRANSFER)
    outcome = fleet.refit(2)
    assert isinstance(outcome, Landed)
    assert outcome.membership.shard_ids == (S1, S2)


def test_who_was_fenced_and_wakes_changes_nothing() -> None:
    fleet = warm(num_shards=3)
    fleet.unreachable.add(S0)
    fleet.plan("freeze", S0, Op.TRANSFER)
    run_until(fleet, Op.SETTLE)
    before, epoch = fleet.state, fleet.state.epoch
    for answer in (Settled(5, 0.1), Testimony("aborted", None, "thawed")):
        for op in (Op.TRANSFER, Op.SETTLE):
            fleet.send(Answered(op, epoch, S0, answer))
    assert fleet.state == before


def test_a_trainer_that_dies_while_a_silent_shard_is_fenced_before_the_refit_ends_the_run() -> None:
    fleet = warm(num_shards=3)
    fleet.frozen.add(S0)
    fleet.unreachable.add(S0)
    run_until(fleet, Op.FENCE)
    fleet.send(Died(T1, "SIGKILL"))
    outcome = fleet.finish()
    assert isinstance(outcome, Ended)
    assert (outcome.error, names(outcome)) == ("TrainerLost", {"shard[0]": 2, "trainer[1]": 1})


def run_until(fleet: FakeFleet, op: Op) -> None:
    """The second refit, up to its first round of ``op``."""
    fleet.begin(2)
    while fleet.op is not op:
        fleet.advance()
