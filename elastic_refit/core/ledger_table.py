"""The states of a shard and the one table of how they follow each other.

Rules read an event and say which :class:`Input` it amounts to; only this table says what an input does to a state.
What must never happen here: a cell outside the two ``LANDED`` rows that leads from STALE, DEAD, RESTARTING or RETIRED
to a serving state, and any cell that leads out of RETIRED.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, Literal

__all__ = ["ABSENT", "SERVING", "TABLE", "Cell", "Input", "ShardState"]


class ShardState(IntEnum):
    """What the ledger holds of one shard seat; the value is its column in the table."""

    HEALTHY = 0
    SUSPECT = 1
    STALE = 2
    DEAD = 3
    RESTARTING = 4
    RETIRED = 5

    def __str__(self) -> str:
        return self.name


class Input(IntEnum):
    """What an event amounts to for one shard, after the rules have read streaks, windows, leases and epochs."""

    OBSERVED = 0
    """Nothing to move: an answer of a shard without open failures."""
    CLEARED = 1
    """No streak reaches its threshold any more."""
    DOUBTED = 2
    """A streak reaches the threshold of suspicion."""
    GIVEN_UP = 3
    """A streak reaches the threshold of death, and no refit is open."""
    DIED = 4
    CONDEMNED = 5
    RESTART_BEGUN = 6
    LOADED = 7
    RESTART_FAILED = 8
    COMMITTED = 9
    LANDED = 10
    """A landed refit that it took part in and committed."""
    LANDED_IN_DOUBT = 11
    """The same, with a streak at the threshold of suspicion."""
    LEFT_OUT = 12
    """A landed refit that it was not in, or did not commit."""
    PARTIAL = 13
    LEASED = 14
    DRAINED = 15
    RETIRED = 16


Cell = ShardState | Literal["keep", "skip", "bad", "never"]
"""The next state; or ``keep`` (legal, same state, what the event says is noted), ``skip`` (legal and without meaning
for a shard in that state: nothing is noted), ``bad`` (illegal: rejected with a reason) or ``never`` (the rules do not
let it happen, and the search of all orders shows it; rejected all the same)."""

Row = tuple[Cell, Cell, Cell, Cell, Cell, Cell]

_SUSPECT: Final = ShardState.SUSPECT
_HEALTHY: Final = ShardState.HEALTHY
_STALE: Final = ShardState.STALE
_DEAD: Final = ShardState.DEAD
_RESTART: Final = ShardState.RESTARTING
_RETIRED: Final = ShardState.RETIRED

# fmt: off
TABLE: Final[dict[Input, Row]] = {
    #                        in: HEALTHY   SUSPECT   STALE     DEAD      RESTARTING RETIRED
    Input.OBSERVED:             ("keep",   "keep",   "keep",   "skip",   "skip",    "skip"),
    Input.CLEARED:              ("keep",   _HEALTHY, "keep",   "skip",   "skip",    "skip"),
    Input.DOUBTED:              (_SUSPECT, "keep",   "keep",   "skip",   "skip",    "skip"),
    Input.GIVEN_UP:             (_DEAD,    _DEAD,    _DEAD,    "skip",   "skip",    "skip"),
    Input.DIED:                 (_DEAD,    _DEAD,    _DEAD,    "skip",   _DEAD,     "skip"),
    Input.CONDEMNED:            (_DEAD,    _DEAD,    _DEAD,    "keep",   _DEAD,     "bad"),
    Input.RESTART_BEGUN:        ("bad",    "bad",    "bad",    _RESTART, "bad",     "bad"),
    Input.LOADED:               ("bad",    "bad",    "bad",    "bad",    _STALE,    "bad"),
    Input.RESTART_FAILED:       ("bad",    "bad",    "bad",    "skip",   _DEAD,     "skip"),
    Input.COMMITTED:            ("keep",   "keep",   "keep",   "skip",   "bad",     "skip"),
    Input.LANDED:               ("keep",   "never",  _HEALTHY, "skip",   "never",   "skip"),
    Input.LANDED_IN_DOUBT:      ("never",  "keep",   _SUSPECT, "skip",   "never",   "skip"),
    Input.LEFT_OUT:             (_STALE,   _STALE,   "keep",   "skip",   "skip",    "skip"),
    Input.PARTIAL:              (_STALE,   _STALE,   "keep",   "skip",   "bad",     "skip"),
    Input.LEASED:               ("keep",   "keep",   "keep",   "bad",    "keep",    "bad"),
    Input.DRAINED:              (_STALE,   _STALE,   "keep",   "keep",   "keep",    "bad"),
    Input.RETIRED:              (_RETIRED, _RETIRED, _RETIRED, _RETIRED, _RETIRED,  "skip"),
}
# fmt: on

SERVING: Final = frozenset({ShardState.HEALTHY, ShardState.SUSPECT})
"""The router's set, and what `min_healthy` counts."""
ABSENT: Final = frozenset({ShardState.DEAD, ShardState.RESTARTING, ShardState.RETIRED})
"""Who does not join refits. Not the complement of SERVING: a STALE shard is in neither."""
