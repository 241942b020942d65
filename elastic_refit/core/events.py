"""What can be told to the ledger: events, and the entry that says who told it, as which number, and when.

Events are facts about identities, never about ranks. An :class:`Entry` is what is journaled and applied; its
``(writer, writer_incarnation, seq)`` is applied once, however often it arrives. Time is a value in the entry, in
seconds since the Unix epoch, because entries of several processes meet in one ledger and outlive each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, Literal, get_args

from elastic_refit.core.ids import ShardId

__all__ = [
    "FLEET_EVENTS",
    "ActorDied",
    "CommitMode",
    "Condemned",
    "Drained",
    "Entry",
    "EpochOpened",
    "Event",
    "FleetEvent",
    "Leased",
    "Loaded",
    "ProbeFailed",
    "ProbeOk",
    "RefitEnded",
    "RefitLanded",
    "RefitOpened",
    "Registered",
    "RequestFailed",
    "RequestSucceeded",
    "RestartFailed",
    "Restarting",
    "Retired",
    "ShardCommitted",
    "ShardEvent",
    "WeightsPartial",
    "entry_from_dict",
    "entry_to_dict",
]


CommitMode = Literal["streamed", "staged"]
"""When a shard's engine gets a bucket: as it arrives, or all of them once every digest was equal."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A new shard index is up. It joins as STALE: it serves after the first refit that it commits."""

    shard: ShardId
    width: int = 1
    node: str = ""


@dataclass(frozen=True, slots=True)
class ProbeOk:
    """A liveness probe was answered. It says nothing about real requests."""

    shard: ShardId


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """A liveness probe was not answered in time (``timeout``) or answered with an error (``error``)."""

    shard: ShardId
    kind: Literal["timeout", "error"]
    error: str = ""


@dataclass(frozen=True, slots=True)
class RequestSucceeded:
    """A real request, or a canary that had a token made, came back."""

    shard: ShardId


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A real request or a canary failed: by the ``shard``, or by the ``request`` itself, which is no shard's fault."""

    shard: ShardId
    fault: Literal["shard", "request"]
    error: str = ""


@dataclass(frozen=True, slots=True)
class ActorDied:
    """A process of the shard is gone. ``charged``: its restart counts against the budget."""

    shard: ShardId
    reason: str
    charged: bool = True


@dataclass(frozen=True, slots=True)
class Condemned:
    """A verdict named the shard. Without ``rule`` and ``evidence`` it is rejected."""

    shard: ShardId
    rule: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Restarting:
    """A successor of a dead shard is being made; ``shard`` is the successor's identity."""

    shard: ShardId
    node: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The successor has loaded. It is STALE until a refit that it commits has landed."""

    shard: ShardId


@dataclass(frozen=True, slots=True)
class RestartFailed:
    """The successor did not come up."""

    shard: ShardId
    reason: str


@dataclass(frozen=True, slots=True)
class Leased:
    """The shard will not answer probes in time for ``duration_s`` (compile, refit, load)."""

    shard: ShardId
    duration_s: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Drained:
    """Routing to the shard is cut for good: it takes no traffic and leaves at the next reconcile."""

    shard: ShardId
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Retired:
    """The shard has left for good; its index is not used again."""

    shard: ShardId
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ShardCommitted:
    """The shard holds all of ``version``, with equal digests, by its own word."""

    shard: ShardId
    epoch: int
    version: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class WeightsPartial:
    """The shard applied at least one bucket of an attempt that it did not finish: it holds no whole version."""

    shard: ShardId
    epoch: int
    version: int
    applied_through: int = 0


@dataclass(frozen=True, slots=True)
class EpochOpened:
    """A membership with a new number is being built, by this incarnation of the coordinator."""

    epoch: int
    coordinator_incarnation: int


@dataclass(frozen=True, slots=True)
class RefitOpened:
    """From here on bytes may move: ``participants`` are frozen. A retry opens again, in its own epoch."""

    epoch: int
    version: int
    participants: tuple[ShardId, ...]
    commit: CommitMode = "streamed"


@dataclass(frozen=True, slots=True)
class RefitLanded:
    """Every participant that is left has committed."""

    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class RefitEnded:
    """The open refit is over and did not land."""

    epoch: int
    version: int
    reason: str


ShardEvent = (
    Registered
    | ProbeOk
    | ProbeFailed
    | RequestSucceeded
    | RequestFailed
    | ActorDied
    | Condemned
    | Restarting
    | Loaded
    | RestartFailed
    | Leased
    | Drained
    | Retired
    | ShardCommitted
    | WeightsPartial
)
FleetEvent = EpochOpened | RefitOpened | RefitLanded | RefitEnded
FLEET_EVENTS: Final = (EpochOpened, RefitOpened, RefitLanded, RefitEnded)
Event = ShardEvent | FleetEvent


@dataclass(frozen=True, slots=True)
class Entry:
    """One event as it is journaled: the ``seq``-th of this incarnation of ``writer``, made at ``time_s``."""

    writer: str
    writer_incarnation: int
    seq: int
    time_s: float
    event: Event


_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in (*get_args(ShardEvent), *FLEET_EVENTS)}
_FIELDS: dict[type[Event], tuple[str, ...]] = {kind: tuple(f.name for f in fields(kind)) for kind in _KINDS.values()}


def entry_to_dict(entry: Entry) -> dict[str, Any]:
    """Plain data for one journal line."""
    kind = type(entry.event)
    return {
        "by": [entry.writer, entry.writer_incarnation, entry.seq],
        "at": entry.time_s,
        "event": kind.__name__,
        **{name: _plain(getattr(entry.event, name)) for name in _FIELDS[kind]},
    }


def entry_from_dict(data: dict[str, Any]) -> Entry:
    """The inverse of :func:`entry_to_dict`.

    Raises:
        ValueError: the data is no entry of this format.
    """
    rest = dict(data)
    try:
        writer, incarnation, seq = rest.pop("by")
        time_s, kind = rest.pop("at"), _KINDS[rest.pop("event")]
        event = kind(**{name: _typed(name, value) for name, value in rest.items()})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not an entry: {error!r}") from error
    return Entry(writer, incarnation, seq, time_s, event)


def _plain(value: Any) -> Any:
    if isinstance(value, ShardId):
        return [value.index, value.incarnation]
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def _typed(name: str, value: Any) -> Any:
    if name == "shard":
        return ShardId(*value)
    return tuple(ShardId(*part) for part in value) if name == "participants" else value
