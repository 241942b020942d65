"""One generation shard: an engine, its part in refits, and the gate between them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import ray

from elastic_refit.actors.sabotage import Sabotaged
from elastic_refit.actors.setup import ParticipantSetup
from elastic_refit.core.messages import (
    Answer,
    CommitOrder,
    Committed,
    JoinOrder,
    Order,
    PingOrder,
    PrepareOrder,
    ReadyOrder,
    Settled,
    SettleOrder,
    TransferOrder,
)
from elastic_refit.engines.base import NO_VERSION, Sample, SamplingSpec
from elastic_refit.engines.registry import build_engine
from elastic_refit.errors import ShardError
from elastic_refit.processes import exit_when_orphaned

__all__ = ["VllmShardActor", "shard_options"]


def shard_options(**options: Any) -> dict[str, Any]:
    """Options for ``ray.remote(...)`` of a shard.

    ``max_restarts=0``: with restarts a death reaches a pending caller only when the restart is over; the successor is
    the supervisor's to make.
    """
    groups = {"refit": 1, "control": 4, "generate": 1, "sentinel": 2}
    return {"concurrency_groups": groups, "max_restarts": 0, **options}


class VllmShardActor(Sabotaged):
    """An engine (vLLM, or the plain torch one) that serves a version only once it holds all of it."""

    def __init__(
        self,
        setup: ParticipantSetup,
        *,
        engine: str,
        model: str,
        engine_options: dict[str, Any] | None = None,
    ) -> None:
        exit_when_orphaned()  # from here on: loading may take minutes
        self.name = str(setup.member)
        self._engine = build_engine(engine, model, dict(engine_options or {}))
        self._participant, self._saboteur = setup.participant(pids=self._engine.pids())
        self._in_refit = False
        self._released = 0
        self._release = threading.Condition()

    @ray.method(concurrency_group="control")
    def attend(self, order: Order) -> Answer:
        """Answer a question while the refit may be blocked."""
        match order:
            case PingOrder():
                return self._participant.ping(order)
            case SettleOrder():
                answer = self._participant.settle(order, self._engine.in_worker)
                if order.roll_back and isinstance(answer, Settled):
                    self._reopen()
                return answer
            case _:
                raise TypeError(f"a shard does not attend to {type(order).__name__}")

    @ray.method(concurrency_group="refit")
    def work(self, order: Order, secret: bytes = b"") -> Answer:
        """Carry out one order of a refit; may block, within the order's deadline."""
        match order:
            case PrepareOrder():
                return self._participant.prepare(order)
            case JoinOrder():
                return self._participant.join(order, secret)
            case ReadyOrder():
                self._in_refit = True
                return self._participant.pause(order, self._engine.pause)
            case TransferOrder():
                return self._engine.in_worker(lambda receiver: self._participant.receive(order, receiver))
            case CommitOrder():
                answer = self._engine.in_worker(lambda receiver: self._participant.commit(order, receiver))
                if isinstance(answer, Committed):
                    self._reopen()
                return answer
            case _:
                raise TypeError(f"a shard does not carry out {type(order).__name__}")

    @ray.method(concurrency_group="generate")
    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingSpec) -> list[Sample]:
        """Complete ``prompts`` (token ids). Waits while a refit is in progress.

        Raises:
            ShardError: the shard holds no whole version.
        """
        if self._participant.serving_version is None and not self._in_refit:
            raise ShardError(f"{self.name} holds no whole version; it serves after the first refit that it commits")
        samples = self._engine.generate(prompts, sampling)
        if any(sample.weight_version == NO_VERSION for sample in samples):
            raise ShardError(f"{self.name} holds no whole version: a refit was rolled back while the request waited")
        return samples

    def _engine_pids(self) -> tuple[int, ...]:
        return self._engine.pids()

    def _reopen(self) -> None:
        self._in_refit = False
        self._engine.resume()

    @ray.method(concurrency_group="control")
    def ready(self) -> int | None:
        """Returns once the engine has loaded: the version that the shard may serve, if any."""
        return self._participant.serving_version

    @ray.method(concurrency_group="sentinel")
    def hold(self, token: int) -> int:
        """Stay in the task table until ``token`` is released. Only the process' death ends it with an error."""
        with self._release:
            self._release.wait_for(lambda: self._released >= token)
        return token

    @ray.method(concurrency_group="control")
    def release(self, token: int) -> None:
        """Let every ``hold`` up to ``token`` return."""
        with self._release:
            self._released = max(self._released, token)
            self._release.notify_all()
