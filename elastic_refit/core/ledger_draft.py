"""One application of one entry while it happens: the fields of a state that may be assigned, and then frozen again.

A draft never leaves :func:`elastic_refit.core.ledger.fold`; to everybody else the fold is pure.
"""

from __future__ import annotations

from typing import NamedTuple

from elastic_refit.core.ledger_state import Change, LedgerState, ShardRecord
from elastic_refit.core.ledger_table import TABLE, Input, ShardState

__all__ = ["Draft", "Refusal", "Step"]


class Refusal(NamedTuple):
    """Why an event changes nothing. ``is_illegal``: it should not have been sent, and that is kept on record."""

    reason: str
    is_illegal: bool


class Step(NamedTuple):
    """What a rule makes of an event: the input, the record with what the event says noted in it, and the words.

    ``record`` is None where there is nothing to note.
    """

    input: Input
    record: ShardRecord | None
    cause: str = ""
    evidence: str = ""


class Draft:
    """The state that :func:`fold` is making."""

    __slots__ = ("counts", "history", "now_s", "policy", "refits", "rejections", "shards", "writer", "writers")

    def __init__(self, state: LedgerState, now_s: float, writer: str) -> None:
        self.policy, _, self.shards, self.counts, self.refits, self.writers, self.history, self.rejections = state
        self.now_s = now_s
        self.writer = writer

    def freeze(self) -> LedgerState:
        parts = (
            self.policy,
            self.now_s,
            self.shards,
            self.counts,
            self.refits,
            self.writers,
            self.history,
            self.rejections,
        )
        return tuple.__new__(LedgerState, parts)  # as LedgerState(*parts), in half the time

    @property
    def refit_holds_deaths(self) -> bool:
        """A refit is open, and has not been for longer than any coordinator may take."""
        refit = self.refits.open
        return refit is not None and self.now_s - refit.opened_s <= self.policy.coordinator_s

    def take(self, known: ShardRecord, step: Step) -> Refusal | None:
        """Move one shard as the table says. This is the only place where a known shard changes its state."""
        cell = TABLE[step.input][known.state]
        if cell == "bad" or cell == "never":
            return Refusal(f"{step.input.name} means nothing to a shard that is {known.state.name}", is_illegal=True)
        if cell == "skip":
            return Refusal(f"{known.id} is {known.state.name}", is_illegal=False)
        if cell == "keep":
            self._keep(known, step)
        else:
            self._move(known, cell, step)
        return None

    def admit(self, record: ShardRecord, cause: str) -> None:
        """Add a shard that the ledger did not know."""
        self._count(None, record.state)
        self._note(record, None, cause, "")
        self.shards = self.shards.with_item(record.id.index, record)

    def _keep(self, known: ShardRecord, step: Step) -> None:
        if step.record is None:
            return
        if step.input is Input.CONDEMNED:
            self._note(step.record, known.state, step.cause, step.evidence)
        if step.record is not known:
            self.shards = self.shards.with_item(known.id.index, step.record)

    def _move(self, known: ShardRecord, after: ShardState, step: Step) -> None:
        noted = step.record or known
        charged = noted.restarts_charged
        if known.state is ShardState.HEALTHY and self.now_s - known.since_s >= self.policy.restart_refill_s:
            charged = 0
        reason = f"{step.cause}: {step.evidence}" if step.evidence else step.cause
        record = noted._replace(state=after, since_s=self.now_s, reason=reason, restarts_charged=charged)
        self._count(known.state, after)
        self._note(record, known.state, step.cause, step.evidence)
        self.shards = self.shards.with_item(known.id.index, record)

    def _count(self, before: ShardState | None, after: ShardState) -> None:
        counts = list(self.counts)
        counts[after] += 1
        if before is not None:
            counts[before] -= 1
        self.counts = tuple(counts)

    def _note(self, record: ShardRecord, before: ShardState | None, cause: str, evidence: str) -> None:
        change = Change(self.now_s, record.id, before, record.state, cause, evidence, self.writer)
        self.history = self.history.append(change)
