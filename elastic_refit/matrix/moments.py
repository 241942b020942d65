"""What the lab does at moments of a refit that runs: thaw who is to be thawed, and have requests fail on a hang."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import ray

from elastic_refit.actors.sabotage import thaw
from elastic_refit.core.events import RequestFailed
from elastic_refit.core.ids import ShardId
from elastic_refit.engines.base import SamplingSpec
from elastic_refit.matrix.cells import Cell
from elastic_refit.matrix.lab import Lab

__all__ = ["Moments"]

_REQUEST_S = 0.3


@dataclass(slots=True)
class Moments:
    """One refit of one cell; ``look`` is called again and again while it runs."""

    cell: Cell
    lab: Lab
    _is_thawed: bool = False
    _requests: dict[ShardId, tuple[float, ray.ObjectRef]] = field(default_factory=dict)
    _failed: set[ShardId] = field(default_factory=set)

    def look(self) -> None:
        if self.cell.thaw in (None, "after_recovery") and self.cell.requests is None:
            return
        struck = [each.at_s for each in self.lab.fleet.chaos.records() if each.fault.version == self.lab.version]
        if not struck or struck[0] is None:
            return
        if not self._is_thawed and time.monotonic() - struck[0] >= self._patience_s():
            self._is_thawed = True
            thaw(tuple(self.lab.ever | self.lab.servants()))
        if self.cell.requests == "running" and self.cell.between is not None:
            self._send_request(self.lab.shard(self.cell.between[0]))

    def _patience_s(self) -> float:
        """How long after the strike: well before anybody looks, in the middle of the look, or well after it."""
        limits = self.lab.limits
        match self.cell.thaw:
            case "before_stall":
                return 0.5 * limits.look_s
            case "in_evidence":
                return limits.look_s + 0.5 * limits.ping_s
            case "after_stall":
                return limits.stall_s + 2 * limits.ping_s
            case _:
                return float("inf")

    def _send_request(self, shard: ShardId) -> None:
        """A real request, which hangs with its shard: whoever sent it says that the shard failed it."""
        if shard in self._failed:
            return
        if shard not in self._requests:
            call = self.lab.fleet.shards[shard].generate.remote([(1, 2, 3)], SamplingSpec(max_tokens=1))
            self._requests[shard] = (time.monotonic(), call)
        sent_s, call = self._requests[shard]
        if time.monotonic() - sent_s >= _REQUEST_S and not ray.wait([call], timeout=0)[0]:
            self._failed.add(shard)
            self.lab.fleet.ledger.record(RequestFailed(shard, "shard", f"no answer within {_REQUEST_S} s"))
