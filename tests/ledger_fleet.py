"""A fleet's ledger with verbs, for tests: one writer, and a time that the test moves."""

from __future__ import annotations

from itertools import count
from typing import Any

from elastic_refit.core.events import (
    ActorDied,
    Entry,
    EpochOpened,
    Event,
    Loaded,
    RefitLanded,
    RefitOpened,
    Registered,
    Restarting,
    ShardCommitted,
)
from elastic_refit.core.ids import ShardId
from elastic_refit.core.ledger import Ack, fold, new_ledger
from elastic_refit.core.ledger_state import LedgerPolicy, LedgerState, ShardRecord
from elastic_refit.core.ledger_table import ShardState


class Fleet:
    """``Fleet(3)`` has three HEALTHY shards that hold version 1 of epoch 1; ``landed=False`` leaves them STALE."""

    def __init__(self, num_shards: int = 3, *, landed: bool = True, **policy: Any) -> None:
        self.policy = LedgerPolicy(**policy)
        self.state: LedgerState = new_ledger(self.policy)
        self.now_s = 1000.0
        self._seq = count()
        self.shards = tuple(ShardId(index) for index in range(num_shards))
        self.tell(*(Registered(shard) for shard in self.shards))
        if landed:
            self.land(1, 1, self.shards)

    def tell(self, *events: Event, after_s: float = 0.0) -> Ack:
        """Apply ``events``, the first of them ``after_s`` later than the last one; what became of the last."""
        self.now_s += after_s
        for event in events:
            self.state, ack = fold(self.state, Entry("driver", 0, next(self._seq), self.now_s, event))
        return ack

    def open(self, epoch: int, version: int, shards: tuple[ShardId, ...]) -> None:
        if epoch > self.state.refits.epoch:
            assert self.tell(EpochOpened(epoch, 1)).status == "applied"
        assert self.tell(RefitOpened(epoch, version, shards)).status == "applied"

    def land(self, epoch: int, version: int, shards: tuple[ShardId, ...]) -> None:
        self.open(epoch, version, shards)
        assert self.tell(*(ShardCommitted(shard, epoch, version) for shard in shards)).status == "applied"
        assert self.tell(RefitLanded(epoch, version)).status == "applied"

    def replace(self, old: ShardId) -> ShardId:
        new = ShardId(old.index, old.incarnation + 1)
        assert self.tell(ActorDied(old, "killed"), Restarting(new), Loaded(new)).status == "applied"
        return new

    def state_of(self, index: int) -> ShardState:
        return self.record(index).state

    def record(self, index: int) -> ShardRecord:
        record = self.state.shards.get(index)
        assert record is not None
        return record
