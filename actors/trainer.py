"""The trainer's side: a base class for the training job's own actor, one per trainer rank.

Subclass it, give it your weights, and make it an actor with :func:`trainer_options`; your own methods run in the
default concurrency group and are never blocked by a refit that waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import ray

from elastic_refit.actors.sabotage import Sabotaged
from elastic_refit.actors.setup import ParticipantSetup
from elastic_refit.core.messages import (
    Answer,
    JoinOrder,
    Order,
    PingOrder,
    PrepareOrder,
    ReadyOrder,
    SettleOrder,
    TransferOrder,
)
from elastic_refit.processes import exit_when_orphaned
from elastic_refit.transports.base import WeightSource

__all__ = ["TrainerActor", "trainer_options"]


def trainer_options(**options: Any) -> dict[str, Any]:
    """Options for ``ray.remote(...)`` of a trainer: its concurrency groups, and no silent restart."""
    return {"concurrency_groups": {"refit": 1, "control": 4}, "max_restarts": 0, **options}


class TrainerActor(Sabotaged, ABC):
    """One trainer rank. Training must not change the weights between ``refit(version)`` and its return."""

    def __init__(self, setup: ParticipantSetup) -> None:
        exit_when_orphaned()
        self._setup = setup
        self._participant, self._saboteur = setup.hosted()

    @abstractmethod
    def weight_source(self) -> WeightSource:
        """The weights as they are now."""

    @ray.method(concurrency_group="control")
    def attend(self, order: Order) -> Answer:
        """Answer a question while the refit may be blocked."""
        match order:
            case PingOrder():
                return self._participant.ping(order)
            case SettleOrder():
                return self._participant.settle(order)
            case _:
                raise TypeError(f"a trainer does not attend to {type(order).__name__}")

    @ray.method(concurrency_group="refit")
    def work(self, order: Order, secret: bytes = b"") -> Answer:
        """Carry out one order of a refit; may block, within the order's deadline."""
        match order:
            case PrepareOrder():
                return self._participant.prepare(order)
            case JoinOrder():
                return self._participant.join(order, secret)
            case ReadyOrder():
                return self._participant.pin(order, self.weight_source(), self._setup.packing)
            case TransferOrder():
                return self._participant.send(order)
            case _:
                raise TypeError(f"a trainer does not carry out {type(order).__name__}")
