"""What can be asked of a ledger."""

from __future__ import annotations

import json
import pickle

import pytest

from elastic_refit.core.events import (
    ActorDied,
    Condemned,
    Drained,
    EpochOpened,
    Loaded,
    ProbeFailed,
    ProbeOk,
    RefitEnded,
    RefitOpened,
    Registered,
    RequestFailed,
    Restarting,
    Retired,
    WeightsPartial,
)
from elastic_refit.core.ids import ShardId
from elastic_refit.core.ledger import new_ledger
from elastic_refit.core.ledger_codec import state_from_dict, state_to_dict
from elastic_refit.core.ledger_queries import (
    absent,
    correlated_failure,
    exhaustion,
    joinable,
    next_incarnation,
    next_index,
    participants,
    raise_if_exhausted,
    record_of,
    remaining_restarts,
    serving,
    snapshot,
    stale,
    suspected,
)
from elastic_refit.core.ledger_state import LedgerPolicy
from elastic_refit.core.membership import plan_membership
from elastic_refit.errors import FleetExhausted, NoSurvivingShards
from tests.ledger_fleet import Fleet

S0, S1, S2 = ShardId(0), ShardId(1), ShardId(2)


def _fleet_in_every_state() -> Fleet:
    """Shards 0 to 5 in the order of the states."""
    fleet = Fleet(6)
    fleet.land(1, 2, tuple(shard for shard in fleet.shards if shard.index != 2))
    fleet.tell(RequestFailed(S1, "shard"), *(ActorDied(ShardId(index), "killed") for index in (3, 4)))
    fleet.tell(Restarting(ShardId(4, 1)), Retired(ShardId(5)))
    assert [fleet.state_of(index) for index in range(6)] == list(range(6))
    return fleet


def test_absent_is_not_the_complement_of_serving() -> None:
    state = _fleet_in_every_state().state
    assert serving(state) == (S0, S1)
    assert stale(state) == (S2,)
    assert absent(state) == (ShardId(3), ShardId(4, 1), ShardId(5))
    assert joinable(state) == (S0, S1, S2)


def test_who_is_drained_joins_no_further_membership() -> None:
    fleet = Fleet()
    fleet.tell(Drained(S1))
    assert joinable(fleet.state) == (S0, S2)


def test_absent_never_waits_in_a_membership() -> None:
    fleet = _fleet_in_every_state()
    planned = plan_membership(2, [1] * 6, fleet.shards)
    assert participants(fleet.state, planned) == (S0, S1, S2)


def test_a_member_that_was_replaced_since_is_no_participant() -> None:
    fleet = Fleet()
    planned = plan_membership(2, [1] * 4, (*fleet.shards, ShardId(3)))
    replacement = fleet.replace(S0)
    assert participants(fleet.state, planned) == (S1, S2)
    again = plan_membership(2, [1] * 3, (replacement, S1, S2))
    assert participants(fleet.state, again) == (replacement, S1, S2)


def test_a_stale_shard_with_failing_requests_is_suspected_and_a_dead_one_is_not() -> None:
    fleet = Fleet()
    fleet.tell(RequestFailed(S0, "shard"), RequestFailed(S1, "shard"), RequestFailed(S2, "shard"))
    fleet.tell(WeightsPartial(S1, 1, 1), ActorDied(S2, "killed"))
    assert suspected(fleet.state) == (S0, S1)


def test_a_seat_counts_its_incarnations_and_a_retired_seat_is_not_used_again() -> None:
    fleet = Fleet()
    assert (next_incarnation(fleet.state, 0), next_incarnation(fleet.state, 9)) == (1, 0)
    fleet.replace(S0)
    assert next_incarnation(fleet.state, 0) == 2
    fleet.tell(Retired(S2))
    assert next_index(fleet.state) == 3
    assert next_index(new_ledger(LedgerPolicy())) == 0
    assert record_of(fleet.state, 9) is None
    assert remaining_restarts(fleet.state, 9) == 0


# -- exhaustion


def test_fewer_serving_shards_than_min_healthy_exhaust_the_fleet() -> None:
    fleet = Fleet(min_healthy=2)
    fleet.tell(ActorDied(S0, "killed"))
    raise_if_exhausted(fleet.state)
    fleet.tell(ActorDied(S1, "killed"))
    with pytest.raises(FleetExhausted) as exhausted:
        raise_if_exhausted(fleet.state)
    assert exhausted.value.message == "1 of 3 shards serve and min_healthy is 2: 1 HEALTHY, 2 DEAD"


def test_no_surviving_shards_is_said_before_fleet_exhausted() -> None:
    fleet = Fleet()
    fleet.tell(*(ActorDied(shard, "killed") for shard in fleet.shards))
    with pytest.raises(NoSurvivingShards, match="none of 3 shards is left: 3 DEAD"):
        raise_if_exhausted(fleet.state)


def test_suspects_count_as_serving_and_stale_shards_do_not() -> None:
    fleet = Fleet(min_healthy=1)
    fleet.tell(RequestFailed(S0, "shard"), Drained(S1), Drained(S2))
    assert exhaustion(fleet.state) is None
    fleet.tell(Drained(S0))
    assert isinstance(exhaustion(fleet.state), FleetExhausted)


def test_nobody_is_missed_before_anybody_came_and_before_the_first_refit() -> None:
    assert exhaustion(new_ledger(LedgerPolicy())) is None
    fleet = Fleet(landed=False)
    assert exhaustion(fleet.state) is None
    fleet.tell(*(ActorDied(shard, "killed") for shard in fleet.shards))
    assert isinstance(exhaustion(fleet.state), NoSurvivingShards)


def test_a_recovery_that_is_open_suspends_the_check_for_as_long_as_a_coordinator_may_take() -> None:
    fleet = Fleet(min_healthy=3, coordinator_s=100.0)
    fleet.open(1, 2, fleet.shards)
    fleet.tell(*(WeightsPartial(shard, 1, 2) for shard in (S1, S2)), ActorDied(S0, "killed"))
    fleet.tell(EpochOpened(2, 1), after_s=60)
    fleet.tell(RefitOpened(2, 2, (S1, S2)))
    assert exhaustion(fleet.state, now_s=fleet.now_s + 40) is None
    assert isinstance(exhaustion(fleet.state, now_s=fleet.now_s + 40.1), FleetExhausted)
    fleet.tell(*(ActorDied(shard, "killed") for shard in (S1, S2)))
    assert exhaustion(fleet.state) is None
    assert isinstance(exhaustion(fleet.state, now_s=fleet.now_s + 40.1), NoSurvivingShards)


def test_after_a_refit_that_failed_everywhere_the_next_one_is_waited_for() -> None:
    fleet = Fleet(coordinator_s=100.0)
    fleet.open(1, 2, fleet.shards)
    fleet.tell(*(WeightsPartial(shard, 1, 2) for shard in fleet.shards), RefitEnded(1, 2, "coordinator restarted"))
    assert exhaustion(fleet.state, now_s=fleet.now_s + 100) is None
    assert isinstance(exhaustion(fleet.state, now_s=fleet.now_s + 100.1), FleetExhausted)
    fleet.land(2, 3, fleet.shards)
    assert exhaustion(fleet.state) is None


def test_who_waits_for_the_next_refit_does_not_wait_when_nobody_is_left() -> None:
    fleet = Fleet()
    fleet.open(1, 2, fleet.shards)
    fleet.tell(*(ActorDied(shard, "killed") for shard in fleet.shards), RefitEnded(1, 2, "nobody is left"))
    assert isinstance(exhaustion(fleet.state), NoSurvivingShards)


def test_a_refit_that_lands_with_too_few_exhausts_the_fleet() -> None:
    fleet = Fleet(min_healthy=3)
    fleet.open(1, 2, fleet.shards)
    fleet.tell(ActorDied(S0, "killed"))
    fleet.land(2, 2, (S1, S2))
    assert isinstance(exhaustion(fleet.state), FleetExhausted)


# -- correlated failures


def test_half_the_fleet_and_at_least_three_within_one_window_are_one_incident() -> None:
    fleet = Fleet(6, window_s=10.0)
    fleet.tell(ActorDied(S0, "killed"))
    fleet.tell(ProbeFailed(S1, "timeout"), after_s=5)
    assert correlated_failure(fleet.state) is None
    fleet.tell(RequestFailed(S2, "shard"), after_s=5)
    found = correlated_failure(fleet.state)
    assert found is not None
    assert (found.shards, found.num_shards, found.window_s) == ((S0, S1, S2), 6, 10.0)
    assert correlated_failure(fleet.state, now_s=fleet.now_s + 0.1) is None


def test_three_of_seven_are_separate_failures() -> None:
    fleet = Fleet(7)
    fleet.tell(*(ActorDied(ShardId(index), "killed") for index in range(3)))
    assert correlated_failure(fleet.state) is None
    fleet.tell(Retired(ShardId(6)))
    assert correlated_failure(fleet.state) is not None


def test_a_fleet_of_two_has_no_correlated_failures() -> None:
    fleet = Fleet(2)
    fleet.tell(ActorDied(S0, "killed"), ActorDied(S1, "killed"))
    assert correlated_failure(fleet.state) is None


def test_who_answers_again_or_has_left_is_no_part_of_a_correlated_failure() -> None:
    fleet = Fleet(4)
    fleet.tell(*(ProbeFailed(shard, "timeout") for shard in fleet.shards[:3]))
    assert correlated_failure(fleet.state) is not None
    fleet.tell(ProbeOk(S0))
    assert correlated_failure(fleet.state) is None
    fleet.tell(ProbeFailed(S0, "timeout"), Retired(S0))
    assert correlated_failure(fleet.state) is None


def test_a_shard_that_is_being_replaced_is_part_of_the_failure_that_took_it() -> None:
    fleet = Fleet(4)
    fleet.tell(*(ActorDied(shard, "killed") for shard in fleet.shards[:2]), Restarting(ShardId(0, 1)))
    fleet.tell(Condemned(S2, "silent", "no beacon, no ping"))
    found = correlated_failure(fleet.state)
    assert found is not None
    assert found.shards == (ShardId(0, 1), S1, S2)
    fleet.tell(Loaded(ShardId(0, 1)))
    assert correlated_failure(fleet.state) is None


# -- plain data


def test_a_snapshot_is_plain_and_says_what_an_operator_asks() -> None:
    fleet = _fleet_in_every_state()
    fleet.open(2, 3, (S0, S1, S2))
    fleet.tell(Loaded(S0))
    seen = snapshot(fleet.state)
    assert json.loads(json.dumps(seen)) == seen
    assert seen["counts"] == dict.fromkeys(("HEALTHY", "SUSPECT", "STALE", "DEAD", "RESTARTING", "RETIRED"), 1)
    assert [shard["state"] for shard in seen["shards"]] == list(seen["counts"])
    assert (seen["epoch"], seen["landed_version"], seen["refit"]["version"]) == (2, 2, 3)
    assert seen["refit"]["participants"] == ["shard[0]", "shard[1]", "shard[2]"]
    assert seen["history"][-1]["after"] == "RETIRED"
    assert (seen["num_rejected"], seen["rejections"][-1]["event"]) == (1, "Loaded")


def test_a_snapshot_without_an_open_refit_says_so() -> None:
    assert snapshot(Fleet().state)["refit"] is None


@pytest.mark.parametrize("with_refit", [False, True])
def test_a_state_survives_its_plain_form_and_the_way_to_another_process(with_refit: bool) -> None:
    fleet = _fleet_in_every_state()
    if with_refit:
        fleet.open(2, 3, (S0, S1, S2))
    fleet.tell(Registered(ShardId(7), width=4, node="n7"), Loaded(S0))
    assert state_from_dict(json.loads(json.dumps(state_to_dict(fleet.state)))) == fleet.state
    assert pickle.loads(pickle.dumps(fleet.state)) == fleet.state


def test_what_is_no_state_is_refused() -> None:
    good = state_to_dict(Fleet().state)
    for broken in ({}, {**good, "shards": [[1]]}, {**good, "policy": {"no_such_number": 1}}):
        with pytest.raises(ValueError, match="not a ledger state"):
            state_from_dict(broken)
