"""Every error that elastic-refit raises, in one tree.

::

    ElasticRefitError
    ├── ConfigError (also ValueError)      a value the user set; the message names the field
    ├── MembershipError
    │   ├── NoSurvivingShards              nobody is left to receive weights
    │   └── StaleEpoch                     a message of a membership that is over
    ├── RefitError                         the refit ended, and the run with it
    │   ├── RefitAborted                   a refit was broken off and not recovered
    │   ├── UnattributedHang               it hung and the evidence names nobody
    │   ├── RefitRejected                  every shard refused the same weights
    │   ├── ContextLost                    aborted work is orphaned on the trainer's own device
    │   └── RecoveryBudgetExhausted        it failed again after the allowed recoveries
    ├── Superseded                         a newer version replaced this one before it began
    ├── TrainerLost
    ├── CoordinatorLost
    ├── LedgerLost
    ├── FleetExhausted                     fewer serving shards than `min_healthy`
    ├── CommunicatorError
    │   ├── RendezvousFailed               the group did not come together in time
    │   ├── CommunicatorAborted            broken from outside; testimony, never the reporter's fault
    │   ├── PeerLost                       the peer is gone; testimony about an edge
    │   └── VersionMismatch
    ├── TransportError
    │   ├── DigestMismatch
    │   └── PlanMismatch
    ├── ShardError
    │   ├── ShardDied
    │   └── ShardUnresponsive
    └── JournalError                       the ledger's journal cannot be trusted as it lies

Errors cross process borders, so every one survives pickling with its fields: fields are keyword-only and are kept
beside the message. No field is called ``cause``: Ray's wrapper owns that name.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CommunicatorAborted",
    "CommunicatorError",
    "ConfigError",
    "ContextLost",
    "CoordinatorLost",
    "DigestMismatch",
    "ElasticRefitError",
    "FleetExhausted",
    "JournalError",
    "LedgerLost",
    "MembershipError",
    "NoSurvivingShards",
    "PeerLost",
    "PlanMismatch",
    "RecoveryBudgetExhausted",
    "RefitAborted",
    "RefitError",
    "RefitRejected",
    "RendezvousFailed",
    "ShardDied",
    "ShardError",
    "ShardUnresponsive",
    "StaleEpoch",
    "Superseded",
    "TrainerLost",
    "TransportError",
    "UnattributedHang",
    "VersionMismatch",
]


class ElasticRefitError(Exception):
    """Base of the tree. ``message`` is a sentence; ``fields`` are what it was made from, by name."""

    def __init__(self, message: str, /, **fields: Any) -> None:
        super().__init__(message)
        self.fields = fields

    @property
    def message(self) -> str:
        return str(self.args[0])

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.fields)


def _rebuild(kind: type[ElasticRefitError], message: str, fields: dict[str, Any]) -> ElasticRefitError:
    return kind(message, **fields)


class ConfigError(ElasticRefitError, ValueError):
    """A value that the user set cannot be used; the message names the field and the fix."""


class MembershipError(ElasticRefitError):
    """A refit group cannot be formed as asked."""


class NoSurvivingShards(MembershipError):
    """Nobody is left to receive weights."""


class StaleEpoch(MembershipError):
    """A message belongs to a membership that is over."""


class RefitError(ElasticRefitError):
    """A refit ended without landing, and the run ends with it."""


class RefitAborted(RefitError):
    """A refit was broken off and could not be recovered."""


class UnattributedHang(RefitError):
    """A refit hung and the evidence names nobody; the evidence is in ``fields``."""


class RefitRejected(RefitError):
    """Every shard that reached the data refused it with the same error: the weights, not the shards."""


class ContextLost(RefitError):
    """Aborted work is orphaned on the trainer's own device; that process cannot go on."""


class RecoveryBudgetExhausted(RefitError):
    """The refit failed again after ``max_recoveries`` recoveries."""


class Superseded(ElasticRefitError):
    """A newer weight version replaced this one before its refit began."""


class TrainerLost(ElasticRefitError):
    """A trainer rank died or stopped; a refit has no source without it."""


class CoordinatorLost(ElasticRefitError):
    """The coordinator did not answer within the driver's deadline."""


class LedgerLost(ElasticRefitError):
    """The ledger did not answer within ``ledger_s``."""


class FleetExhausted(ElasticRefitError):
    """Fewer shards can serve than ``min_healthy``."""


class CommunicatorError(ElasticRefitError):
    """A collective could not be completed."""


class RendezvousFailed(CommunicatorError):
    """The group did not come together in time, or a peer was refused."""


class CommunicatorAborted(CommunicatorError):
    """The communicator was broken from outside. Testimony about the group, never the reporter's own fault."""


class PeerLost(CommunicatorError):
    """The connection to ``peer`` (a rank of this epoch) ended. Testimony about an edge."""


class VersionMismatch(CommunicatorError):
    """The ranks of a group load different versions of the communication library."""


class TransportError(ElasticRefitError):
    """Bytes arrived, but not the ones that were sent or planned."""


class DigestMismatch(TransportError):
    """A bucket's digest differs from the sender's."""


class PlanMismatch(TransportError):
    """Sender and receiver disagree about the manifest or the plan."""


class ShardError(ElasticRefitError):
    """One generation shard cannot go on."""


class ShardDied(ShardError):
    """A process of the shard is gone."""


class ShardUnresponsive(ShardError):
    """The shard's process exists and does not answer."""


class JournalError(ElasticRefitError):
    """The journal is corrupt, of another run, or of an unknown format; the message names the line."""
