"""What the ledger is told of a refit whose coordinator died, by what its participants answer."""

from __future__ import annotations

import pytest

from elastic_refit.core.events import Event, RefitEnded, RefitLanded, WeightsPartial
from elastic_refit.core.ids import ShardId
from elastic_refit.core.ledger_queries import serving
from elastic_refit.core.messages import Settled
from elastic_refit.core.refit_closing import closing_events
from tests.ledger_fleet import Fleet

S0, S1, S2 = SHARDS = tuple(ShardId(index) for index in range(3))
OLD, NEW, LAST = 4, 5, 5


@pytest.fixture
def fleet() -> Fleet:
    """Three shards in an open refit of version 5, in epoch 2."""
    fleet = Fleet(landed=False)
    fleet.open(2, NEW, SHARDS)
    return fleet


def close(fleet: Fleet, answers: dict[ShardId, Settled], *absent: ShardId) -> tuple[Event, ...]:
    refit = fleet.state.refits.open
    assert refit is not None
    return closing_events(refit, answers, absent=absent)


def whole(version: int = NEW) -> Settled:
    return Settled(LAST, 0.0, version)


def partial(through: int) -> Settled:
    return Settled(through, 0.0, None)


def test_a_refit_that_everybody_committed_has_landed_and_everybody_serves(fleet: Fleet) -> None:
    events = close(fleet, dict.fromkeys(SHARDS, whole()))
    assert events[-1] == RefitLanded(2, NEW)
    fleet.tell(*events)
    assert serving(fleet.state) == SHARDS
    assert [fleet.record(index).version for index in range(3)] == [NEW] * 3


def test_a_refit_that_one_did_not_commit_has_ended_and_that_one_is_partial(fleet: Fleet) -> None:
    events = close(fleet, {S0: whole(), S1: partial(2), S2: whole()})
    assert WeightsPartial(S1, 2, NEW, 2) in events
    assert isinstance(events[-1], RefitEnded)
    fleet.tell(*events)
    assert fleet.state.refits.open is None
    assert (fleet.record(0).version, fleet.record(1).version) == (NEW, None)


def test_a_shard_is_as_partial_as_that_rank_of_it_that_came_furthest(fleet: Fleet) -> None:
    events = close(fleet, {S0: whole(), S1: Settled(-1, 0.0, None, furthest=2), S2: whole()})
    assert WeightsPartial(S1, 2, NEW, 2) in events


def test_every_bucket_and_no_commit_is_not_whole(fleet: Fleet) -> None:
    events = close(fleet, {S0: whole(), S1: partial(LAST), S2: whole()})
    assert WeightsPartial(S1, 2, NEW, LAST) in events
    assert isinstance(events[-1], RefitEnded)


@pytest.mark.parametrize(
    "answer", [whole(OLD), partial(-1), Settled(3, 0.0, OLD, is_beside=True), Settled(3, 0.0, None, is_beside=True)]
)
def test_who_took_nothing_in_is_not_partial(fleet: Fleet, answer: Settled) -> None:
    (ending,) = close(fleet, {S1: answer})
    assert isinstance(ending, RefitEnded)


def test_of_who_does_not_answer_nothing_is_said_and_the_refit_has_not_landed(fleet: Fleet) -> None:
    events = close(fleet, {S0: whole(), S1: whole()})
    assert {event.shard for event in events[:-1]} == {S0, S1}  # type: ignore[union-attr]
    assert isinstance(events[-1], RefitEnded)


def test_who_is_dead_is_not_waited_for(fleet: Fleet) -> None:
    assert close(fleet, {S0: whole(), S1: whole()}, S2)[-1] == RefitLanded(2, NEW)
    assert isinstance(close(fleet, {}, *SHARDS)[-1], RefitEnded)


def test_a_shard_that_was_in_no_refit_has_no_part_in_its_end(fleet: Fleet) -> None:
    stranger = ShardId(7)
    events = close(fleet, {**dict.fromkeys(SHARDS, whole()), stranger: partial(3)})
    assert all(getattr(event, "shard", None) != stranger for event in events)
    assert events[-1] == RefitLanded(2, NEW)
