"""The ledger as an actor; :mod:`elastic_refit.actors.ledger_client` is how everybody else talks to it.

The actor keeps its journal on the disk of its node and is pinned there: elsewhere it would find no journal, and begin
a run that knows nobody. Ray restarts it when it dies; it replays, and is the ledger that died. Calls that were on
their way are repeated by Ray, and their entries apply once.

What must never happen here: an entry that is applied before it is on disk.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_refit.core import ledger_queries
from elastic_refit.core.events import Entry
from elastic_refit.core.ids import ShardId
from elastic_refit.core.ledger import Ack, fold
from elastic_refit.core.ledger_state import LedgerPolicy, LedgerState
from elastic_refit.errors import FleetExhausted, JournalError, NoSurvivingShards
from elastic_refit.journal import Journal, open_journal
from elastic_refit.processes import exit_when_orphaned

__all__ = ["Receipt", "ShardLedger", "ledger_actor"]

logger = logging.getLogger(__name__)

COMPACT_BYTES = 8 * 2**20
"""A journal that grew by this much since its base is compacted: what a restart has to replay stays a few seconds."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of recorded events, in their order. They are on disk.

    ``exhaustion``: too few shards were left after them, and the run should end with this error.
    """

    acks: tuple[Ack, ...]
    exhaustion: NoSurvivingShards | FleetExhausted | None = None

    @property
    def rejected(self) -> tuple[Ack, ...]:
        return tuple(ack for ack in self.acks if ack.status == "rejected")


class ShardLedger:
    """The one writer of the journal. Every method is short: the longest waits for one fsync, or for a compaction."""

    def __init__(self, journal_path: str, run_id: str, policy: LedgerPolicy) -> None:
        exit_when_orphaned()
        self._journal: Journal = open_journal(Path(journal_path), run_id=run_id, policy=policy)
        self._state: LedgerState = self._journal.recovery.state
        self._compact_at_bytes = COMPACT_BYTES

    def record(self, entries: tuple[Entry, ...]) -> Receipt:
        """Journal and apply what was not applied before. Idempotent.

        Raises:
            JournalError: nothing of it was kept or applied.
        """
        state, acks, fresh = self._state, [], []
        latest_s = time.time()
        for entry in entries:
            # A clock that runs ahead on one node must not carry everybody's windows and leases with it.
            clamped = entry if entry.time_s <= latest_s else replace(entry, time_s=latest_s)
            state, ack = fold(state, clamped)
            acks.append(ack)
            if ack.status != "duplicate":
                fresh.append(clamped)
        self._journal.append(fresh)
        self._state = state
        self._compact_when_due()
        return Receipt(tuple(acks), ledger_queries.exhaustion(state, now_s=latest_s))

    def _compact_when_due(self) -> None:
        """What was recorded is kept whether this works or not; after a failure it waits for as many bytes again."""
        if self._journal.grown_bytes <= self._compact_at_bytes:
            return
        try:
            self._journal.compact(self._state)
        except JournalError as error:
            logger.warning("journal_compaction_failed", extra={"reason": error.message})
        self._compact_at_bytes = self._journal.grown_bytes + COMPACT_BYTES

    def state(self) -> LedgerState:
        return self._state

    def snapshot(self) -> dict[str, Any]:
        return ledger_queries.snapshot(self._state)

    def serving(self) -> tuple[ShardId, ...]:
        return ledger_queries.serving(self._state)

    def absent(self) -> tuple[ShardId, ...]:
        return ledger_queries.absent(self._state)

    def suspected(self) -> tuple[ShardId, ...]:
        return ledger_queries.suspected(self._state)

    def exhaustion(self) -> NoSurvivingShards | FleetExhausted | None:
        return ledger_queries.exhaustion(self._state, now_s=time.time())


def ledger_actor(
    journal_path: Path, *, run_id: str, policy: LedgerPolicy, name: str | None = None, node_id: str | None = None
) -> ActorHandle[ShardLedger]:
    """Start the ledger of ``run_id`` on ``node_id`` (default: the caller's node), where its journal lies and stays.

    The caller owns it: it dies with the caller. Does not block until it is up.
    """
    node = node_id or ray.get_runtime_context().get_node_id()
    made = ray.remote(ShardLedger).options(
        name=name,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    # Ray's stubs say "a handle or the class" here.
    return cast("ActorHandle[ShardLedger]", made.remote(str(journal_path), run_id, policy))
