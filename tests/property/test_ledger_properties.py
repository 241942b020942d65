"""Large worlds: anything may be sent, in any order, by anybody, and the ledger keeps its invariants."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_refit.core.events import Entry, EpochOpened, Event, FleetEvent, RefitOpened, Registered, ShardEvent
from elastic_refit.core.ids import ShardId
from elastic_refit.core.ledger import apply, new_ledger, replay
from elastic_refit.core.ledger_queries import absent, exhaustion, joinable, participants, serving, snapshot
from elastic_refit.core.ledger_state import LedgerPolicy
from elastic_refit.core.membership import plan_membership
from elastic_refit.journal import Journal, open_journal, read_journal
from tests.ledger_invariants import checked_fold

NUM_SHARDS = 5
POLICY = LedgerPolicy(window_s=5.0, lease_cap_s=60.0, restart_refill_s=50.0, coordinator_s=100.0, max_history=8)

shards = st.builds(ShardId, st.integers(0, NUM_SHARDS), st.integers(0, 2))
small = st.integers(0, 4)
words = st.sampled_from(["", "silent", "no beacon, no ping"])
FIELDS: dict[str, st.SearchStrategy[object]] = {
    "shard": shards,
    "participants": st.lists(shards, max_size=4).map(tuple),
    "epoch": small,
    "version": small,
    "coordinator_incarnation": st.integers(0, 2),
    "applied_through": small,
    "width": st.integers(0, 2),
    "duration_s": st.sampled_from([-1.0, 0.0, 5.0, 90.0, float("nan")]),
    "charged": st.booleans(),
    "kind": st.sampled_from(["timeout", "error"]),
    "fault": st.sampled_from(["shard", "request"]),
    "commit": st.sampled_from(["streamed", "staged"]),
}


def _of_kind(kind: type[Event]) -> st.SearchStrategy[Event]:
    return st.builds(kind, **{name: FIELDS.get(name, words) for name in kind.__dataclass_fields__})


events = st.one_of(*(_of_kind(kind) for kind in (*get_args(ShardEvent), *get_args(FleetEvent))))
times = st.one_of(st.floats(0, 500), st.sampled_from([float("nan"), float("inf")]))
entries = st.lists(
    st.builds(Entry, st.sampled_from(["driver", "router"]), st.integers(0, 1), st.integers(0, 40), times, events),
    max_size=60,
)
BEGINNING: tuple[Event, ...] = (
    *(Registered(ShardId(index)) for index in range(NUM_SHARDS)),
    EpochOpened(1, 0),
    RefitOpened(1, 1, tuple(ShardId(index) for index in range(NUM_SHARDS))),
)
started = [Entry("start", 0, seq, 1.0, event) for seq, event in enumerate(BEGINNING)]


@given(entries)
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_is_sent_the_invariants_hold(sent: list[Entry]) -> None:
    state = replay(POLICY, started)
    for entry in sent:
        state, _ = checked_fold(state, entry)
        assert not set(serving(state)) & set(absent(state))
        exhaustion(state)
        snapshot(state)


@given(entries, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_entries_that_are_repeated_at_any_later_time_change_nothing(sent: list[Entry], dice: random.Random) -> None:
    once = replay(POLICY, [*started, *sent])
    repeated = list(started)
    for entry in sent:
        repeated += [entry, *dice.sample(repeated, 2)]
    assert replay(POLICY, repeated) == once


@given(entries, st.data())
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_a_journal_replays_to_the_ledger_at_every_prefix(sent: list[Entry], data: st.DataObject) -> None:
    compacts_at = data.draw(st.integers(0, 2 * len(sent) + 1))
    state = new_ledger(POLICY)
    with TemporaryDirectory() as folder, closing(_journal(folder)) as journal:
        for number, entry in enumerate([*started, *sent]):
            journal.append([entry])
            state = apply(state, entry)
            if number == compacts_at:
                journal.compact(state)
            assert read_journal(journal.path).state == state


def _journal(folder: str) -> Journal:
    return open_journal(Path(folder) / "ledger.jsonl", run_id="run", policy=POLICY)


@given(entries, st.lists(st.integers(1, 8), min_size=NUM_SHARDS + 1, max_size=NUM_SHARDS + 1))
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_absent_never_waits_in_a_planned_membership(sent: list[Entry], widths: list[int]) -> None:
    state = replay(POLICY, [*started, *sent])
    able = joinable(state)
    assert not set(able) & set(absent(state))
    if able:
        membership = plan_membership(2, widths, able)
        assert participants(state, membership) == able
        held = [rank for member in membership.members for rank in membership.ranks(member)]
        assert held == list(range(membership.world_size))
