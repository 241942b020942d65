"""The fold: once, in order, without a trace in older states, and within bounds."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_refit.core.events import (
    ActorDied,
    Condemned,
    Entry,
    EpochOpened,
    Loaded,
    ProbeOk,
    Registered,
    RequestFailed,
    RequestSucceeded,
)
from elastic_refit.core.ids import ShardId
from elastic_refit.core.ledger import Ack, apply, fold, new_ledger, replay
from elastic_refit.core.ledger_queries import serving
from elastic_refit.core.ledger_state import LedgerPolicy
from tests.ledger_fleet import Fleet

S0 = ShardId(0)


def test_an_entry_applies_once_however_often_and_in_whatever_order_it_arrives() -> None:
    entries = [Entry("router", 3, seq, 10.0, RequestFailed(S0, "shard")) for seq in range(4)]
    start = apply(new_ledger(LedgerPolicy(window_s=0.0, dead_after_requests=9)), Entry("d", 0, 0, 1.0, Registered(S0)))
    once = start
    for entry in (entries[2], entries[0], entries[3], entries[1]):
        once = apply(once, entry)
    often = start
    for entry in (entries[2], entries[2], entries[0], entries[3], entries[2], entries[0], entries[1], *entries):
        often = apply(often, entry)
    assert often == once
    assert fold(often, entries[1])[1] == Ack(1, "duplicate")
    record = often.shards.get(0)
    assert record is not None and record.request_failures == 4


def test_the_same_number_of_another_writer_or_incarnation_is_another_entry() -> None:
    state = apply(new_ledger(LedgerPolicy(window_s=0.0)), Entry("a", 0, 0, 1.0, Registered(S0)))
    for writer, incarnation in (("b", 0), ("a", 1)):
        state, ack = fold(state, Entry(writer, incarnation, 0, 1.0, ProbeOk(S0)))
        assert ack.status == "applied"


@pytest.mark.parametrize("time_s", [5.0, float("nan"), float("inf"), float("-inf")])
def test_time_never_runs_backwards_and_never_away(time_s: float) -> None:
    state = apply(new_ledger(LedgerPolicy()), Entry("a", 0, 0, 10.0, Registered(S0)))
    assert apply(state, Entry("a", 0, 1, time_s, ProbeOk(S0))).now_s == 10.0
    assert apply(state, Entry("a", 0, 1, 11.0, ProbeOk(S0))).now_s == 11.0


def test_applying_leaves_the_older_state_as_it_was() -> None:
    fleet = Fleet()
    before = fleet.state
    kept = replay(fleet.policy, [])
    fleet.tell(ActorDied(S0, "killed"), Registered(ShardId(9)), Loaded(S0))
    assert serving(before) == fleet.shards
    assert before.shards.get(9) is None
    assert before.rejections.total == 0
    assert kept == new_ledger(fleet.policy)


def test_what_is_rejected_is_on_record_with_its_reason_and_writer() -> None:
    fleet = Fleet()
    fleet.tell(Loaded(S0), after_s=5)
    (rejection,) = fleet.state.rejections
    assert rejection == (fleet.now_s, "Loaded", "shard[0]", "LOADED means nothing to a shard that is HEALTHY", "driver")
    fleet.tell(EpochOpened(0, 1))
    assert list(fleet.state.rejections)[-1].subject == "epoch 0"


def test_a_death_is_charged_to_the_first_who_reports_it() -> None:
    fleet = Fleet()
    fleet.tell(ActorDied(S0, "its watchdog exited", charged=False))
    assert fleet.tell(ActorDied(S0, "worker died")).status == "ignored"
    fleet.tell(Condemned(S0, "own_fault", "its process is gone"))
    assert not fleet.record(0).is_death_charged


def test_history_and_writers_have_bounds() -> None:
    fleet = Fleet(1, window_s=0.0, max_history=100, max_writers=3, dead_after_requests=10**6)
    for _ in range(500):
        fleet.tell(RequestFailed(S0, "shard"), RequestSucceeded(S0), Loaded(S0))
    assert 100 <= len(list(fleet.state.history)) <= 164
    assert fleet.state.history.total == 1002
    assert 100 <= len(list(fleet.state.rejections)) <= 164
    for each in range(5):
        fleet.state = apply(fleet.state, Entry(f"router{each}", 0, 0, fleet.now_s + each, ProbeOk(S0)))
    assert sorted(key[0] for key, _ in fleet.state.writers.items()) == ["router2", "router3", "router4"]


@pytest.mark.parametrize(
    "numbers",
    [
        {"dead_after_probes": 1, "suspect_after_probes": 2},
        {"dead_after_requests": 1, "suspect_after_requests": 2},
        {"window_s": -1.0},
        {"lease_cap_s": float("nan")},
        {"coordinator_s": float("inf")},
        {"max_history": 0},
        {"restart_budget": -1},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ledger policy"):
        LedgerPolicy(**numbers)
