"""What the ledger knows: one immutable value, made only by :mod:`elastic_refit.core.ledger`.

Two states are equal when the same entries were applied in the same order, so a replayed journal can be compared with
the ledger that wrote it. Holding on to a state costs nothing: a view frozen when a refit opened is that state, kept.

What is made for every entry is a named tuple: changing one field of a frozen dataclass of this size costs several
times as much, and was two thirds of the fold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from elastic_refit.core.events import CommitMode
from elastic_refit.core.ids import ShardId
from elastic_refit.core.ledger_parts import BoundedLog, PersistentMap, Ranges
from elastic_refit.core.ledger_table import ShardState

__all__ = [
    "Change",
    "LedgerPolicy",
    "LedgerState",
    "OpenRefit",
    "RefitBook",
    "Rejection",
    "ShardRecord",
    "WriterBook",
    "WriterKey",
    "book_of_writers",
    "new_ledger",
]

WriterKey = tuple[str, int]
"""``(writer, writer_incarnation)``."""
WriterBook = PersistentMap[WriterKey, tuple[float, Ranges]]


@dataclass(frozen=True, slots=True)
class LedgerPolicy:
    """The numbers that the rules use. They are fixed for one journal: another policy would replay another history.

    Raises:
        ValueError: a number is not positive, or a threshold of death lies below the one of suspicion.
    """

    min_healthy: int = 1
    """Fewer serving shards end the run."""
    suspect_after_probes: int = 1
    dead_after_probes: int = 3
    """Liveness probes failed in a row."""
    suspect_after_requests: int = 1
    dead_after_requests: int = 3
    """Windows in a row in which requests failed and none succeeded."""
    window_s: float = 10.0
    """One outage fails many requests at once; within this time they are one observation. Also how close in time
    failures of several shards lie to be correlated."""
    lease_cap_s: float = 600.0
    """How long leases may keep a shard from answering probes before it must have answered once."""
    restart_budget: int = 3
    restart_refill_s: float = 1800.0
    """A shard that was HEALTHY this long in one stretch has its whole restart budget back."""
    coordinator_s: float = 900.0
    """How long an open refit, or the time after one that failed, suspends the exhaustion check and deaths by probe."""
    max_history: int = 1024
    max_writers: int = 4096
    max_gaps: int = 256
    """Bounds of what is remembered: transitions, writers, and runs of sequence numbers of one writer."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            least = 0 if each.name in ("min_healthy", "restart_budget", "window_s") else 1e-9
            if not (math.isfinite(value) and value >= least):
                raise ValueError(f"ledger policy: {each.name} cannot be {value}")
        for what in ("probes", "requests"):
            suspect, dead = getattr(self, f"suspect_after_{what}"), getattr(self, f"dead_after_{what}")
            if dead < suspect:
                raise ValueError(f"ledger policy: dead_after_{what} ({dead}) < suspect_after_{what} ({suspect})")

    def to_dict(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


class ShardRecord(NamedTuple):
    """One shard seat and who sits in it. Everything but the restart budget belongs to the incarnation."""

    id: ShardId
    state: ShardState
    since_s: float
    reason: str = ""
    width: int = 1
    node: str = ""
    version: int | None = None
    """The version it holds whole, by its own commit; None: unknown or a mixture."""
    weights_epoch: int = -1
    """The epoch of the last commit or partial application."""
    probe_failures: int = 0
    request_failures: int = 0
    request_window_s: float = 0.0
    """When the last failure that counted was seen."""
    failed_at_s: float | None = None
    """When it last failed at anything that is the shard's own fault."""
    lease_since_s: float | None = None
    lease_until_s: float = 0.0
    is_draining: bool = False
    restarts_charged: int = 0
    is_death_charged: bool = True


@dataclass(frozen=True, slots=True)
class OpenRefit:
    """A refit that has neither landed nor ended. ``epoch`` is that of its last attempt."""

    epoch: int
    version: int
    participants: frozenset[ShardId]
    commit: CommitMode
    opened_s: float
    """When its first attempt opened."""
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class RefitBook:
    """What is known about refits, as opposed to shards."""

    epoch: int = 0
    coordinator_incarnation: int = 0
    open: OpenRefit | None = None
    highest_version: int | None = None
    """The highest version that a refit was opened for."""
    landed_version: int | None = None
    unlanded_since_s: float | None = None
    """Since when a refit has been open, or a failed one has not been followed by one that landed."""


class Change(NamedTuple):
    """One transition of one shard, with the event that caused it and what spoke for it."""

    time_s: float
    shard: ShardId
    before: ShardState | None
    after: ShardState
    cause: str
    evidence: str
    writer: str


class Rejection(NamedTuple):
    """One event that was illegal when it came, and why."""

    time_s: float
    event: str
    subject: str
    reason: str
    writer: str


class LedgerState(NamedTuple):
    """The fold of all entries so far."""

    policy: LedgerPolicy
    now_s: float
    """The latest time that an entry brought."""
    shards: PersistentMap[int, ShardRecord]
    counts: tuple[int, ...]
    """Shards by state, in the order of :class:`ShardState`."""
    refits: RefitBook
    writers: WriterBook
    """Which numbers of each writer were applied, and when it was last heard."""
    history: BoundedLog[Change]
    rejections: BoundedLog[Rejection]


def book_of_writers(items: Iterable[tuple[WriterKey, tuple[float, Ranges]]] = ()) -> WriterBook:
    """They are few, and every entry changes one: little is copied."""
    return PersistentMap(items, num_buckets=8)


def new_ledger(policy: LedgerPolicy) -> LedgerState:
    """A ledger that knows nobody."""
    return LedgerState(
        policy=policy,
        now_s=0.0,
        shards=PersistentMap(),
        counts=(0,) * len(ShardState),
        refits=RefitBook(),
        writers=book_of_writers(),
        history=BoundedLog(policy.max_history),
        rejections=BoundedLog(policy.max_history),
    )
