"""The ledger as an actor, and the typed client by which everybody else talks to it.

The actor keeps its journal on the disk of its node and is pinned there: elsewhere it would find no journal, and begin
a run that knows nobody. Ray restarts it when it dies; it replays, and is the ledger that died. Calls that were on
their way are repeated by Ray, and calls that timed out by the client, under the same numbers: they apply once.

What must never happen here: an entry that is applied before it is on disk; two writers with one name and incarnation.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_refit.core import ledger_queries
from elastic_refit.core.events import Entry, Event
from elastic_refit.core.ids import ShardId
from elastic_refit.core.ledger import Ack, fold
from elastic_refit.core.ledger_state import LedgerPolicy, LedgerState
from elastic_refit.errors import FleetExhausted, JournalError, LedgerLost, NoSurvivingShards
from elastic_refit.journal import Journal, open_journal

__all__ = ["LedgerClient", "Receipt", "ShardLedger", "ledger_actor"]

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
        self._journal: Journal = open_journal(Path(journal_path), run_id=run_id, policy=policy)
        self._state: LedgerState = self._journal.recovery.state
        self._base_bytes = self._journal.size_bytes

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
        if self._journal.size_bytes - self._base_bytes <= COMPACT_BYTES:
            return
        try:
            self._journal.compact(self._state)
        except JournalError as error:
            logger.warning("journal_compaction_failed", extra={"reason": error.message})
        self._base_bytes = self._journal.size_bytes

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


class LedgerClient:
    """One writer's end of the ledger. Any thread may call it; every call blocks at most ``ledger_s``.

    ``incarnation`` defaults to the time of its making in nanoseconds, so that two processes of one name are two
    writers. Events whose call timed out are kept and sent again, first, with the next ones: nothing is lost by a
    ledger that was away, and nothing applies twice.

    Every method raises LedgerLost when there was no answer in time, and JournalError when the ledger cannot write.
    """

    def __init__(
        self,
        ledger: ActorHandle[ShardLedger],
        *,
        writer: str,
        ledger_s: float,
        incarnation: int | None = None,
        max_unacknowledged: int = 10_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.writer = writer
        self.incarnation = time.time_ns() if incarnation is None else incarnation
        self._ledger = ledger
        self._ledger_s = ledger_s
        self._clock = clock
        self._max_unacknowledged = max_unacknowledged
        self._lock = threading.Lock()
        self._unacknowledged: tuple[Entry, ...] = ()
        self._next_seq = 0

    def record(self, *events: Event) -> Receipt:
        """Tell the ledger; returns when it is on disk. The receipt is for ``events``, not for what was sent again."""
        deadline = time.monotonic() + self._ledger_s
        with self._alone():
            self._stamp(events)
            left_s = max(deadline - time.monotonic(), 0.0)
            receipt: Receipt = self._answer(self._ledger.record.remote(self._unacknowledged), left_s)
            self._unacknowledged = ()
        return Receipt(receipt.acks[len(receipt.acks) - len(events) :], receipt.exhaustion)

    def state(self) -> LedgerState:
        """The whole ledger as it is now, for :mod:`elastic_refit.core.ledger_queries`: a view that stays as it is."""
        state: LedgerState = self._answer(self._ledger.state.remote(), self._ledger_s)
        return state

    def snapshot(self) -> dict[str, Any]:
        snapshot: dict[str, Any] = self._answer(self._ledger.snapshot.remote(), self._ledger_s)
        return snapshot

    def serving(self) -> tuple[ShardId, ...]:
        serving: tuple[ShardId, ...] = self._answer(self._ledger.serving.remote(), self._ledger_s)
        return serving

    def absent(self) -> tuple[ShardId, ...]:
        absent: tuple[ShardId, ...] = self._answer(self._ledger.absent.remote(), self._ledger_s)
        return absent

    def suspected(self) -> tuple[ShardId, ...]:
        suspected: tuple[ShardId, ...] = self._answer(self._ledger.suspected.remote(), self._ledger_s)
        return suspected

    def raise_if_exhausted(self) -> None:
        """Raise NoSurvivingShards or FleetExhausted if the run should end with it."""
        error: NoSurvivingShards | FleetExhausted | None = self._answer(
            self._ledger.exhaustion.remote(), self._ledger_s
        )
        if error is not None:
            raise error

    def _stamp(self, events: tuple[Event, ...]) -> None:
        waiting = len(self._unacknowledged)
        if waiting + len(events) > self._max_unacknowledged:
            raise LedgerLost(f"the ledger has not answered for {waiting} events of {self.writer}", waiting=waiting)
        now_s = self._clock()
        stamped = tuple(
            Entry(self.writer, self.incarnation, self._next_seq + number, now_s, event)
            for number, event in enumerate(events)
        )
        self._next_seq += len(events)
        self._unacknowledged += stamped

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=self._ledger_s):
            self._lost(f"the ledger did not answer {self.writer} within ledger_s = {self._ledger_s} s")
        try:
            yield
        finally:
            self._lock.release()

    def _answer(self, answer: Any, timeout_s: float) -> Any:
        """Wait for a reply of Ray's, whose type its stubs do not carry."""
        try:
            return ray.get(answer, timeout=timeout_s)
        except GetTimeoutError:
            self._lost(f"the ledger did not answer {self.writer} within ledger_s = {self._ledger_s} s")
        except RayActorError as error:
            self._lost(f"the ledger is gone and does not come back: {error}")

    def _lost(self, why: str) -> NoReturn:
        raise LedgerLost(why, ledger_s=self._ledger_s) from None

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a LedgerClient numbers its own events and cannot be sent: send the handle, make another client"
        )
