"""What was seen while a cell ran and after it: plain values, gathered by the lab and judged by the checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_refit.chaos import Fault, FaultRecord
from elastic_refit.core.deadlines import Deadlines
from elastic_refit.core.ids import ShardId, TrainerId, parse_member
from elastic_refit.errors import ElasticRefitError
from elastic_refit.incident import Incident

__all__ = ["Observation", "Served", "ShardView"]


@dataclass(frozen=True, slots=True)
class Served:
    """What a living shard says and does after the cell, asked at the shard itself and not at the ledger.

    ``holds`` is the version that it holds whole by its own word. ``label`` is on the samples that it gave, None if it
    refused to give any. ``gap`` is the largest difference of their log-probabilities from the trainer's under the last
    version that the trainers had, ``gap_previous`` under the one before.
    """

    holds: int | None
    label: int | None
    gap: float | None = None
    gap_previous: float | None = None


@dataclass(frozen=True, slots=True)
class ShardView:
    """A seat as the ledger sees it."""

    id: ShardId
    state: str
    version: int | None
    request_failures: int


@dataclass(slots=True)
class Observation:
    """One cell. ``version`` is the last that was pushed; ``num_buckets`` are those of every refit of it.

    What is None was not looked at, and a check that needs it fails.
    """

    limits: Deadlines
    version: int = -1
    num_buckets: int = 0
    planned: tuple[Fault, ...] = ()
    records: tuple[FaultRecord, ...] = ()
    landed: list[int] = field(default_factory=list)
    """Versions that landed."""
    incidents: list[Incident] = field(default_factory=list)
    error: ElasticRefitError | None = None
    ended_s: float | None = None
    """When the last refit of the cell had landed or ended, in the seconds of the records' clock."""
    epochs_opened: int | None = None
    refit_s: float | None = None
    """One refit without a fault on the same fleet, in seconds."""
    shards: Mapping[int, ShardView] | None = None
    condemned: tuple[ShardId, ...] | None = None
    """By the ledger's history."""
    left_serving: tuple[ShardId, ...] | None = None
    """Survivors that were not in the serving set all the time."""
    refused: tuple[str, ...] | None = None
    """Events of the coordinator that the ledger refused."""
    living: tuple[str, ...] | None = None
    """Processes of condemned shards that are still there."""
    intruders: tuple[str, ...] | None = None
    """What condemned processes that were left alive on purpose could still do."""
    served: Mapping[ShardId, Served] | None = None
    """By shard that is not absent."""
    stacks: tuple[str, ...] | None = None
    """Files with stacks of the shards that were struck."""
    is_replayed: bool | None = None
    """The ledger that came back is the one that was lost."""

    @property
    def outcome(self) -> str:
        if self.error is not None:
            return "ends"
        return "recovers" if self.incidents else "continues"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for incident in self.incidents for name in incident.names))

    @property
    def shard_names(self) -> tuple[int, ...]:
        """Indices of the shards that the verdicts named."""
        members = map(parse_member, self.names)
        return tuple(sorted({member.index for member in members if isinstance(member, ShardId)}))

    @property
    def trainer_names(self) -> tuple[int, ...]:
        """Indices of the trainers that the verdicts named."""
        members = map(parse_member, self.names)
        return tuple(sorted({member.index for member in members if isinstance(member, TrainerId)}))

    @property
    def rules(self) -> tuple[int, ...]:
        return tuple(sorted({rule for incident in self.incidents for rule in incident.rules}))

    @property
    def struck_s(self) -> float | None:
        """When the first fault struck."""
        return min((record.at_s for record in self.records if record.at_s is not None), default=None)

    @property
    def recover_s(self) -> float | None:
        """From the first strike until the last refit had landed or ended."""
        struck_s = self.struck_s
        return None if struck_s is None or self.ended_s is None else self.ended_s - struck_s
