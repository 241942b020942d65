"""The ledger: a pure fold over entries, total over every state and event.

::

    entry ── applied before? ──▶ duplicate: the same state
      └─ rule of its event: streaks, windows, leases, epochs ──▶ Input ──▶ TABLE ──▶ the next state of the shard

An entry is ``applied``, ``ignored`` (legal, and nothing to note: late word of an incarnation that is over),
``rejected`` (illegal; recorded with its reason) or a ``duplicate``. Nothing here raises for what a writer sent, and
nothing but :data:`~elastic_refit.core.ledger_table.TABLE` moves a shard.

A state is a persistent value: a change copies one small bucket of the map of shards, so 10,000 shards cost what ten do
and every older state stays whole. That is why the search of all orders, the frozen view of an open refit and "journal
first, then become" need no copying.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

from elastic_refit.core import ledger_refits, ledger_shards
from elastic_refit.core.events import FLEET_EVENTS, Entry, Event
from elastic_refit.core.ledger_draft import Draft
from elastic_refit.core.ledger_parts import add_to_ranges
from elastic_refit.core.ledger_state import LedgerPolicy, LedgerState, Rejection, new_ledger

__all__ = ["Ack", "apply", "fold", "new_ledger", "replay"]


class Ack(NamedTuple):
    """What became of one entry; ``reason`` says why it was ignored or rejected."""

    seq: int
    status: Literal["applied", "ignored", "rejected", "duplicate"]
    reason: str = ""


def apply(state: LedgerState, entry: Entry) -> LedgerState:
    """The state after ``entry``. Total and pure: never raises, never changes ``state``."""
    return fold(state, entry)[0]


def replay(policy: LedgerPolicy, entries: Iterable[Entry]) -> LedgerState:
    """The state of a ledger with ``policy`` after ``entries``, in their order."""
    state = new_ledger(policy)
    for entry in entries:
        state = fold(state, entry)[0]
    return state


def fold(state: LedgerState, entry: Entry) -> tuple[LedgerState, Ack]:
    """The state after ``entry``, and what became of it."""
    seq, event, writer = entry.seq, entry.event, entry.writer
    key = (writer, entry.writer_incarnation)
    known = state.writers.get(key)
    seen = add_to_ranges(known[1] if known else (), seq, limit=state.policy.max_gaps)
    if seen is None:
        return state, Ack(seq, "duplicate")
    draft = Draft(state, _clamped(state.now_s, entry.time_s), writer)
    if known is None:
        _make_room(draft)
    draft.writers = draft.writers.with_item(key, (draft.now_s, seen))
    refusal = ledger_refits.obey(draft, event) if isinstance(event, FLEET_EVENTS) else ledger_shards.obey(draft, event)
    if refusal is None:
        return draft.freeze(), Ack(seq, "applied")
    if refusal.is_illegal:
        _record(draft, event, refusal.reason)
        return draft.freeze(), Ack(seq, "rejected", refusal.reason)
    return draft.freeze(), Ack(seq, "ignored", refusal.reason)


def _clamped(now_s: float, time_s: float) -> float:
    return time_s if time_s > now_s and math.isfinite(time_s) else now_s


def _make_room(draft: Draft) -> None:
    """For one more writer: the one that was silent for longest is forgotten."""
    if len(draft.writers) >= draft.policy.max_writers:
        quietest = min(draft.writers.items(), key=lambda item: (item[1][0], item[0]))[0]
        draft.writers = draft.writers.without(quietest)


def _record(draft: Draft, event: Event, reason: str) -> None:
    subject = f"epoch {event.epoch}" if isinstance(event, FLEET_EVENTS) else str(event.shard)
    rejection = Rejection(draft.now_s, type(event).__name__, subject, reason, draft.writer)
    draft.rejections = draft.rejections.append(rejection)
