"""The rules about one shard, each from its sentence."""

from __future__ import annotations

import pytest

from elastic_refit.core.events import (
    ActorDied,
    Condemned,
    Drained,
    Event,
    Leased,
    Loaded,
    ProbeFailed,
    ProbeOk,
    RefitEnded,
    RefitLanded,
    Registered,
    RequestFailed,
    RequestSucceeded,
    RestartFailed,
    Restarting,
    Retired,
    ShardCommitted,
    WeightsPartial,
)
from elastic_refit.core.ids import ShardId
from elastic_refit.core.ledger_queries import remaining_restarts, suspected
from elastic_refit.core.ledger_table import ShardState
from tests.ledger_fleet import Fleet

S0, S1, S2 = ShardId(0), ShardId(1), ShardId(2)
TIMEOUT = ProbeFailed(S0, "timeout")
FAILED = RequestFailed(S0, "shard", "EngineDeadError")


# -- the two streaks


def test_a_passing_liveness_probe_does_not_erase_failures_of_real_requests() -> None:
    fleet = Fleet()
    fleet.tell(*[ProbeOk(S0)] * 10)
    fleet.tell(FAILED)
    fleet.tell(ProbeOk(S0))
    assert fleet.state_of(0) is ShardState.SUSPECT
    assert suspected(fleet.state) == (S0,)


def test_a_real_request_that_succeeds_does() -> None:
    fleet = Fleet()
    fleet.tell(FAILED)
    fleet.tell(RequestSucceeded(S0))
    assert fleet.state_of(0) is ShardState.HEALTHY
    assert suspected(fleet.state) == ()


def test_a_failed_probe_makes_the_state_suspect_and_names_no_suspect() -> None:
    fleet = Fleet()
    fleet.tell(TIMEOUT)
    assert fleet.state_of(0) is ShardState.SUSPECT
    assert suspected(fleet.state) == ()


def test_a_request_that_succeeds_does_not_erase_probes_that_failed() -> None:
    fleet = Fleet()
    fleet.tell(FAILED, TIMEOUT, RequestSucceeded(S0))
    assert fleet.state_of(0) is ShardState.SUSPECT
    fleet.tell(ProbeOk(S0))
    assert fleet.state_of(0) is ShardState.HEALTHY


def test_a_shard_that_still_fails_requests_lands_as_suspect() -> None:
    fleet = Fleet()
    fleet.tell(Drained(S1), FAILED, WeightsPartial(S0, 1, 1))
    fleet.land(2, 2, (S0, S2))
    assert fleet.state_of(0) is ShardState.SUSPECT


def test_a_suspect_that_lands_keeps_its_streak() -> None:
    fleet = Fleet()
    fleet.tell(FAILED)
    fleet.land(1, 2, fleet.shards)
    assert fleet.state_of(0) is ShardState.SUSPECT
    assert suspected(fleet.state) == (S0,)


def test_a_replacement_starts_with_clean_streaks() -> None:
    fleet = Fleet()
    fleet.tell(FAILED, TIMEOUT, TIMEOUT)
    fleet.replace(S0)
    assert (fleet.record(0).request_failures, fleet.record(0).probe_failures) == (0, 0)
    assert suspected(fleet.state) == ()


def test_a_survivor_of_an_aborted_refit_keeps_its_streaks() -> None:
    fleet = Fleet()
    fleet.tell(FAILED, TIMEOUT)
    fleet.open(1, 2, fleet.shards)
    fleet.tell(WeightsPartial(S0, 1, 2), RefitEnded(1, 2, "culprit unknown"))
    assert (fleet.record(0).request_failures, fleet.record(0).probe_failures) == (1, 1)
    assert suspected(fleet.state) == (S0,)


def test_an_error_of_the_request_is_not_the_fault_of_the_shard() -> None:
    fleet = Fleet()
    for _ in range(10):
        ack = fleet.tell(RequestFailed(S0, "request", "prompt too long"), after_s=60)
    assert ack.status == "ignored"
    assert fleet.state_of(0) is ShardState.HEALTHY


def test_one_outage_that_fails_64_requests_is_one_observation() -> None:
    fleet = Fleet(window_s=10.0)
    for _ in range(64):
        fleet.tell(FAILED, after_s=0.1)
    assert fleet.record(0).request_failures == 1
    fleet.tell(FAILED, after_s=10.0)
    assert fleet.record(0).request_failures == 2


def test_a_window_ends_where_it_says() -> None:
    fleet = Fleet(window_s=10.0)
    fleet.tell(FAILED)
    assert fleet.tell(FAILED, after_s=9.999).status == "ignored"
    assert fleet.tell(FAILED, after_s=0.001).status == "applied"


def test_a_success_ends_the_window() -> None:
    fleet = Fleet(window_s=10.0)
    fleet.tell(FAILED, RequestSucceeded(S0))
    assert fleet.tell(FAILED).status == "applied"


# -- death


def test_probes_that_fail_in_a_row_are_a_death_with_its_evidence() -> None:
    fleet = Fleet(dead_after_probes=3)
    fleet.tell(TIMEOUT, TIMEOUT, ProbeOk(S0), TIMEOUT, TIMEOUT)
    assert fleet.state_of(0) is ShardState.SUSPECT
    fleet.tell(ProbeFailed(S0, "error", "connection refused"))
    assert fleet.state_of(0) is ShardState.DEAD
    assert fleet.record(0).reason == ("ProbeFailed: 3 liveness probes failed in a row, last: error connection refused")


def test_requests_that_fail_window_after_window_are_a_death() -> None:
    fleet = Fleet(dead_after_requests=3, window_s=10.0)
    fleet.tell(FAILED)
    fleet.tell(FAILED, after_s=10)
    assert fleet.state_of(0) is ShardState.SUSPECT
    fleet.tell(FAILED, after_s=10)
    assert fleet.state_of(0) is ShardState.DEAD


def test_a_stale_shard_is_probed_too_and_its_death_is_recorded() -> None:
    for events in ([TIMEOUT] * 3, [ActorDied(S0, "killed")], [Condemned(S0, "silent", "no beacon, no ping")]):
        fleet = Fleet(landed=False)
        fleet.tell(*events)
        assert fleet.state_of(0) is ShardState.DEAD
        last = list(fleet.state.history)[-1]
        assert (last.shard, last.before, last.after) == (S0, ShardState.STALE, ShardState.DEAD)
        assert last.evidence


@pytest.mark.parametrize("failure", [TIMEOUT, FAILED])
def test_no_probe_kills_while_a_refit_is_open(failure: Event) -> None:
    fleet = Fleet(window_s=1.0)
    fleet.open(1, 2, fleet.shards)
    for _ in range(10):
        fleet.tell(failure, after_s=1)
    assert fleet.state_of(0) is ShardState.SUSPECT
    fleet.tell(RefitEnded(1, 2, "gave up"))
    fleet.tell(failure, after_s=1)
    assert fleet.state_of(0) is ShardState.DEAD


def test_a_refit_that_is_open_longer_than_any_coordinator_protects_nobody() -> None:
    fleet = Fleet(coordinator_s=100.0)
    fleet.open(1, 2, fleet.shards)
    fleet.tell(TIMEOUT, TIMEOUT)
    fleet.tell(TIMEOUT, after_s=100.0)
    assert fleet.state_of(0) is ShardState.SUSPECT
    fleet.tell(TIMEOUT, after_s=0.5)
    assert fleet.state_of(0) is ShardState.DEAD


@pytest.mark.parametrize(("rule", "evidence"), [("", "seen"), ("silent", ""), ("  ", "seen"), ("silent", "\n")])
def test_nobody_is_condemned_without_evidence(rule: str, evidence: str) -> None:
    fleet = Fleet()
    before = fleet.record(0)
    assert fleet.tell(Condemned(S0, rule, evidence)).status == "rejected"
    assert fleet.record(0) == before
    assert list(fleet.state.rejections)[-1].event == "Condemned"


def test_a_condemned_shard_is_dead_and_the_history_says_why() -> None:
    fleet = Fleet()
    fleet.tell(Condemned(S0, "behind_the_frontier", "entered 1 < 2, no tick for 4 s"))
    assert fleet.state_of(0) is ShardState.DEAD
    last = list(fleet.state.history)[-1]
    assert (last.cause, last.evidence) == ("Condemned by rule behind_the_frontier", "entered 1 < 2, no tick for 4 s")


def test_the_verdict_on_a_shard_that_is_dead_already_is_kept_beside_its_death() -> None:
    fleet = Fleet()
    fleet.tell(ActorDied(S0, "SIGKILL"), Condemned(S0, "own_fault", "its process is gone"))
    causes = [change.cause for change in fleet.state.history if change.shard == S0]
    assert causes[-2:] == ["ActorDied", "Condemned by rule own_fault"]


# -- leases


def test_a_lease_excuses_probes_that_are_not_answered_in_time() -> None:
    fleet = Fleet()
    fleet.tell(Leased(S0, 30.0, "compile"))
    for _ in range(5):
        assert fleet.tell(TIMEOUT, after_s=5).status == "ignored"
    assert fleet.state_of(0) is ShardState.HEALTHY
    assert fleet.tell(TIMEOUT, after_s=5).status == "applied"


def test_a_lease_never_hides_an_error_answer() -> None:
    fleet = Fleet(dead_after_probes=1)
    fleet.tell(Leased(S0, 30.0), ProbeFailed(S0, "error", "EngineDeadError"))
    assert fleet.state_of(0) is ShardState.DEAD


def test_leases_end_although_they_are_renewed() -> None:
    fleet = Fleet(lease_cap_s=100.0)
    for _ in range(10):
        assert fleet.tell(Leased(S0, 60.0), after_s=9).status == "applied"
    assert fleet.record(0).lease_until_s == fleet.now_s - 81 + 100
    assert fleet.tell(Leased(S0, 60.0), after_s=19).status == "rejected"
    assert fleet.tell(TIMEOUT).status == "applied"


def test_an_answer_makes_a_lease_possible_again() -> None:
    fleet = Fleet(lease_cap_s=100.0)
    for answer in (ProbeOk(S0), RequestSucceeded(S0)):
        fleet.tell(Leased(S0, 500.0))
        assert fleet.tell(Leased(S0, 10.0), after_s=100).status == "rejected"
        fleet.tell(answer)
        assert fleet.tell(Leased(S0, 10.0)).status == "applied"
        fleet.tell(answer, after_s=10)


def test_a_shorter_lease_does_not_shorten_the_one_that_runs() -> None:
    fleet = Fleet()
    fleet.tell(Leased(S0, 60.0))
    until_s = fleet.record(0).lease_until_s
    fleet.tell(Leased(S0, 1.0))
    assert fleet.record(0).lease_until_s == until_s


@pytest.mark.parametrize("duration_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_lease_lasts_some_time_and_not_for_ever(duration_s: float) -> None:
    assert Fleet().tell(Leased(S0, duration_s))[1:] == ("rejected", f"a lease of {duration_s} s is none")


def test_a_lease_ends_with_the_incarnation_and_when_it_has_loaded() -> None:
    fleet = Fleet()
    successor = ShardId(0, 1)
    fleet.tell(Leased(S0, 60.0), ActorDied(S0, "killed"), Restarting(successor))
    assert fleet.record(0).lease_until_s == 0.0
    fleet.tell(Leased(successor, 60.0, "load"), Loaded(successor))
    assert fleet.record(0).lease_until_s == 0.0


# -- restarts


def test_a_dead_shard_comes_back_as_stale_with_the_next_incarnation() -> None:
    fleet = Fleet()
    fleet.tell(ActorDied(S0, "killed"))
    fleet.tell(Restarting(ShardId(0, 1), node="n2"))
    assert fleet.state_of(0) is ShardState.RESTARTING
    fleet.tell(Loaded(ShardId(0, 1)))
    assert fleet.state_of(0) is ShardState.STALE
    assert (fleet.record(0).id, fleet.record(0).node, fleet.record(0).version) == (ShardId(0, 1), "n2", None)


@pytest.mark.parametrize("incarnation", [0, 2])
def test_a_successor_has_the_next_incarnation_and_no_other(incarnation: int) -> None:
    fleet = Fleet()
    fleet.tell(ActorDied(S0, "killed"))
    assert fleet.tell(Restarting(ShardId(0, incarnation))).status == "rejected"
    assert fleet.state_of(0) is ShardState.DEAD


def test_a_restart_that_failed_can_be_tried_again_until_the_budget_is_spent() -> None:
    fleet = Fleet(restart_budget=2)
    fleet.tell(ActorDied(S0, "killed"))
    for incarnation in (1, 2):
        assert fleet.tell(Restarting(ShardId(0, incarnation))).status == "applied"
        fleet.tell(RestartFailed(ShardId(0, incarnation), "out of memory"))
    ack = fleet.tell(Restarting(ShardId(0, 3)))
    assert (ack.status, "2 restarts" in ack.reason) == ("rejected", True)
    assert remaining_restarts(fleet.state, 0) == 0


def test_the_restart_budget_refills_after_a_long_healthy_stretch() -> None:
    fleet = Fleet(restart_budget=1, restart_refill_s=100.0)
    again = fleet.replace(S0)
    fleet.land(2, 2, (again, S1, S2))
    fleet.tell(ProbeOk(again), after_s=99)
    assert remaining_restarts(fleet.state, 0) == 0
    assert remaining_restarts(fleet.state, 0, now_s=fleet.now_s + 1) == 1
    fleet.tell(ActorDied(again, "killed"), after_s=1)
    assert remaining_restarts(fleet.state, 0) == 1
    assert fleet.tell(Restarting(ShardId(0, 2))).status == "applied"


def test_a_stretch_that_suspicion_interrupted_does_not_refill() -> None:
    fleet = Fleet(restart_budget=1, restart_refill_s=100.0)
    again = fleet.replace(S0)
    fleet.land(2, 2, (again, S1, S2))
    fleet.tell(RequestFailed(again, "shard"), RequestSucceeded(again), after_s=60)
    fleet.tell(ActorDied(again, "killed"), after_s=60)
    assert remaining_restarts(fleet.state, 0) == 0


def test_a_death_that_is_not_the_shards_fault_is_not_charged() -> None:
    fleet = Fleet(restart_budget=0)
    fleet.tell(ActorDied(S0, "its watchdog exited", charged=False))
    assert fleet.tell(Restarting(ShardId(0, 1))).status == "applied"
    fleet.tell(ActorDied(ShardId(0, 1), "killed"))
    assert fleet.tell(Restarting(ShardId(0, 2))).status == "rejected"


@pytest.mark.parametrize("death", [[TIMEOUT] * 3, [Condemned(S0, "silent", "no beacon")], [FAILED] * 3])
def test_every_other_death_is_charged(death: list[Event]) -> None:
    fleet = Fleet(window_s=0.0, restart_budget=1)
    fleet.tell(*death)
    fleet.tell(Restarting(ShardId(0, 1)))
    assert remaining_restarts(fleet.state, 0) == 0


# -- leaving


def test_a_drained_shard_takes_no_traffic_is_not_promoted_and_not_replaced() -> None:
    fleet = Fleet()
    fleet.tell(Drained(S0, "scale down"))
    assert fleet.state_of(0) is ShardState.STALE
    fleet.land(1, 2, fleet.shards)
    assert fleet.state_of(0) is ShardState.STALE
    fleet.tell(ActorDied(S0, "stopped"))
    assert "drained" in fleet.tell(Restarting(ShardId(0, 1))).reason


def test_nothing_brings_a_retired_shard_back() -> None:
    fleet = Fleet()
    fleet.tell(Retired(S0, "scale down"))
    for event in (
        Registered(S0),
        Registered(ShardId(0, 1)),
        ProbeOk(S0),
        RequestSucceeded(S0),
        Restarting(ShardId(0, 1)),
        Loaded(S0),
        ShardCommitted(S0, 1, 1),
        RefitLanded(1, 1),
        ActorDied(S0, "stopped"),
    ):
        fleet.tell(event)
        assert fleet.state_of(0) is ShardState.RETIRED
    fleet.land(1, 2, (S1, S2))
    assert fleet.state_of(0) is ShardState.RETIRED


# -- registration


def test_registering_twice_is_no_news_and_a_taken_seat_is_refused() -> None:
    fleet = Fleet()
    assert fleet.tell(Registered(S0)).status == "ignored"
    assert fleet.tell(Registered(ShardId(0, 1))).status == "rejected"


@pytest.mark.parametrize(
    "event", [Registered(ShardId(-1)), Registered(ShardId(5, -1)), Registered(ShardId(5), width=0)]
)
def test_what_is_no_shard_is_not_registered(event: Event) -> None:
    fleet = Fleet()
    assert fleet.tell(event).status == "rejected"
    assert len(fleet.state.shards) == 3


def test_who_was_never_registered_is_refused() -> None:
    ack = Fleet().tell(ProbeOk(ShardId(9)))
    assert (ack.status, ack.reason) == ("rejected", "shard[9] was never registered")
