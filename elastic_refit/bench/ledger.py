"""How fast the ledger folds, answers and plans, on one core.

What only computes is measured in processor time, so that neighbours on the machine do not count; the journal in real
time, because a disk is waited for.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from elastic_refit.core.events import (
    Entry,
    EpochOpened,
    Event,
    ProbeOk,
    RefitLanded,
    RefitOpened,
    Registered,
    RequestFailed,
    RequestSucceeded,
    ShardCommitted,
)
from elastic_refit.core.ids import ShardId
from elastic_refit.core.ledger import apply, replay
from elastic_refit.core.ledger_queries import serving, snapshot
from elastic_refit.core.ledger_state import LedgerPolicy, LedgerState
from elastic_refit.core.membership import plan_membership
from elastic_refit.journal import open_journal, read_journal

__all__ = ["measure"]


def measure(num_shards: int = 10_000, num_events: int = 100_000) -> dict[str, Any]:
    """Figures of a fleet of ``num_shards``; takes a few seconds.

    ``quiet`` events are answered probes; ``mixed`` has one failed request in twenty, and its recovery; in ``stormy``
    every event moves a shard to another state.
    """
    shards = [ShardId(index) for index in range(num_shards)]
    state = replay(LedgerPolicy(), _entries("start", 0.0, _beginning(shards)))
    one_in_twenty = [_one_in_twenty(number, shards) for number in range(num_events)]
    flapping = [_flapping(number, shards) for number in range(num_events)]
    probes = [ProbeOk(shards[number % num_shards]) for number in range(num_events)]
    return {
        "num_shards": num_shards,
        "quiet_events_per_s": _fold_rate(state, probes),
        "mixed_events_per_s": _fold_rate(state, one_in_twenty),
        "stormy_events_per_s": _fold_rate(state, flapping),
        "snapshot_ms": _best_ms(lambda: snapshot(state)),
        "serving_ms": _best_ms(lambda: serving(state)),
        "plan_ms": _best_ms(lambda: plan_membership(16, [1, 2, 4, 8] * (num_shards // 4 + 1), shards)),
        **_journal_figures(one_in_twenty[:10_000], shards),
    }


def _beginning(shards: Sequence[ShardId]) -> list[Event]:
    """Everybody registers and lands version 1."""
    return [
        *(Registered(shard) for shard in shards),
        EpochOpened(1, 1),
        RefitOpened(1, 1, tuple(shards)),
        *(ShardCommitted(shard, 1, 1) for shard in shards),
        RefitLanded(1, 1),
    ]


def _one_in_twenty(number: int, shards: Sequence[ShardId]) -> Event:
    if number % 20 == 0:
        return RequestFailed(shards[number % len(shards)], "shard", "EngineDeadError")
    if number % 20 == 1:
        return RequestSucceeded(shards[(number - 1) % len(shards)])
    return ProbeOk(shards[number % len(shards)])


def _flapping(number: int, shards: Sequence[ShardId]) -> Event:
    shard = shards[number // 2 % len(shards)]
    return RequestSucceeded(shard) if number % 2 else RequestFailed(shard, "shard", "EngineDeadError")


def _entries(writer: str, began_s: float, events: Sequence[Event]) -> list[Entry]:
    return [Entry(writer, 0, seq, began_s + seq * 1e-5, event) for seq, event in enumerate(events)]


def _fold_rate(state: LedgerState, events: Sequence[Event]) -> float:
    entries = _entries("bench", state.now_s, events)
    gc.collect()
    gc.freeze()  # the collector shall walk what the ledger makes, not the inputs that lie ready here
    began_s = time.process_time()
    for entry in entries:
        state = apply(state, entry)
    took_s = time.process_time() - began_s
    gc.unfreeze()
    return len(entries) / took_s


def _best_ms(call: Callable[[], object]) -> float:
    took_ms = []
    for _ in range(5):
        began_s = time.process_time()
        call()
        took_ms.append(1e3 * (time.process_time() - began_s))
    return min(took_ms)


def _journal_figures(events: Sequence[Event], shards: Sequence[ShardId]) -> dict[str, float]:
    """What an append costs alone and in batches of 100, and how fast a journal replays."""
    entries = _entries("bench", 0.0, [*_beginning(shards)[: len(shards)], *events])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        journal = open_journal(path, run_id="bench", policy=LedgerPolicy())
        began_s = time.perf_counter()
        for first in range(0, len(entries), 100):
            journal.append(entries[first : first + 100])
        batched_s = time.perf_counter() - began_s
        alone_ms = _best_ms(lambda: journal.append(entries[:1]))
        journal.close()
        began_s = time.perf_counter()
        read_journal(path)
        replayed_s = time.perf_counter() - began_s
    return {
        "append_ms": alone_ms,
        "appended_events_per_s": len(entries) / batched_s,
        "replayed_events_per_s": len(entries) / replayed_s,
    }
