"""One generation shard: an engine, its part in refits, and the gate between them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray

from elastic_refit.actors.sabotage import Sabotaged
from elastic_refit.actors.setup import ParticipantSetup
from elastic_refit.core.messages import Answer, Committed, Order, ReadyOrder, Settled, SettleOrder
from elastic_refit.engines.base import NO_VERSION, Hosting, Sample, SamplingSpec
from elastic_refit.engines.registry import build_engine
from elastic_refit.errors import ShardError
from elastic_refit.processes import end_descendants, exit_when_orphaned
from elastic_refit.shard_ranks import seat_ranks

__all__ = ["VllmShardActor", "shard_options"]

logger = logging.getLogger(__name__)

_ATTENDED = 16
"""Questions at once: one that a silent rank leaves open must not keep the next one from being heard."""
_GENERATIONS = 32
"""Calls of ``generate`` at once; an engine that batches continuously works on all of them."""
_LAST_WORDS_S = 0.2
_END_S = 5.0


def shard_options(**options: Any) -> dict[str, Any]:
    """Options for ``ray.remote(...)`` of a shard.

    ``max_restarts=0``: with restarts a death reaches a pending caller only when the restart is over; the successor is
    the supervisor's to make.
    """
    groups = {"refit": 1, "control": _ATTENDED, "generate": _GENERATIONS, "sentinel": 2}
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
        hosting: Hosting | None = None,
    ) -> None:
        exit_when_orphaned()  # from here on: loading may take minutes
        self.name = str(setup.member)
        self._engine = build_engine(engine, model, dict(engine_options or {}), hosting=hosting)
        self._engine.when_dead(_end_with_the_engine)
        self._ranks = seat_ranks(self._engine, setup, setup.node, setup.keep)
        self._saboteur = self._ranks.saboteur
        self._in_refit = False
        self._released = 0
        self._release = threading.Condition()

    @ray.method(concurrency_group="control")
    def attend(self, order: Order) -> Answer:
        """Answer a question while the refit may be blocked."""
        answer = self._ranks.attend(order)
        if isinstance(order, SettleOrder) and order.roll_back and isinstance(answer, Settled):
            self._reopen()
        return answer

    @ray.method(concurrency_group="refit")
    def work(self, order: Order, secret: bytes = b"") -> Answer:
        """Carry out one order of a refit; may block, within the order's deadline."""
        self._in_refit |= isinstance(order, ReadyOrder)
        answer = self._ranks.work(order, secret)
        if isinstance(answer, Committed):
            self._reopen()
        return answer

    @ray.method(concurrency_group="generate")
    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingSpec) -> list[Sample]:
        """Complete ``prompts`` (token ids). Waits while a refit is in progress.

        Raises:
            ShardError: the shard holds no whole version.
        """
        if self._ranks.serving_version is None and not self._in_refit:
            raise ShardError(f"{self.name} holds no whole version; it serves after the first refit that it commits")
        samples = self._engine.generate(prompts, sampling)
        if any(NO_VERSION in sample.token_versions for sample in samples):
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
        return self._ranks.serving_version

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


def _end_with_the_engine(why: str) -> None:
    """A shard dies as a whole. Who waits for an answer hears why first; then the process' own end tells everybody."""
    logger.error("engine_died", extra={"reason": why})
    time.sleep(_LAST_WORDS_S)
    end_descendants(timeout_s=_END_S)
    os._exit(1)
