"""Entries as plain data."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from elastic_refit.core.events import (
    ActorDied,
    Condemned,
    Drained,
    Entry,
    EpochOpened,
    Event,
    FleetEvent,
    Leased,
    Loaded,
    ProbeFailed,
    ProbeOk,
    RefitEnded,
    RefitLanded,
    RefitOpened,
    Registered,
    RequestFailed,
    RequestSucceeded,
    RestartFailed,
    Restarting,
    Retired,
    ShardCommitted,
    ShardEvent,
    WeightsPartial,
    entry_from_dict,
    entry_to_dict,
)
from elastic_refit.core.ids import ShardId

S = ShardId(3, 2)
ONE_OF_EACH: list[Event] = [
    Registered(S, width=4, node="n1"),
    ProbeOk(S),
    ProbeFailed(S, "timeout", "1.0 s"),
    RequestSucceeded(S),
    RequestFailed(S, "shard", "EngineDeadError"),
    ActorDied(S, "SIGKILL", charged=False),
    Condemned(S, "silent", "no sign of life: „nichts“"),
    Restarting(S, node="n2"),
    Loaded(S),
    RestartFailed(S, "out of memory"),
    Leased(S, 1.5, "compile"),
    Drained(S, "scale"),
    Retired(S, "scale"),
    ShardCommitted(S, 4, 9, "xxh3:1f"),
    WeightsPartial(S, 4, 9, 3),
    EpochOpened(4, 1),
    RefitOpened(4, 9, (S, ShardId(1)), "staged"),
    RefitLanded(4, 9),
    RefitEnded(4, 9, "gave up"),
]


def test_every_kind_of_event_survives_its_plain_form() -> None:
    assert {type(event) for event in ONE_OF_EACH} == {*get_args(ShardEvent), *get_args(FleetEvent)}
    for seq, event in enumerate(ONE_OF_EACH):
        entry = Entry("driver", 2, seq, 12.5, event)
        assert entry_from_dict(json.loads(json.dumps(entry_to_dict(entry)))) == entry


@pytest.mark.parametrize(
    "change",
    [
        {"event": "Resurrected"},
        {"by": ["driver", 0]},
        {"at": None, "by": None},
        {"shard": [1, 2, 3]},
        {"colour": "red"},
    ],
)
def test_what_is_no_entry_is_refused(change: dict[str, Any]) -> None:
    good = entry_to_dict(Entry("driver", 0, 0, 1.0, ProbeOk(S)))
    with pytest.raises(ValueError, match="not an entry"):
        entry_from_dict({**good, **change})


def test_a_plain_entry_with_something_missing_is_refused() -> None:
    good = entry_to_dict(Entry("driver", 0, 0, 1.0, ProbeOk(S)))
    for missing in good:
        with pytest.raises(ValueError, match="not an entry"):
            entry_from_dict({name: value for name, value in good.items() if name != missing})
