"""The ranks of one shard as its actor asks them: one in the actor's own process, or one in each worker of the engine.

A shard is as good as the worst of its ranks: it answers when all have, it is alive while all answer, and it serves a
version that all hold. What must never happen here: a silent rank hidden behind a sibling that speaks.
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from elastic_refit.chaos import Saboteur
from elastic_refit.core.messages import (
    Answer,
    CommitOrder,
    Fault,
    JoinOrder,
    Order,
    PingOrder,
    Pong,
    Prepared,
    PrepareOrder,
    ReadyOrder,
    Settled,
    SettleOrder,
    TransferOrder,
)
from elastic_refit.engines.base import ShardEngine
from elastic_refit.errors import ShardError
from elastic_refit.participant import RefitParticipant
from elastic_refit.participant_setup import Keep, RankSetup
from elastic_refit.processes import identify, wait_until_running
from elastic_refit.rank_faults import RankSaboteurs
from elastic_refit.rank_line import RankLine
from elastic_refit.rank_seat import Moved, SeatPlan, line_path, move, roll_back, take_seat
from elastic_refit.ranks import rank_name, worst_of

__all__ = ["ShardRanks", "seat_ranks"]


class ShardRanks(ABC):
    """Any thread may ``attend``; one at a time may ``work``."""

    saboteur: Saboteur | RankSaboteurs | None = None
    """Who may strike the ranks, in a run that was started for it."""

    @property
    @abstractmethod
    def serving_version(self) -> int | None:
        """The version that every rank holds whole, if there is one."""

    @abstractmethod
    def attend(self, order: Order) -> Answer:
        """Answer a question while the refit may be blocked; does not return while a rank is silent."""

    @abstractmethod
    def work(self, order: Order, secret: bytes = b"") -> Answer:
        """Carry out one order of a refit; may block, within the order's deadline."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group, and the channel. Idempotent."""


def seat_ranks(engine: ShardEngine, setup: RankSetup, node: str, keep: Keep | None = None) -> ShardRanks:
    """Have every rank of ``engine`` take its part. Without ``keep`` none of them can be struck on purpose.

    Raises:
        ShardError: the engine does not have as many ranks as the setup.
    """
    if engine.width != setup.width:
        raise ShardError(f"{setup.member} is planned with {setup.width} ranks and its engine has {engine.width}")
    if engine.has_workers:
        return _WorkerRanks(engine, setup, node, keep)
    return _OwnRank(engine, *setup.participant(node, pids=engine.pids(), keep=keep))


class _OwnRank(ShardRanks):
    """The engine, and so the only rank, is in this process."""

    def __init__(self, engine: ShardEngine, participant: RefitParticipant, saboteur: Saboteur | None) -> None:
        self.saboteur = saboteur
        self._engine = engine
        self._participant = participant

    @property
    def serving_version(self) -> int | None:
        return self._participant.serving_version

    def attend(self, order: Order) -> Answer:
        match order:
            case PingOrder():
                return self._participant.ping(order)
            case SettleOrder():
                return self._participant.settle(order, self._engine.in_worker)
            case _:
                raise _unknown(order)

    def work(self, order: Order, secret: bytes = b"") -> Answer:
        match order:
            case PrepareOrder():
                return self._participant.prepare(order)
            case JoinOrder():
                return self._participant.join(order, secret)
            case ReadyOrder():
                return self._participant.pause(order, self._engine.pause)
            case TransferOrder():
                return self._engine.in_worker(lambda receiver: self._participant.receive(order, receiver))
            case CommitOrder():
                return self._engine.in_worker(lambda receiver: self._participant.commit(order, receiver))
            case _:
                raise _unknown(order)

    def close(self) -> None:
        self._participant.close()


class _WorkerRanks(ShardRanks):
    """Each rank is in a worker process of the engine, and has a line of its own."""

    def __init__(self, engine: ShardEngine, setup: RankSetup, node: str, keep: Keep | None) -> None:
        self._engine = engine
        self._member = setup.member
        self._serving: int | None = None
        self._own = range(0)
        self._left_epoch = -1
        with tempfile.TemporaryDirectory(prefix="elastic-refit-") as folder:  # only this user may enter it
            plan = SeatPlan(setup.for_workers(), node, folder, has_faults=keep is not None)
            ranks = engine.in_workers(partial(take_seat, plan))
            names = [rank_name(setup.member, rank) for rank in range(setup.width)]
            self._lines = [RankLine.to(line_path(folder, rank), name) for rank, name in enumerate(names)]
        self._processes = tuple(identify(pid, node) for pid in sorted({os.getpid(), *engine.pids()}))
        if keep is not None:
            self.saboteur = RankSaboteurs(self._lines, keep, ranks=ranks, processes=self._processes)

    @property
    def serving_version(self) -> int | None:
        return self._serving

    def attend(self, order: Order) -> Answer:
        match order:
            case PingOrder():
                answer = self._ask("attend", order)
                # A process between this one and its ranks has no line; it must at least not be stopped.
                wait_until_running(self._processes)
                return replace(answer, processes=self._processes) if isinstance(answer, Pong) else answer
            case SettleOrder():
                self._left_epoch = max(self._left_epoch, order.epoch)
                answer = self._ask("attend", order)
                if order.roll_back and isinstance(answer, Settled):
                    self._note(self._engine.in_workers(roll_back))
                return answer
            case _:
                raise _unknown(order)

    def work(self, order: Order, secret: bytes = b"") -> Answer:
        match order:
            case PrepareOrder():
                answer = self._ask("connect", order)
                return replace(answer, processes=self._processes) if isinstance(answer, Prepared) else answer
            case JoinOrder():
                self._own = order.membership.ranks(self._member)
                return self._ask("connect", order, secret)
            case ReadyOrder():
                return self._pause(order)
            case TransferOrder() | CommitOrder():
                return self._move(order)
            case _:
                raise _unknown(order)

    def close(self) -> None:
        for line in self._lines:
            line.close()

    def _pause(self, order: ReadyOrder) -> Answer:
        """The ranks say that they pause while the engine does, so that a pause that hangs is seen where it hangs."""
        pausing = [line.ask("connect", order) for line in self._lines]
        if order.epoch > self._left_epoch:
            self._engine.pause()
            for line in self._lines:
                line.ask("note_paused", order)
        return worst_of(_answers(pausing), self._own)

    def _move(self, order: TransferOrder | CommitOrder) -> Answer:
        self._serving = None
        try:
            moved: list[Moved] = self._engine.in_workers(partial(move, order))
        except ShardError as error:
            return Fault(type(error).__name__, str(error))
        self._note(each.serving_version for each in moved)
        return worst_of([each.answer for each in moved], self._own)

    def _note(self, versions: Iterable[int | None]) -> None:
        held = set(versions)
        self._serving = held.pop() if len(held) == 1 else None

    def _ask(self, verb: str, *arguments: Any) -> Answer:
        return worst_of(_answers([line.ask(verb, *arguments) for line in self._lines]), self._own)


def _answers(asked: Iterable[Future[Answer]]) -> list[Answer]:
    """Waits for all of them: a member that answered for some of its ranks would hide a silent one."""
    answers: list[Answer] = []
    for each in asked:
        try:
            answers.append(each.result())
        except Exception as error:  # noqa: BLE001 - what a rank raises is its own fault, and evidence
            answers.append(Fault(type(error).__name__, f"{type(error).__name__}: {error}"))
    return answers


def _unknown(order: Order) -> TypeError:
    return TypeError(f"a shard has no answer to {type(order).__name__}")
