"""The typed client of the ledger actor: it numbers what it says, and waits for no answer longer than ``ledger_s``.

What must never happen here: two writers with one name and incarnation, whose events would be taken for repetitions of
each other; an event that is lost because the ledger was away for a moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError

from elastic_refit.actors.ledger import Receipt, ShardLedger
from elastic_refit.core.events import Entry, Event
from elastic_refit.core.ids import ShardId
from elastic_refit.core.ledger_state import LedgerState
from elastic_refit.errors import FleetExhausted, LedgerLost, NoSurvivingShards

__all__ = ["LedgerClient"]


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
