"""What the coordinator and the participants of a refit say to each other.

Orders go down, answers come up. Every order carries the epoch and every participant refuses one that is over. An answer
is a value, never an exception: an error that crosses a process border loses its type too easily, and a verdict hangs
on telling a member's own fault from what it only suffered.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic_refit.core.events import CommitMode
from elastic_refit.core.evidence import Beacon, Testimony
from elastic_refit.core.ids import Member, ProcessId
from elastic_refit.core.manifest import Manifest
from elastic_refit.core.membership import Membership

__all__ = [
    "Answer",
    "CommitOrder",
    "Committed",
    "Done",
    "Fault",
    "FenceOrder",
    "Fenced",
    "JoinOrder",
    "Op",
    "Order",
    "PingOrder",
    "Pong",
    "PrepareOrder",
    "Prepared",
    "Ready",
    "ReadyOrder",
    "Received",
    "Sent",
    "SettleOrder",
    "Settled",
    "TransferOrder",
]


class Op(StrEnum):
    """One round of calls: the same question to every member it concerns. ``WAIT`` asks nobody anything."""

    PROBE = "probe"
    PREPARE = "prepare"
    JOIN = "join"
    READY = "ready"
    TRANSFER = "transfer"
    COMMIT = "commit"
    PING = "ping"
    FENCE = "fence"
    SETTLE = "settle"
    WAIT = "wait"


# -- orders


@dataclass(frozen=True, slots=True)
class PingOrder:
    """Say that you are there and how far you are. Also the probe before a refit."""

    epoch: int


@dataclass(frozen=True, slots=True)
class PrepareOrder:
    """Bind a listener for ``epoch`` and say who you are. It is opened to push ``version``; -1: for nothing yet."""

    epoch: int
    coordinator: int
    version: int = -1


@dataclass(frozen=True, slots=True)
class JoinOrder:
    """Connect to the group; ``addresses`` by rank. The shell adds the epoch's secret on the way."""

    epoch: int
    membership: Membership
    addresses: tuple[str, ...]
    version: int = -1


@dataclass(frozen=True, slots=True)
class ReadyOrder:
    """Trainers: pin the weights and pack bucket ``start_bucket``. Shards: pause the engine."""

    epoch: int
    version: int
    start_bucket: int


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """Move buckets ``start_bucket …``: trainers send, shards receive, and apply them or keep them for the commit."""

    epoch: int
    version: int
    manifest: Manifest
    start_bucket: int
    commit: CommitMode = "streamed"


@dataclass(frozen=True, slots=True)
class CommitOrder:
    """Compare ``digests`` (the sender's, one per bucket) with your own; if equal, finish and serve ``version``."""

    epoch: int
    version: int
    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SettleOrder:
    """Leave every blocked call of ``epoch``, and say how far you came with ``version``.

    ``roll_back``: the open update is over.
    """

    epoch: int
    version: int
    reason: str
    roll_back: bool


@dataclass(frozen=True, slots=True)
class FenceOrder:
    """Kill these processes of ``member`` and prove them gone."""

    epoch: int
    processes: tuple[ProcessId, ...]
    why: str


Order = PingOrder | PrepareOrder | JoinOrder | ReadyOrder | TransferOrder | CommitOrder | SettleOrder | FenceOrder

# -- answers


@dataclass(frozen=True, slots=True)
class Pong:
    beacon: Beacon
    processes: tuple[ProcessId, ...] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """One listener address per rank of the member, library versions, and every process it consists of."""

    addresses: tuple[str, ...]
    versions: tuple[tuple[str, str], ...] = ()
    processes: tuple[ProcessId, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The order was carried out and there is nothing to add (join; the pause of an engine)."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A trainer has packed its first bucket; rank 0 gives the manifest."""

    manifest: Manifest | None


@dataclass(frozen=True, slots=True)
class Sent:
    """Everything was sent. ``digests``: one per bucket of the version, from rank 0; empty from the others."""

    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Received:
    """Everything was received, and applied or kept. ``digests``: one per bucket of the version, over all attempts."""

    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    version: int


@dataclass(frozen=True, slots=True)
class Settled:
    """No call of the epoch blocks any more.

    ``applied_through`` is the highest bucket of the order's version that the member holds, or held
    before it rolled back, -1 if none; ``is_beside``: these lie beside its weights, which it did not touch.
    ``released_s`` is how long the blocked call took to leave after the abort, in seconds. ``serving_version`` is the
    version that the member holds whole, None for a mixture. ``furthest``: where its ranks differ, the highest bucket
    that one of them holds.
    """

    applied_through: int
    released_s: float
    serving_version: int | None = None
    is_beside: bool = False
    furthest: int = -1

    @property
    def mixed_through(self) -> int | None:
        """Through which bucket a version has come into the weights of a member that holds none whole; else None."""
        taken = max(self.applied_through, self.furthest)
        return taken if self.serving_version is None and not self.is_beside and taken >= 0 else None


@dataclass(frozen=True, slots=True)
class Fenced:
    """``how``: ``gone`` (every recorded process was proved gone) or ``by_epoch`` (the node could not be reached)."""

    how: str


@dataclass(frozen=True, slots=True)
class Fault:
    """The member's own error. ``signature`` is equal for equal causes; ``sentence`` is for a person."""

    signature: str
    sentence: str


Answer = Pong | Prepared | Done | Ready | Sent | Received | Committed | Settled | Fenced | Fault | Testimony


def describe(members: frozenset[Member] | set[Member]) -> str:
    """``shard[0], shard[2]``: members in a stable order, for a sentence."""
    return ", ".join(str(member) for member in sorted(members, key=lambda m: (type(m).__name__, m)))
