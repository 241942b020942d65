"""One rank's part in refits, in a worker process of an engine that has processes of its own.

What touches weights comes by the engine's own call into its workers, on the thread that the engine uses; everything
else comes by the rank's line, which answers whatever that thread is blocked in. What must never happen here: a pause
that an abort does not end.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from elastic_refit.core.ids import ProcessId
from elastic_refit.core.messages import (
    Answer,
    CommitOrder,
    JoinOrder,
    Order,
    PingOrder,
    PrepareOrder,
    ReadyOrder,
    SettleOrder,
    TransferOrder,
)
from elastic_refit.engines.base import WeightReceiver
from elastic_refit.errors import CommunicatorAborted
from elastic_refit.participant import RefitParticipant
from elastic_refit.participant_setup import RankSetup
from elastic_refit.processes import identify
from elastic_refit.rank_faults import FaultyRank
from elastic_refit.rank_line import listen_at

__all__ = ["Moved", "RankSeat", "SeatPlan", "line_path", "move", "roll_back", "take_seat"]


@dataclass(frozen=True, slots=True)
class Moved:
    """What a rank answered to an order that touches weights, and the version that it holds whole since."""

    answer: Answer
    serving_version: int | None


class RankSeat(FaultyRank):
    """What the line asks for; any thread."""

    participant: RefitParticipant

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._paused: ReadyOrder | None = None
        self._left_epoch = -1

    def attend(self, order: Order) -> Answer:
        """Answer at once, or as soon as every blocked call has been left."""
        match order:
            case PingOrder():
                return self.participant.ping(order)
            case SettleOrder():
                with self._changed:
                    self._left_epoch = max(self._left_epoch, order.epoch)
                    self._changed.notify_all()
                return self.participant.settle(order)
            case _:
                raise TypeError(f"a rank does not attend to {type(order).__name__}")

    def connect(self, order: Order, secret: bytes = b"") -> Answer:
        """Carry out an order that touches no weights."""
        match order:
            case PrepareOrder():
                return self.participant.prepare(order)
            case JoinOrder():
                return self.participant.join(order, secret)
            case ReadyOrder():
                return self.participant.pause(order, lambda: self._await_pause(order))
            case _:
                raise TypeError(f"a rank does not connect by {type(order).__name__}")

    def note_paused(self, order: ReadyOrder) -> None:
        """The engine schedules nothing any more, as ``order`` wanted it."""
        with self._changed:
            self._paused = order
            self._changed.notify_all()

    def move(self, order: Order, receiver: WeightReceiver) -> Moved:
        """Carry out an order that touches weights. The engine's own thread."""
        match order:
            case TransferOrder():
                answer = self.participant.receive(order, receiver)
            case CommitOrder():
                answer = self.participant.commit(order, receiver)
            case _:
                raise TypeError(f"a rank moves nothing by {type(order).__name__}")
        return Moved(answer, self.participant.serving_version)

    def _await_pause(self, order: ReadyOrder) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._paused == order or self._left_epoch >= order.epoch)
            if self._paused != order:
                raise CommunicatorAborted(f"epoch {order.epoch} was aborted before the engine paused", reason="ordered")


_seats: list[RankSeat] = []
"""That of this process, once it is taken: a worker's functions find it here."""


def line_path(folder: str, rank: int) -> str:
    return f"{folder}/{rank}"


@dataclass(frozen=True, slots=True)
class SeatPlan:
    """Where the ranks of a shard sit: their setup, their node, the folder of their lines, and if they may be struck."""

    setup: RankSetup
    node: str
    folder: str
    has_faults: bool


def take_seat(plan: SeatPlan, receiver: WeightReceiver) -> ProcessId:
    """Make this process a rank that takes part in refits, and have it answer at its line's path. Once."""
    seat, rank = RankSeat(), receiver.rank
    keep = seat.keep if plan.has_faults else None
    seat.participant, seat.saboteur = plan.setup.participant(plan.node, rank=rank, keep=keep)
    _seats.append(seat)
    listen_at(line_path(plan.folder, rank), seat)
    return identify(os.getpid(), plan.node)


def move(order: Order, receiver: WeightReceiver) -> Moved:
    """:meth:`RankSeat.move` of this process."""
    return _seats[0].move(order, receiver)


def roll_back(receiver: WeightReceiver) -> int | None:
    """Close the update that will not be finished; the version that the rank still holds whole."""
    _seats[0].participant.roll_back(receiver)
    return _seats[0].participant.serving_version
