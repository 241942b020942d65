"""What is known about each participant when a refit has failed: the input of a verdict, and nothing but facts.

Every field is an observation. Nothing here judges; :mod:`elastic_refit.core.attribution` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastic_refit.core.ids import Member

__all__ = ["Beacon", "MemberEvidence", "Testimony", "WaitingOn"]

WaitingOn = Literal["recv", "send", "buffer", "source", "engine", "none"]


@dataclass(frozen=True, slots=True)
class Beacon:
    """A rank's out-of-band progress report for one epoch.

    Bucket cursors: join is -1, buckets are ``0..K-1``, commit is ``K``; a value is the highest one reached, and
    ``-2`` is nothing yet. ``tick_age_s`` is how long ago the rank last made progress inside its own work.

    ``phase`` is ``preparing joining pausing packing in_collective applying finalizing done aborted``; ``done`` did all
    that it was asked so far. ``waiting_on``: ``recv`` and ``send`` wait for ``waiting_peer`` (None: the neighbour on
    that side), ``source`` for the trainers' gather, ``buffer`` and ``engine`` for the rank's own work. Both keep their
    last values in a rank that was aborted.
    """

    epoch: int
    entered: int = -2
    completed: int = -2
    applied: int = -1
    waiting_on: WaitingOn = "none"
    waiting_peer: int | None = None
    phase: str = "preparing"
    tick_age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Testimony:
    """What a rank said about somebody else: it lost ``peer``, or it was aborted. Never its own fault.

    ``kind`` is ``peer_lost`` or ``aborted``; ``peer`` is a rank of the same epoch, or None when it names nobody.
    """

    kind: Literal["peer_lost", "aborted"]
    peer: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class MemberEvidence:
    """Everything observed about one rank of the failed attempt, up to the verdict.

    A member of several ranks has one of these for each, or one that speaks for all ``width`` of them from ``rank`` on.
    """

    member: Member
    rank: int
    died: str | None = None
    """Ray reported the death, or a recorded process is gone: the report's words."""
    fault: str | None = None
    """The error that the member itself raised, unless it was a communicator error."""
    fault_signature: str | None = None
    """Equal for equal causes; None: only equal words are."""
    testimony: Testimony | None = None
    answered_ping: bool | None = None
    """None: nobody asked yet."""
    beacon: Beacon | None = None
    finished: bool = False
    """It received everything, or sent everything, in this attempt."""
    beacon_age_s: float | None = None
    """How long ago the last beacon came by itself; None: none does, or it came with the answer to the ping."""
    answered_abort: bool | None = None
    """Whether it answered the abort order; None: none was given, or there is still time."""
    width: int = 1
    context_lost: str | None = None
    """Aborted work is orphaned on its own device: the report's words."""
