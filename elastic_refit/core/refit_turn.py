"""One step of the refit protocol in the making: its scratch state and the tools that every rule uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elastic_refit.core.events import Event as LedgerEvent
from elastic_refit.core.evidence import MemberEvidence
from elastic_refit.core.ids import Member, TrainerId
from elastic_refit.core.membership import Membership
from elastic_refit.core.messages import Op, Order
from elastic_refit.core.refit_state import (
    Call,
    Command,
    Fleet,
    Ignored,
    Record,
    RefitState,
    Round,
    Running,
    StartTimer,
)

__all__ = ["ATTEMPT", "Turn", "everybody"]

ATTEMPT = frozenset({Op.PREPARE, Op.JOIN, Op.READY, Op.TRANSFER, Op.COMMIT})
"""Rounds in which a failure opens an incident."""


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

    def know(self, member: Member, **facts: Any) -> None:
        known = self.running.evidence.get(member) or MemberEvidence(member, self._rank(member))
        self.change(evidence={**self.running.evidence, member: replace(known, **facts)})

    def _rank(self, member: Member) -> int:
        group = self.running.membership
        return group.rank_of(member) if group is not None and group.contains(member) else -1

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

    @property
    def group(self) -> Membership:
        group = self.running.membership
        assert group is not None, "a round of the attempt needs a membership"
        return group

    # -- rounds

    def open_round(self, op: Op, orders: Mapping[Member, Order]) -> None:
        token = self.state.next_token
        self.state = replace(self.state, next_token=token + 1)
        waiting = frozenset(orders)
        self.change(round=Round(op, token, waiting))
        if op in ATTEMPT:
            self.change(outstanding=waiting)
        if not waiting:
            self.round_done()
            return
        self.commands.append(StartTimer(token, op, self.state.policy.round_s(op)))
        self.commands.extend(Call(op, self.state.epoch, member, order) for member, order in orders.items())

    @abstractmethod
    def round_done(self) -> None:
        """Every member of the round has answered, failed or died."""
