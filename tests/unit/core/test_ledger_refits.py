"""The rules about refits, epochs and versions, each from its sentence."""

from __future__ import annotations

import pytest

from elastic_refit.core.events import (
    ActorDied,
    Condemned,
    EpochOpened,
    Event,
    ProbeFailed,
    ProbeOk,
    RefitEnded,
    RefitLanded,
    RefitOpened,
    Registered,
    RequestFailed,
    RequestSucceeded,
    Restarting,
    Retired,
    ShardCommitted,
    WeightsPartial,
)
from elastic_refit.core.ids import ShardId
from elastic_refit.core.ledger_queries import serving
from elastic_refit.core.ledger_table import ShardState
from tests.ledger_fleet import Fleet

S0, S1, S2 = ShardId(0), ShardId(1), ShardId(2)
TIMEOUT = ProbeFailed(S0, "timeout")
FAILED = RequestFailed(S0, "shard", "EngineDeadError")


# -- what promotes, and whom


@pytest.mark.parametrize("answer", [ProbeOk(S0), RequestSucceeded(S0)])
@pytest.mark.parametrize("seated", ["STALE", "DEAD", "RESTARTING", "RETIRED"])
def test_no_answer_makes_a_shard_that_does_not_serve_healthy(seated: str, answer: Event) -> None:
    fleet = Fleet(landed=False)
    if seated == "RETIRED":
        fleet.tell(Retired(S0))
    elif seated != "STALE":
        fleet.tell(ActorDied(S0, "killed"))
    shard = S0
    if seated == "RESTARTING":
        shard = ShardId(0, 1)
        fleet.tell(Restarting(shard))
    for _ in range(10):
        fleet.tell(type(answer)(shard), after_s=60)  # type: ignore[call-arg,arg-type]  # both take one shard
    assert fleet.state_of(0).name == seated


def test_a_new_index_joins_as_stale_and_serves_after_a_refit_that_it_committed() -> None:
    fleet = Fleet()
    fleet.tell(Registered(ShardId(3)))
    assert fleet.state_of(3) is ShardState.STALE
    fleet.land(2, 2, (*fleet.shards, ShardId(3)))
    assert fleet.state_of(3) is ShardState.HEALTHY


def test_a_landed_refit_promotes_only_the_incarnation_that_was_in_its_frozen_set() -> None:
    fleet = Fleet(landed=False)
    fleet.open(1, 1, fleet.shards)
    fleet.tell(*(ShardCommitted(shard, 1, 1) for shard in fleet.shards))
    replacement = fleet.replace(S0)
    assert fleet.tell(ShardCommitted(replacement, 1, 1)).status == "rejected"
    fleet.tell(RefitLanded(1, 1))
    assert fleet.state_of(0) is ShardState.STALE
    assert fleet.record(0).version is None
    assert serving(fleet.state) == (S1, S2)


def test_a_serving_shard_that_was_not_in_the_landed_refit_becomes_stale() -> None:
    fleet = Fleet()
    fleet.land(2, 2, (S1, S2))
    assert fleet.state_of(0) is ShardState.STALE
    assert serving(fleet.state) == (S1, S2)


def test_a_participant_that_did_not_commit_is_not_promoted_and_does_not_go_on_serving() -> None:
    fleet = Fleet()
    fleet.tell(Registered(ShardId(3)))
    fleet.open(2, 2, (*fleet.shards, ShardId(3)))
    fleet.tell(ShardCommitted(S1, 2, 2), RefitLanded(2, 2))
    assert [fleet.state_of(index).name for index in range(4)] == ["STALE", "HEALTHY", "STALE", "STALE"]


def test_a_participant_that_died_after_its_commit_stays_dead_when_the_refit_lands() -> None:
    fleet = Fleet()
    fleet.open(1, 2, fleet.shards)
    fleet.tell(*(ShardCommitted(shard, 1, 2) for shard in fleet.shards))
    fleet.tell(ActorDied(S0, "killed"), RefitLanded(1, 2))
    assert fleet.state_of(0) is ShardState.DEAD


def test_a_refit_that_nobody_committed_does_not_land() -> None:
    fleet = Fleet()
    fleet.open(1, 2, fleet.shards)
    assert "nobody" in fleet.tell(RefitLanded(1, 2)).reason
    fleet.tell(ShardCommitted(S0, 1, 2), ActorDied(S0, "killed"))
    assert "nobody" in fleet.tell(RefitLanded(1, 2)).reason
    assert fleet.state.refits.landed_version == 1


def test_a_shard_that_committed_in_an_attempt_that_failed_needs_not_commit_in_the_retry() -> None:
    fleet = Fleet()
    fleet.open(1, 2, fleet.shards)
    fleet.tell(ShardCommitted(S1, 1, 2), Condemned(S0, "own_fault", "its process is gone"))
    fleet.open(2, 2, (S1, S2))
    fleet.tell(ShardCommitted(S2, 2, 2), RefitLanded(2, 2))
    assert serving(fleet.state) == (S1, S2)


# -- identity, epochs and versions


@pytest.mark.parametrize("sight", [ProbeOk(S0), TIMEOUT, RequestSucceeded(S0), FAILED, ActorDied(S0, "late notice")])
def test_late_word_of_a_replaced_incarnation_says_nothing_of_its_successor(sight: Event) -> None:
    fleet = Fleet()
    fleet.replace(S0)
    before = fleet.record(0)
    assert fleet.tell(sight).status == "ignored"
    assert fleet.record(0) == before


def test_a_late_verdict_on_a_replaced_incarnation_is_refused() -> None:
    fleet = Fleet()
    fleet.replace(S0)
    assert fleet.tell(Condemned(S0, "silent", "no beacon")).status == "rejected"
    assert fleet.state_of(0) is ShardState.STALE


def test_word_of_an_incarnation_that_is_yet_to_come_is_refused() -> None:
    assert Fleet().tell(ProbeOk(ShardId(0, 1))).status == "rejected"


def test_epochs_only_rise() -> None:
    fleet = Fleet()
    assert fleet.tell(EpochOpened(4, 1)).status == "applied"
    assert fleet.tell(EpochOpened(4, 1)).status == "rejected"
    assert fleet.tell(EpochOpened(3, 2)).status == "rejected"
    assert fleet.state.refits.epoch == 4


def test_a_replaced_coordinator_opens_nothing() -> None:
    fleet = Fleet()
    fleet.tell(EpochOpened(2, 5))
    assert fleet.tell(EpochOpened(3, 4)).status == "rejected"
    assert fleet.tell(EpochOpened(3, 5)).status == "applied"


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_refit_opens_in_the_open_epoch(epoch: int) -> None:
    assert Fleet().tell(RefitOpened(epoch, 2, (S0,))).status == "rejected"


def test_one_refit_at_a_time_is_open_in_an_epoch() -> None:
    fleet = Fleet()
    fleet.open(1, 2, fleet.shards)
    assert fleet.tell(RefitOpened(1, 3, fleet.shards)).status == "rejected"


def test_a_retry_opens_again_in_its_own_epoch_and_counts_as_the_same_refit() -> None:
    fleet = Fleet()
    fleet.open(1, 2, fleet.shards)
    opened_s = fleet.now_s
    fleet.tell(EpochOpened(2, 1), after_s=5)
    fleet.open(2, 2, (S1, S2))
    refit = fleet.state.refits.open
    assert refit is not None
    assert (refit.epoch, refit.attempts, refit.opened_s) == (2, 2, opened_s)


def test_another_version_in_a_new_epoch_is_another_refit() -> None:
    fleet = Fleet()
    fleet.open(1, 2, fleet.shards)
    fleet.tell(EpochOpened(2, 1), after_s=5)
    fleet.open(2, 3, fleet.shards)
    refit = fleet.state.refits.open
    assert refit is not None
    assert (refit.version, refit.attempts, refit.opened_s) == (3, 1, fleet.now_s)


def test_versions_never_go_backwards() -> None:
    fleet = Fleet()
    fleet.open(1, 5, fleet.shards)
    fleet.tell(RefitEnded(1, 5, "gave up"))
    assert fleet.tell(RefitOpened(1, 4, fleet.shards)).status == "rejected"
    assert fleet.tell(RefitOpened(1, 5, fleet.shards)).status == "applied"


@pytest.mark.parametrize("participants", [(), (ShardId(7),), (ShardId(0, 1),)])
def test_a_refit_has_participants_that_exist(participants: tuple[ShardId, ...]) -> None:
    assert Fleet().tell(RefitOpened(1, 2, participants)).status == "rejected"


def test_a_participant_that_died_while_it_was_planned_is_found_out_by_the_refit() -> None:
    fleet = Fleet()
    fleet.tell(ActorDied(S0, "killed"))
    fleet.open(1, 2, fleet.shards)
    assert fleet.tell(ShardCommitted(S0, 1, 2)).status == "ignored"


@pytest.mark.parametrize(
    "late",
    [ShardCommitted(S0, 1, 2), RefitLanded(1, 2), RefitOpened(1, 3, (S0,))],
    ids=lambda event: type(event).__name__,
)
def test_messages_of_an_epoch_that_is_over_change_nothing(late: Event) -> None:
    fleet = Fleet()
    fleet.open(1, 2, fleet.shards)
    fleet.tell(ShardCommitted(S1, 1, 2), EpochOpened(2, 1))
    before = (fleet.state.shards, fleet.state.refits)
    assert fleet.tell(late).status == "rejected"
    assert (fleet.state.shards, fleet.state.refits) == before


@pytest.mark.parametrize(
    "late",
    [ShardCommitted(S0, 1, 2), RefitLanded(1, 2), RefitEnded(1, 2, "late")],
    ids=lambda event: type(event).__name__,
)
def test_messages_of_the_refit_before_in_the_same_epoch_change_nothing(late: Event) -> None:
    fleet = Fleet()
    fleet.land(1, 2, fleet.shards)
    fleet.open(1, 3, fleet.shards)
    before = (fleet.state.shards, fleet.state.refits)
    assert fleet.tell(late).status == "rejected"
    assert (fleet.state.shards, fleet.state.refits) == before


def test_a_refit_ends_in_its_own_epoch_or_the_one_that_was_opened_to_retry_it() -> None:
    for epoch, status in ((1, "applied"), (2, "applied"), (0, "rejected"), (3, "rejected")):
        fleet = Fleet()
        fleet.open(1, 2, fleet.shards)
        fleet.tell(EpochOpened(2, 1))
        assert fleet.tell(RefitEnded(epoch, 2, "gave up")).status == status
        assert (fleet.state.refits.open is None) == (status == "applied")


@pytest.mark.parametrize("event", [ShardCommitted(S0, 1, 2), RefitLanded(1, 2), RefitEnded(1, 2, "?")])
def test_without_an_open_refit_nobody_commits_and_nothing_lands_or_ends(event: Event) -> None:
    assert Fleet().tell(event).status == "rejected"


def test_who_is_no_participant_commits_nothing() -> None:
    fleet = Fleet()
    fleet.open(1, 2, (S1, S2))
    assert fleet.tell(ShardCommitted(S0, 1, 2)).status == "rejected"
    assert fleet.record(0).version == 1


# -- a mixture of versions


def test_weights_that_are_partial_take_a_shard_out_of_traffic() -> None:
    fleet = Fleet()
    fleet.open(1, 2, fleet.shards)
    fleet.tell(WeightsPartial(S0, 1, 2, applied_through=3))
    assert fleet.state_of(0) is ShardState.STALE
    assert fleet.record(0).version is None
    assert fleet.record(0).reason == "WeightsPartial: applied through bucket 3 of version 2"


def test_a_shard_that_is_partial_in_an_epoch_commits_only_in_a_later_one() -> None:
    fleet = Fleet()
    fleet.open(1, 2, fleet.shards)
    fleet.tell(WeightsPartial(S0, 1, 2))
    assert fleet.tell(ShardCommitted(S0, 1, 2)).status == "rejected"
    fleet.open(2, 2, fleet.shards)
    assert fleet.tell(ShardCommitted(S0, 2, 2)).status == "applied"


def test_partial_weights_that_are_reported_after_the_epoch_was_left_still_count() -> None:
    fleet = Fleet()
    fleet.open(1, 2, fleet.shards)
    fleet.tell(EpochOpened(2, 1))
    assert fleet.tell(WeightsPartial(S0, 1, 2)).status == "applied"
    assert fleet.state_of(0) is ShardState.STALE


def test_a_late_report_of_partial_weights_does_not_undo_a_later_commit() -> None:
    fleet = Fleet()
    fleet.open(1, 2, fleet.shards)
    fleet.land(2, 2, fleet.shards)
    assert fleet.tell(WeightsPartial(S0, 1, 2)).status == "rejected"
    assert fleet.state_of(0) is ShardState.HEALTHY


def test_a_contradiction_within_one_epoch_is_read_as_a_mixture() -> None:
    fleet = Fleet()
    fleet.open(1, 2, fleet.shards)
    fleet.tell(ShardCommitted(S0, 1, 2), WeightsPartial(S0, 1, 2))
    assert (fleet.state_of(0), fleet.record(0).version) == (ShardState.STALE, None)


def test_weights_of_an_epoch_that_was_never_opened_are_refused() -> None:
    assert Fleet().tell(WeightsPartial(S0, 2, 2)).status == "rejected"
