"""States, events and commands of the refit protocol; :mod:`elastic_refit.core.refit` holds its rules.

Everything is a frozen value, so that the same protocol runs under Ray, in an exhaustive search and on a virtual clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

from elastic_refit.core.deadlines import MAX_ASKS, Deadlines
from elastic_refit.core.events import CommitMode
from elastic_refit.core.events import Event as LedgerEvent
from elastic_refit.core.evidence import Beacon, MemberEvidence
from elastic_refit.core.ids import Member, ProcessId, ShardId
from elastic_refit.core.manifest import Manifest
from elastic_refit.core.membership import Membership, plan_membership
from elastic_refit.core.messages import Answer, Op, Order, Settled
from elastic_refit.core.verdict import Finding

__all__ = [
    "Answered",
    "Call",
    "Command",
    "Died",
    "Ended",
    "Event",
    "Finish",
    "Fleet",
    "Ignored",
    "Landed",
    "Record",
    "RefitPolicy",
    "RefitRequested",
    "RefitState",
    "Round",
    "RoundTimedOut",
    "Running",
    "StallSeen",
    "StartTimer",
]


@dataclass(frozen=True, slots=True)
class RefitPolicy:
    """What the protocol is allowed. ``has_links``: bytes travel along a chain in rank order, so a link can be named."""

    deadlines: Deadlines
    max_recoveries: int = 1
    min_healthy: int = 1
    has_links: bool = True
    commit: CommitMode = "streamed"
    max_asks: int = MAX_ASKS
    """How often in a row the same may be asked while the answers decide nothing, but may do so later."""

    def round_s(self, op: Op) -> float:
        """How long a round may take, in seconds."""
        limits = self.deadlines
        match op:
            case Op.PROBE:
                return limits.ping_s
            case Op.PREPARE:
                return limits.prepare_s
            case Op.JOIN:
                return limits.join_s
            case Op.READY:
                return max(limits.pause_s, limits.pack_s)
            case Op.TRANSFER:
                return limits.hard_s
            case Op.COMMIT:
                return limits.finalize_s
            case Op.PING | Op.WAIT:
                return limits.evidence_s
            case Op.FENCE:
                return limits.fence_s
            case Op.SETTLE:
                return limits.settle_s
            case never:
                assert_never(never)


@dataclass(frozen=True, slots=True)
class Fleet:
    """The ledger's view when the refit is asked for: who may take part. ``widths`` by shard index.

    Raises:
        ValueError: no membership could hold them.
    """

    num_trainers: int
    widths: tuple[int, ...]
    present: frozenset[ShardId]
    suspects: frozenset[ShardId] = frozenset()

    def __post_init__(self) -> None:
        if self.present:
            plan_membership(self.num_trainers, self.widths, self.present)


@dataclass(frozen=True, slots=True)
class Round:
    """One question to several members, with one deadline. ``token`` tells it and its timer from every other.

    ``asks``: how often the same was asked in a row.
    """

    op: Op
    token: int
    waiting: frozenset[Member]
    answers: Mapping[Member, Answer] = field(default_factory=dict)
    asks: int = 1

    def after(self, member: Member, answer: Answer | None) -> Round:
        """The round once ``member`` has nothing more to say to it."""
        answers = self.answers if answer is None else {**self.answers, member: answer}
        return replace(self, waiting=self.waiting - {member}, answers=answers)


@dataclass(frozen=True, slots=True)
class Ended:
    """The refit is over without landing. ``error`` is a class name of :mod:`elastic_refit.errors`."""

    error: str
    sentence: str
    findings: tuple[Finding, ...] = ()
    evidence: tuple[MemberEvidence, ...] = ()


@dataclass(frozen=True, slots=True)
class Landed:
    version: int
    membership: Membership
    manifest: Manifest
    rebuilt: bool
    recoveries: int
    findings: tuple[Finding, ...]
    resent_buckets: int


@dataclass(frozen=True, slots=True)
class Running:
    """A refit in progress.

    ``first_token`` is that of its first round: what carries a lower one belongs to an earlier refit. ``interrupted`` is
    the round of the attempt that an incident broke off; its answers, while they still come, are evidence.
    ``stalled`` is one that goes on while everybody is asked why nothing moves; ``is_for_silence``, as in
    :class:`StallSeen`. ``evidence`` is what is known about each member since the attempt began, ``settled`` what the
    abort order was answered with. ``findings`` are the shards that were condemned. ``ending`` is set once the refit can
    only be wound up.
    """

    version: int
    fleet: Fleet
    round: Round
    first_token: int = 0
    interrupted: Round | None = None
    stalled: Round | None = None
    is_for_silence: bool = False
    membership: Membership | None = None
    is_opened: bool = False
    manifest: Manifest | None = None
    start_bucket: int = 0
    recoveries: int = 0
    rebuilt: bool = False
    in_incident: bool = False
    evidence: Mapping[Member, MemberEvidence] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    fenced: frozenset[Member] = frozenset()
    settled: Mapping[Member, Settled] = field(default_factory=dict)
    rolls_back: bool = False
    link_resends: int = 0
    resent_buckets: int = 0
    ending: Ended | None = None


@dataclass(frozen=True, slots=True)
class RefitState:
    """``epoch`` is the highest ever opened; ``built`` is the group that exists now, None if it was broken.

    ``processes`` is what each member said it consists of. It outlives a refit: who falls silent between two refits has
    to be fenced too, and can say nothing any more.
    """

    policy: RefitPolicy
    coordinator: int = 0
    epoch: int = 0
    built: Membership | None = None
    next_token: int = 0
    processes: Mapping[Member, tuple[ProcessId, ...]] = field(default_factory=dict)
    running: Running | None = None


# -- events


@dataclass(frozen=True, slots=True)
class RefitRequested:
    version: int
    fleet: Fleet


@dataclass(frozen=True, slots=True)
class Answered:
    """A member's call came back with a value; a :class:`Fault` or a testimony is a value too.

    ``token`` is the call's. A shell that loses a refit's pending calls with the refit may leave it out.
    """

    op: Op
    epoch: int
    member: Member
    answer: Answer
    token: int | None = None


@dataclass(frozen=True, slots=True)
class Died:
    """The member's process is gone: ``why`` in the words of who reported it."""

    member: Member
    why: str


@dataclass(frozen=True, slots=True)
class RoundTimedOut:
    """The deadline of round ``token`` passed. ``observer_late_s``: how late the observer's own loop was by then.

    ``beacons``: the last that came by itself of each member, as of now, and how many seconds ago it came.
    ``still_s``: since when nobody has moved, in seconds before now.
    """

    token: int
    observer_late_s: float = 0.0
    beacons: Mapping[Member, tuple[Beacon, float]] = field(default_factory=dict)
    still_s: float = math.inf


@dataclass(frozen=True, slots=True)
class StallSeen:
    """Nobody moves in round ``token``. No evidence against anybody: a reason to look.

    ``is_for_silence``: not for ``stall_s`` yet, but by the end of a look; or nobody has to wait for the others. Then
    only silence to that end counts, and only if nobody has moved meanwhile.
    """

    token: int
    is_for_silence: bool = False


Event = RefitRequested | Answered | Died | RoundTimedOut | StallSeen

# -- commands


@dataclass(frozen=True, slots=True)
class Call:
    """Give ``order`` to ``member``; the answer carries ``token`` back."""

    op: Op
    epoch: int
    member: Member
    order: Order
    token: int


@dataclass(frozen=True, slots=True)
class StartTimer:
    token: int
    op: Op
    seconds: float


@dataclass(frozen=True, slots=True)
class Record:
    """Tell the ledger, and go on only when it has it."""

    event: LedgerEvent


@dataclass(frozen=True, slots=True)
class Finish:
    outcome: Landed | Ended


@dataclass(frozen=True, slots=True)
class Ignored:
    """The event belongs to something that is over; ``reason`` says to what."""

    reason: str


Command = Call | StartTimer | Record | Finish | Ignored
