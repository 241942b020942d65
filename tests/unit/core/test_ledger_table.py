"""The transition table, stated once more from outside: what each event does to a shard in each state.

``-`` applied without a transition · ``skip`` ignored · ``bad`` rejected · anything else is the state that follows.
"""

from __future__ import annotations

from collections.abc import Callable

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
    RefitLanded,
    RefitOpened,
    RequestFailed,
    RequestSucceeded,
    RestartFailed,
    Restarting,
    Retired,
    ShardCommitted,
    WeightsPartial,
)
from elastic_refit.core.ids import ShardId
from elastic_refit.core.ledger_table import SERVING, TABLE, Input, ShardState
from tests.ledger_fleet import Fleet

STATES = tuple(ShardState)
OTHER = ShardId(1)

# fmt: off
EXPECTED = {
    #                        HEALTHY    SUSPECT    STALE      DEAD          RESTARTING  RETIRED
    "probe answered":       ("-",       "-",       "-",       "skip",       "skip",     "skip"),
    "probe failed":         ("SUSPECT", "-",       "-",       "skip",       "skip",     "skip"),
    "last probe failed":    ("DEAD",    "DEAD",    "DEAD",    "skip",       "skip",     "skip"),
    "request succeeded":    ("-",       "HEALTHY", "-",       "skip",       "skip",     "skip"),
    "request failed":       ("SUSPECT", "skip",    "-",       "skip",       "skip",     "skip"),
    "process died":         ("DEAD",    "DEAD",    "DEAD",    "skip",       "DEAD",     "skip"),
    "condemned":            ("DEAD",    "DEAD",    "DEAD",    "-",          "DEAD",     "bad"),
    "successor begun":      ("bad",     "bad",     "bad",     "RESTARTING", "bad",      "bad"),
    "loaded":               ("bad",     "bad",     "bad",     "bad",        "STALE",    "bad"),
    "restart failed":       ("bad",     "bad",     "bad",     "skip",       "DEAD",     "skip"),
    "committed":            ("-",       "-",       "-",       "skip",       "bad",      "skip"),
    "landed, committed":    ("-",       "-",       "HEALTHY", "-",          "-",        "-"),
    "landed, left out":     ("STALE",   "STALE",   "-",       "-",          "-",        "-"),
    "partial":              ("STALE",   "STALE",   "-",       "skip",       "bad",      "skip"),
    "leased":               ("-",       "-",       "-",       "bad",        "-",        "bad"),
    "drained":              ("STALE",   "STALE",   "-",       "-",          "-",        "bad"),
    "retired":              ("RETIRED", "RETIRED", "RETIRED", "RETIRED",    "RETIRED",  "skip"),
}
# fmt: on

EVENTS: dict[str, Callable[[ShardId], tuple[Event, ...]]] = {
    "probe answered": lambda shard: (ProbeOk(shard),),
    "probe failed": lambda shard: (ProbeFailed(shard, "error"),),
    "last probe failed": lambda shard: (ProbeFailed(shard, "error"),) * 3,
    "request succeeded": lambda shard: (RequestSucceeded(shard),),
    "request failed": lambda shard: (RequestFailed(shard, "shard"),),
    "process died": lambda shard: (ActorDied(shard, "killed"),),
    "condemned": lambda shard: (Condemned(shard, "silent", "no beacon, no ping"),),
    "successor begun": lambda shard: (Restarting(ShardId(shard.index, shard.incarnation + 1)),),
    "loaded": lambda shard: (Loaded(shard),),
    "restart failed": lambda shard: (RestartFailed(shard, "out of memory"),),
    "committed": lambda shard: (RefitOpened(1, 2, (shard, OTHER)), ShardCommitted(shard, 1, 2)),
    "landed, committed": lambda shard: (
        RefitOpened(1, 2, (shard, OTHER)),
        ShardCommitted(shard, 1, 2),
        ShardCommitted(OTHER, 1, 2),
        RefitLanded(1, 2),
    ),
    "landed, left out": lambda shard: (RefitOpened(1, 2, (OTHER,)), ShardCommitted(OTHER, 1, 2), RefitLanded(1, 2)),
    "partial": lambda shard: (WeightsPartial(shard, 1, 2),),
    "leased": lambda shard: (Leased(shard, 30.0),),
    "drained": lambda shard: (Drained(shard),),
    "retired": lambda shard: (Retired(shard),),
}


def _fleet_with_a_shard_that_is(state: ShardState) -> tuple[Fleet, ShardId]:
    fleet, shard = Fleet(2), ShardId(0)
    if state is ShardState.SUSPECT:
        fleet.tell(RequestFailed(shard, "shard"))
    elif state is ShardState.STALE:
        fleet.land(1, 1, (OTHER,))
    elif state is ShardState.RETIRED:
        fleet.tell(Retired(shard))
    elif state is not ShardState.HEALTHY:
        fleet.tell(ActorDied(shard, "killed"))
    if state is ShardState.RESTARTING:
        shard = ShardId(0, 1)
        fleet.tell(Restarting(shard))
    assert fleet.state_of(0) is state
    return fleet, shard


CELLS = [(what, state) for what in EXPECTED for state in STATES]


@pytest.mark.parametrize(("what", "state"), CELLS, ids=lambda part: getattr(part, "name", part))
def test_the_table_says_what_each_event_does_in_each_state(what: str, state: ShardState) -> None:
    expected = EXPECTED[what][state]
    fleet, shard = _fleet_with_a_shard_that_is(state)
    before = fleet.record(0)
    num_changes = fleet.state.history.total
    ack = fleet.tell(*EVENTS[what](shard))
    after = fleet.record(0)
    assert ack.status == {"skip": "ignored", "bad": "rejected"}.get(expected, "applied")
    assert after.state.name == (expected if expected in ShardState.__members__ else state.name)
    if expected in ("skip", "bad") or (what.startswith("landed") and after.state in (3, 4, 5)):
        assert after == before
    if after.state is not state:
        assert fleet.state.history.total > num_changes
        assert (after.since_s, bool(after.reason)) == (fleet.now_s, True)


def test_only_a_landed_refit_leads_to_a_serving_state_from_one_that_does_not_serve() -> None:
    promoting = {
        each for each, row in TABLE.items() for state in STATES if state not in SERVING and row[state] in SERVING
    }
    assert promoting == {Input.LANDED, Input.LANDED_IN_DOUBT}


def test_nothing_leads_out_of_retired() -> None:
    assert all(row[ShardState.RETIRED] in ("skip", "bad") for row in TABLE.values())


def test_the_table_has_a_cell_for_every_input_and_state() -> None:
    assert set(TABLE) == set(Input)
    assert all(len(row) == len(STATES) for row in TABLE.values())


@pytest.mark.parametrize(("doubt", "lands_as"), [(False, "HEALTHY"), (True, "SUSPECT")])
def test_a_stale_shard_lands_in_the_state_that_its_streaks_say(doubt: bool, lands_as: str) -> None:
    fleet, shard = _fleet_with_a_shard_that_is(ShardState.STALE)
    if doubt:
        fleet.tell(RequestFailed(shard, "shard"))
    fleet.tell(*EVENTS["landed, committed"](shard))
    assert fleet.state_of(0).name == lands_as


@pytest.mark.parametrize("end", [ActorDied(ShardId(0), "killed"), Retired(ShardId(0))])
@pytest.mark.parametrize("doubt", [False, True])
def test_who_left_between_its_commit_and_the_landing_stays_as_it_left(end: Event, doubt: bool) -> None:
    fleet, shard = Fleet(2), ShardId(0)
    if doubt:
        fleet.tell(RequestFailed(shard, "shard"))
    fleet.tell(*EVENTS["landed, committed"](shard)[:-1], end)
    before, num_changes = fleet.record(0), fleet.state.history.total
    assert fleet.tell(RefitLanded(1, 2)).status == "applied"
    assert (fleet.record(0), fleet.state.history.total) == (before, num_changes)


SIGHTS = ("probe answered", "probe failed", "request succeeded", "request failed")


@pytest.mark.parametrize("what", SIGHTS)
@pytest.mark.parametrize("end", ["DEAD", "RETIRED"])
@pytest.mark.parametrize("num_requests", [0, 1])
def test_what_is_seen_of_a_shard_after_its_end_is_not_noted(what: str, end: str, num_requests: int) -> None:
    fleet, shard = Fleet(2, window_s=0.0, dead_after_requests=9), ShardId(0)
    fleet.tell(*[RequestFailed(shard, "shard")] * num_requests, *[ProbeFailed(shard, "error")] * 3)
    if end == "RETIRED":
        fleet.tell(Retired(shard))
    before = fleet.record(0)
    assert before.state.name == end
    assert fleet.tell(*EVENTS[what](shard)).status == "ignored"
    assert fleet.record(0) == before


@pytest.mark.parametrize("what", SIGHTS)
@pytest.mark.parametrize("deadly", [1, 3])
def test_what_is_seen_of_a_successor_before_it_has_loaded_is_not_noted(what: str, deadly: int) -> None:
    fleet, shard = Fleet(2, dead_after_probes=deadly, dead_after_requests=deadly), ShardId(0, 1)
    fleet.tell(ActorDied(ShardId(0), "killed"), Restarting(shard), Leased(shard, 60.0, "load"))
    before = fleet.record(0)
    assert fleet.tell(*EVENTS[what](shard)).status == "ignored"
    assert fleet.record(0) == before


@pytest.mark.parametrize("state", [ShardState.HEALTHY, ShardState.SUSPECT, ShardState.STALE])
def test_an_answer_ends_a_streak_in_every_state_that_is_probed(state: ShardState) -> None:
    fleet, shard = _fleet_with_a_shard_that_is(state)
    fleet.tell(ProbeFailed(shard, "error"))
    fleet.tell(ProbeOk(shard))
    assert fleet.record(0).probe_failures == 0
    assert fleet.state_of(0) is state
