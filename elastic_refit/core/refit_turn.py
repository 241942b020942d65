"""One step of the refit protocol in the making: its scratch state and the tools that every rule uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from elastic_refit.core.events import Event as LedgerEvent
from elastic_refit.core.evidence import MemberEvidence
from elastic_refit.core.ids import Member, ProcessId, ShardId, TrainerId
from elastic_refit.core.membership import Membership
from elastic_refit.core.messages import Answer, Op, Order
from elastic_refit.core.refit_state import (
    Answered,
    Call,
    Command,
    Fleet,
    Ignored,
    Record,
    RefitState,
    Round,
    RoundTimedOut,
    Running,
    StartTimer,
)

__all__ = ["ATTEMPT", "IN_STEP", "Turn", "everybody"]

ATTEMPT = frozenset({Op.PREPARE, Op.JOIN, Op.READY, Op.TRANSFER, Op.COMMIT})
"""Rounds in which a failure opens an incident."""

IN_STEP = frozenset({Op.JOIN, Op.TRANSFER})
"""Rounds in which all wait for each other, so that nobody moves if one does not."""


def everybody(fleet: Fleet) -> tuple[Member, ...]:
    return (*(TrainerId(rank) for rank in range(fleet.num_trainers)), *sorted(fleet.present))


class Turn(ABC):
    """One step in the making. Mutable here so that no rule has to thread five values through; gone when it returns."""

    def __init__(self, state: RefitState, running: Running) -> None:
        self.state = state
        self.run: Running | None = running
        self.commands: list[Command] = []

    def result(self) -> tuple[RefitState, tuple[Command, ...]]:
        return replace(self.state, running=self.run), tuple(self.commands)

    # -- small tools

    @property
    def running(self) -> Running:
        assert self.run is not None, "a step went on after the refit had finished"
        return self.run

    def change(self, **changes: Any) -> None:
        self.run = replace(self.running, **changes)

    def record(self, event: LedgerEvent) -> None:
        self.commands.append(Record(event))

    def ignore(self, reason: str) -> None:
        self.commands.append(Ignored(reason))

    def learn_processes(self, member: Member, processes: tuple[ProcessId, ...]) -> None:
        if processes:
            self.state = replace(self.state, processes={**self.state.processes, member: processes})

    def know(self, member: Member, **facts: Any) -> None:
        ranks = self._ranks(member)
        known = self.running.evidence.get(member) or MemberEvidence(member, ranks.start, width=len(ranks))
        self.change(evidence={**self.running.evidence, member: replace(known, **facts)})

    def missed(self, event: RoundTimedOut) -> None:
        """Who was asked has not answered; a beacon that came by itself is a sign of life, and says how far one is."""
        for member in self.running.round.waiting:
            self.know(member, answered_ping=False)
            if member in event.beacons:
                beacon, age_s = event.beacons[member]
                self.know(member, beacon=beacon, beacon_age_s=age_s)

    def _ranks(self, member: Member) -> range:
        group = self.running.membership
        return group.ranks(member) if group is not None and group.contains(member) else range(-1, 0)

    def is_dead(self, member: Member) -> bool:
        known = self.running.evidence.get(member)
        return known is not None and known.died is not None

    @property
    def members(self) -> tuple[Member, ...]:
        group = self.running.membership
        return everybody(self.running.fleet) if group is None else group.members

    @property
    def condemned(self) -> frozenset[Member]:
        return frozenset(finding.member for finding in self.running.findings)

    def survivors(self) -> tuple[Member, ...]:
        condemned = self.condemned
        return tuple(m for m in self.members if m not in condemned and not self.is_dead(m))

    def surviving_shards(self) -> tuple[ShardId, ...]:
        return tuple(member for member in self.survivors() if isinstance(member, ShardId))

    def not_asked(self, event: Answered) -> str | None:
        """Why the answer is to nothing that is still asked; None if it is."""
        run, op, member = self.running, event.op, event.member
        if event.epoch != self.state.epoch:
            return f"{op} of epoch {event.epoch}, now {self.state.epoch}"
        if event.token is not None and event.token < run.first_token:
            return f"{op} of a refit before v{run.version}"
        if op is run.round.op and member in run.round.waiting:
            return None
        for asked in (run.stalled, run.interrupted):
            if asked is not None and op is asked.op and member in asked.waiting:
                return None
        return f"{op} of {member}, who is not waited for, in round {run.round.op}"

    def in_order(self, members: Collection[Member]) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member in members)

    def stop_expecting(self, member: Member) -> None:
        """Nothing more is to come from ``member`` of the attempt that was broken off."""
        interrupted = self.running.interrupted
        if interrupted is not None:
            self.change(interrupted=replace(interrupted, waiting=interrupted.waiting - {member}))

    @property
    def group(self) -> Membership:
        group = self.running.membership
        assert group is not None, "a round of the attempt needs a membership"
        return group

    # -- rounds

    def open_round(self, op: Op, orders: Mapping[Member, Order], *, seconds: float | None = None) -> None:
        """Ask, for as long as the policy says or ``seconds``; a question to nobody is answered at once."""
        token = self._new_round(op, frozenset(orders))
        if not orders:
            self.round_done()
            return
        limit_s = self.state.policy.round_s(op) if seconds is None else seconds
        self.commands.append(StartTimer(token, op, limit_s))
        self.commands.extend(Call(op, self.state.epoch, member, order, token) for member, order in orders.items())

    def wait(self, seconds: float) -> None:
        """Ask nobody, and let evidence ripen; whatever comes meanwhile ends it."""
        token = self._new_round(Op.WAIT, frozenset())
        self.commands.append(StartTimer(token, Op.WAIT, min(seconds, self.state.policy.round_s(Op.WAIT))))

    def resume(self) -> None:
        """Look no longer why nothing moves; the attempt's round, if one seemed stalled, is the present one again."""
        stalled = self.running.stalled
        if stalled is not None:
            self.change(round=stalled, stalled=None, is_for_silence=False)

    def may_ask_again(self) -> bool:
        return self.running.round.asks < self.state.policy.max_asks

    def _new_round(self, op: Op, waiting: frozenset[Member]) -> int:
        token, before = self.state.next_token, self.running.round
        asks = before.asks + (op is not Op.WAIT) if op in (Op.WAIT, before.op) or before.op is Op.WAIT else 1
        self.state = replace(self.state, next_token=token + 1)
        self.change(round=Round(op, token, waiting, asks=asks))
        return token

    def answer_came(self, op: Op, member: Member, answer: Answer | None) -> None:
        """``member`` has nothing more to say to ``op``; go on if it was the last of its round."""
        current, stalled = self.running.round, self.running.stalled
        if stalled is not None and op is stalled.op:
            self.change(stalled=stalled.after(member, answer))
            if stalled.waiting == {member}:
                self.resume()
                self.round_done()
        elif op is current.op and member in current.waiting:
            self.change(round=current.after(member, answer))
            if current.waiting == {member}:
                self.round_done()
        else:
            self.stop_expecting(member)
            self.evidence_came()

    @abstractmethod
    def round_done(self) -> None:
        """Every member of the round has answered, failed or died."""

    @abstractmethod
    def evidence_came(self) -> None:
        """Something became known about the attempt that was broken off."""
