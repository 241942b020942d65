"""What becomes of a refit when one thing goes wrong in it: kills, hangs, errors, wrong bytes, links, trainers."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from elastic_refit.core import events as ev
from elastic_refit.core.ids import Member, ShardId
from elastic_refit.core.ledger_queries import serving, stale
from elastic_refit.core.messages import Op
from elastic_refit.core.refit_state import Ended, Landed
from tests.unit.core.refit_driver import NUM_BUCKETS, S0, S1, S2, S3, T0, T1, FakeFleet, Kind, names


def landed(fleet: FakeFleet, version: int) -> Landed:
    outcome = fleet.refit(version)
    assert isinstance(outcome, Landed), outcome
    return outcome


def ended(fleet: FakeFleet, version: int) -> Ended:
    outcome = fleet.refit(version)
    assert isinstance(outcome, Ended), outcome
    return outcome


def warm(**settings: object) -> FakeFleet:
    """A fleet after its first refit."""
    fleet = FakeFleet(**settings)  # type: ignore[arg-type] # each test names fields of the fleet
    assert not landed(fleet, 1).findings
    return fleet


def recovers_from(kind: Kind, victim: Member, op: Op, *, rule: int, fleet: FakeFleet | None = None) -> FakeFleet:
    """The refit loses ``victim`` and nobody else, in one rebuild, and the others serve the new version."""
    fleet = fleet or warm()
    before = set(fleet.state.built.shard_ids if fleet.state.built else map(ShardId, range(fleet.num_shards)))
    fleet.plan(kind, victim, op)
    outcome = landed(fleet, 2)
    assert names(outcome) == {str(victim): rule}
    assert outcome.recoveries == 1
    assert set(outcome.membership.shard_ids) == before - {victim} == set(serving(fleet.ledger))
    assert all(fleet.serving[shard] == 2 for shard in outcome.membership.shard_ids)
    assert [event.shard for event in fleet.recorded(ev.Condemned) if isinstance(event, ev.Condemned)] == [victim]
    assert fleet.called(Op.FENCE) == [victim]
    return fleet


def ends_with(error: str, fleet: FakeFleet, *, named: dict[str, int]) -> Ended:
    outcome = ended(fleet, 2)
    assert (outcome.error, names(outcome)) == (error, named)
    return outcome


def cut_off(up: int, down: int, suspects: Collection[ShardId] = ()) -> FakeFleet:
    """No bytes pass from rank ``up`` to rank ``down``, for as long as both are in the group."""
    fleet = warm(suspects=frozenset(suspects))
    fleet.cut = (up, down)
    return fleet


# -- nothing wrong


def test_the_first_refit_builds_the_group_and_promotes_everybody() -> None:
    fleet = FakeFleet()
    outcome = landed(fleet, 1)
    assert outcome.rebuilt
    assert outcome.membership.world_size == 5
    assert serving(fleet.ledger) == (S0, S1, S2)


def test_a_refit_over_the_same_members_builds_nothing() -> None:
    fleet = warm()
    assert not landed(fleet, 2).rebuilt
    assert fleet.rebuilds == 0
    assert landed(fleet, 3).membership.epoch == 1


def test_a_loss_that_the_ledger_knows_is_rebuilt_once() -> None:
    fleet = warm()
    fleet.tell(ev.ActorDied(S0, "exit"))
    assert [landed(fleet, version).rebuilt for version in (2, 3, 4)] == [True, False, False]


def test_a_shard_that_dies_idle_is_left_out_without_a_verdict() -> None:
    fleet = warm()
    fleet.dead.add(S0)
    outcome = landed(fleet, 2)
    assert outcome.membership.shard_ids == (S1, S2)
    assert not outcome.findings
    assert fleet.rebuilds == 1


def test_a_shard_that_freezes_idle_is_condemned_before_a_byte_moves_and_without_an_incident() -> None:
    fleet = warm()
    fleet.frozen.add(S0)
    outcome = landed(fleet, 2)
    assert names(outcome) == {"shard[0]": 2}
    assert outcome.recoveries == 0
    assert fleet.rebuilds == 1
    assert fleet.called(Op.PING) == []
    assert fleet.called(Op.FENCE) == [S0]


# -- crash


@pytest.mark.parametrize("op", [Op.PREPARE, Op.JOIN])
def test_a_shard_that_dies_while_joining_is_left_behind(op: Op) -> None:
    fleet = recovers_from("kill", S0, op, rule=1, fleet=FakeFleet())
    assert fleet.rebuilds == 2


@pytest.mark.parametrize("op", [Op.READY, Op.TRANSFER, Op.COMMIT])
@pytest.mark.parametrize("victim", [S0, S1, S2], ids=str)
def test_a_shard_that_dies_is_named_though_its_victims_report_first(victim: ShardId, op: Op) -> None:
    fleet = recovers_from("kill", victim, op, rule=1)
    assert fleet.rebuilds == 1


def test_the_retry_begins_after_the_last_bucket_that_every_survivor_has() -> None:
    fleet = warm(reached=2)
    fleet.plan("kill", S0, Op.TRANSFER)
    outcome = landed(fleet, 2)
    assert fleet.start_buckets == [0, 3]
    assert outcome.resent_buckets == NUM_BUCKETS - 3


def test_a_death_after_the_last_byte_resends_nothing() -> None:
    fleet = warm()
    fleet.plan("kill after all", S0, Op.TRANSFER)
    fleet.reached = NUM_BUCKETS - 1
    outcome = landed(fleet, 2)
    assert names(outcome) == {"shard[0]": 1}
    assert outcome.resent_buckets == 0
    assert fleet.recorded(ev.WeightsPartial) == []


def test_two_that_die_at_once_are_one_incident_and_one_rebuild() -> None:
    fleet = warm(num_shards=4)
    fleet.plan("kill", S0, Op.TRANSFER)
    fleet.plan("kill", S2, Op.TRANSFER)
    assert names(landed(fleet, 2)) == {"shard[0]": 1, "shard[2]": 1}
    assert fleet.rebuilds == 1


def test_a_death_and_a_freeze_at_once_are_named_together_by_their_rules() -> None:
    fleet = warm(num_shards=4)
    fleet.plan("kill", S0, Op.TRANSFER)
    fleet.plan("freeze", S2, Op.TRANSFER)
    outcome = landed(fleet, 2)
    assert names(outcome) == {"shard[0]": 1, "shard[2]": 2}
    assert (fleet.rebuilds, outcome.recoveries) == (1, 1)


def test_the_death_of_all_shards_leaves_nobody() -> None:
    fleet = warm()
    for shard in (S0, S1, S2):
        fleet.plan("kill", shard, Op.TRANSFER)
    outcome = ends_with("NoSurvivingShards", fleet, named={"shard[0]": 1, "shard[1]": 1, "shard[2]": 1})
    assert "SIGKILL" in outcome.sentence


def test_a_fleet_below_its_floor_is_exhausted() -> None:
    fleet = warm(min_healthy=3)
    fleet.plan("kill", S0, Op.TRANSFER)
    outcome = ends_with("FleetExhausted", fleet, named={"shard[0]": 1})
    assert "2 of min_healthy=3" in outcome.sentence


def test_a_refit_without_any_shard_ends_at_once() -> None:
    fleet = FakeFleet(num_shards=0)
    assert ended(fleet, 1).error == "NoSurvivingShards"
    assert fleet.called(Op.PROBE) == []


# -- hang


@pytest.mark.parametrize("op", [Op.READY, Op.TRANSFER, Op.COMMIT])
def test_a_frozen_shard_is_named_by_its_silence(op: Op) -> None:
    recovers_from("freeze", S1, op, rule=2)


@pytest.mark.parametrize("op", [Op.PREPARE, Op.JOIN])
def test_a_shard_that_freezes_while_joining_is_named_by_its_silence(op: Op) -> None:
    recovers_from("freeze", S0, op, rule=2, fleet=FakeFleet())


def test_two_frozen_shards_are_named_together() -> None:
    fleet = warm(num_shards=4)
    fleet.plan("freeze", S0, Op.TRANSFER)
    fleet.plan("freeze", S3, Op.TRANSFER)
    assert names(landed(fleet, 2)) == {"shard[0]": 2, "shard[3]": 2}
    assert fleet.rebuilds == 1


@pytest.mark.parametrize("op", [Op.READY, Op.TRANSFER, Op.COMMIT])
def test_a_wedged_shard_is_named_by_its_lag(op: Op) -> None:
    recovers_from("wedge", S0, op, rule=3)


def test_a_shard_that_is_wedged_while_joining_is_named_by_its_lag() -> None:
    recovers_from("wedge", S0, Op.PREPARE, rule=3, fleet=FakeFleet())


def test_a_cut_link_ends_the_run_and_names_nobody_but_the_edge() -> None:
    outcome = ends_with("UnattributedHang", cut_off(2, 3), named={})
    assert "the link from rank 2 (shard[0]) to rank 3 (shard[1])" in outcome.sentence
    assert len(outcome.evidence) == 5


def test_the_one_suspect_at_a_cut_link_is_named() -> None:
    assert names(landed(cut_off(2, 3, [S0]), 2)) == {"shard[0]": 4}


@pytest.mark.parametrize("suspects", [{S0}, {S1, S2}], ids=["elsewhere", "at both ends"])
def test_suspects_that_the_link_does_not_single_out_are_not_condemned(suspects: set[ShardId]) -> None:
    ends_with("UnattributedHang", cut_off(3, 4, suspects), named={})


# -- bad data


def test_a_shard_that_raises_alone_is_named() -> None:
    recovers_from("raise", S0, Op.TRANSFER, rule=1)


def test_an_error_of_every_shard_is_the_weights_and_nobody_is_condemned() -> None:
    fleet = warm()
    for shard in (S0, S1, S2):
        fleet.plan("raise", shard, Op.TRANSFER)
    outcome = ended(fleet, 2)
    assert outcome.error == "RefitRejected"
    assert fleet.recorded(ev.Condemned) == []
    assert fleet.called(Op.FENCE) == []
    assert set(fleet.called(Op.SETTLE)) == {T0, T1, S0, S1, S2}


def test_a_shard_whose_bytes_alone_are_wrong_is_named_and_never_serves() -> None:
    fleet = recovers_from("corrupt", S0, Op.TRANSFER, rule=1)
    assert fleet.serving[S0] is None


def test_bytes_altered_on_a_link_once_are_resent_and_nobody_is_condemned() -> None:
    fleet = warm(corrupted_from={})
    fleet.corrupted_from = {1: S1}
    outcome = landed(fleet, 2)
    assert not outcome.findings
    assert fleet.start_buckets == [0, 0]
    assert (fleet.rebuilds, outcome.recoveries) == (1, 1)


def test_bytes_altered_on_a_link_always_end_the_run_at_the_first_bad_hop() -> None:
    fleet = warm()
    fleet.corrupted_from = dict.fromkeys(range(1, 9), S1)
    outcome = ends_with("DigestMismatch", fleet, named={})
    assert "shard[1] first" in outcome.sentence


def test_bytes_altered_on_a_link_after_another_incident_are_resent_from_the_start() -> None:
    fleet = warm(num_shards=4, max_recoveries=2)
    fleet.plan("kill", S0, Op.TRANSFER)
    fleet.corrupted_from = {2: S2}
    assert names(landed(fleet, 2)) == {"shard[0]": 1}
    assert fleet.start_buckets == [0, 2, 0]


# -- trainers


@pytest.mark.parametrize(("kind", "rule"), [("kill", 1), ("freeze", 2), ("wedge", 3), ("raise", 1)])
@pytest.mark.parametrize("trainer", [T0, T1], ids=str)
def test_the_loss_of_a_trainer_ends_the_run_by_name(trainer: Member, kind: Kind, rule: int) -> None:
    fleet = warm()
    fleet.plan(kind, trainer, Op.READY if kind == "wedge" else Op.TRANSFER)
    outcome = ends_with("TrainerLost", fleet, named={str(trainer): rule})
    assert str(trainer) in outcome.sentence
    assert fleet.called(Op.FENCE) == []
    assert fleet.rebuilds == 0


@pytest.mark.parametrize(("kind", "rule"), [("kill", 1), ("freeze", 2)])
def test_a_trainer_that_is_lost_before_the_refit_ends_the_run(kind: str, rule: int) -> None:
    fleet = warm()
    (fleet.dead if kind == "kill" else fleet.frozen).add(T1)
    ends_with("TrainerLost", fleet, named={"trainer[1]": rule})
    assert fleet.recorded(ev.RefitEnded) == []


def test_a_shard_that_dies_with_a_trainer_is_condemned_and_fenced_all_the_same() -> None:
    fleet = warm()
    fleet.plan("kill", T1, Op.TRANSFER)
    fleet.plan("kill", S0, Op.TRANSFER)
    ends_with("TrainerLost", fleet, named={"shard[0]": 1, "trainer[1]": 1})
    assert fleet.called(Op.FENCE) == [S0]


def test_everybody_silent_is_the_coordinator_that_is_cut_off() -> None:
    fleet = warm()
    fleet.frozen |= {T0, T1, S0, S1, S2}
    ends_with("CoordinatorLost", fleet, named={})
    assert stale(fleet.ledger) == ()


def test_everybody_silent_in_a_transfer_is_the_coordinator_that_is_cut_off() -> None:
    fleet = warm()
    for member in (T0, T1, S0, S1, S2):
        fleet.plan("freeze", member, Op.TRANSFER)
    ends_with("CoordinatorLost", fleet, named={})
    assert fleet.recorded(ev.Condemned) == []
