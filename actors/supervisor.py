"""Watches the fleet from the driver: one sentinel call per shard, its death notice and its row in the dashboard.

A sentinel is a call ``hold(token)`` that stays in the task table under a name that says the shard's state, and fails
within milliseconds when the shard's process dies. A new state is a new call, watched before the old one is released.
What must never happen here: a moment in which nobody watches a shard, or a normal return taken for a death.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from elastic_refit.actors.ledger_client import LedgerClient
from elastic_refit.core.events import ActorDied
from elastic_refit.core.ids import ShardId
from elastic_refit.core.ledger_queries import record_of
from elastic_refit.errors import LedgerLost

__all__ = ["FleetSupervisor"]

logger = logging.getLogger(__name__)

_LOOK_S = 0.25


@dataclass(slots=True)
class _Watch:
    handle: ActorHandle
    state: str
    token: int
    sentinel: ray.ObjectRef


class FleetSupervisor:
    """Owns the sentinels. ``start`` and ``stop`` are the driver's; everything else happens on its own thread."""

    def __init__(self, ledger: LedgerClient, shards: Mapping[ShardId, ActorHandle]) -> None:
        self._ledger = ledger
        self._watches: dict[ShardId, _Watch] = {}
        self._coming: deque[tuple[ShardId, _Watch]] = deque()
        self.watch(shards)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet-supervisor", daemon=True)

    def watch(self, shards: Mapping[ShardId, ActorHandle]) -> None:
        """Watch these too, from now on. Any thread."""
        self._coming.extend((shard, _hold(shard, handle, "LOADING", 1)) for shard, handle in shards.items())

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Return when the thread has ended; sentinels stay until their shards go."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._look()
            except LedgerLost as error:
                logger.error("ledger_lost", extra={"reason": str(error)})
            except RayError as error:  # the cluster is going away: the driver ends, and this thread with it
                logger.info("supervisor_ended", extra={"reason": str(error)})
                return

    def _look(self) -> None:
        while self._coming:
            shard, watch = self._coming.popleft()
            self._watches[shard] = watch
        sentinels = {watch.sentinel: shard for shard, watch in self._watches.items()}
        if not sentinels:
            self._stopping.wait(_LOOK_S)
            return
        ended, _ = ray.wait(list(sentinels), num_returns=1, timeout=_LOOK_S)
        for sentinel in ended:
            self._ended(sentinels[sentinel], sentinel)
        self._rename()

    def _ended(self, shard: ShardId, sentinel: ray.ObjectRef) -> None:
        try:
            ray.get(sentinel)
        except RayError as error:
            del self._watches[shard]
            logger.warning("shard_died", extra={"shard": str(shard)})
            self._ledger.record(ActorDied(shard, f"its sentinel call failed: {type(error).__name__}"))

    def _rename(self) -> None:
        state = self._ledger.state()
        for shard, watch in self._watches.items():
            known = record_of(state, shard.index)
            if known is None or known.id != shard or known.state.name == watch.state:
                continue
            successor = _hold(shard, watch.handle, known.state.name, watch.token + 1)
            watch.handle.release.remote(watch.token)
            self._watches[shard] = successor


def _hold(shard: ShardId, handle: ActorHandle, state: str, token: int) -> _Watch:
    sentinel = handle.hold.options(name=f"{shard}={state}").remote(token)
    return _Watch(handle, state, token, sentinel)
