"""The driver's fleet: makes every actor, because actors die with their maker, and takes every one of them down again.

What must never happen here: a process that outlives the run, a frozen one included.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayTaskError

from elastic_refit.actors.coordinator import RefitReport
from elastic_refit.actors.launch import Launcher
from elastic_refit.actors.ledger_client import LedgerClient
from elastic_refit.actors.sabotage import Chaos
from elastic_refit.actors.supervisor import FleetSupervisor
from elastic_refit.actors.trainer import TrainerActor
from elastic_refit.chaos import Fault
from elastic_refit.config import RunConfig
from elastic_refit.control.setup import ChannelPlan
from elastic_refit.core.events import Registered
from elastic_refit.core.ids import Member, ProcessId, ShardId, TrainerId
from elastic_refit.core.messages import PingOrder
from elastic_refit.errors import CoordinatorLost, ElasticRefitError, ShardDied, TrainerLost
from elastic_refit.processes import kill_proved

__all__ = ["Fleet"]

logger = logging.getLogger(__name__)

OnReady = Callable[[Member], None]

_CLOSE_S = 20.0
_LOOK_S = 0.1


class Fleet:
    """Trainers, shards, ledger and coordinator of one run. ``close`` must be called, whatever happened."""

    def __init__(
        self,
        config: RunConfig,
        *,
        trainer_class: type[TrainerActor],
        trainer_arguments: Mapping[str, Any],
        model: str,
        folder: Path,
        faults: Sequence[Fault] = (),
    ) -> None:
        """Start every actor, without waiting for any; ``folder`` is for the journal and the incidents.

        ``trainer_class`` is called with a :class:`ParticipantSetup` and ``trainer_arguments``.
        """
        self._channel = ChannelPlan()
        self._faults = faults
        self.chaos = Chaos(lambda: self.members, self._servants, is_enabled=config.chaos.enabled)
        launcher = Launcher(config, secrets.token_hex(8), folder, self._channel, self.chaos.log)
        self._config = config
        self._limits = config.deadlines.limits
        self._widths = launcher.widths
        self._ledger = launcher.ledger()
        self._coordinator = launcher.coordinator(self._ledger)
        self.trainers: dict[TrainerId, ActorHandle] = {
            trainer: launcher.trainer(trainer, trainer_class, trainer_arguments) for trainer in launcher.trainers
        }
        self.shards: dict[ShardId, ActorHandle] = {shard: launcher.shard(shard, model) for shard in launcher.shards}
        self._processes: dict[Member, tuple[ProcessId, ...]] = {}
        self._supervisor: FleetSupervisor | None = None
        self.ledger = LedgerClient(self._ledger, writer="driver", ledger_s=self._limits.ledger_s)

    @property
    def members(self) -> dict[Member, ActorHandle]:
        members: dict[Member, ActorHandle] = {}
        for group in (self.trainers, self.shards):
            members.update(group.items())
        return members

    def wait_until_loaded(self, *, timeout_s: float, on_ready: OnReady | None = None) -> None:
        """Return when every member has loaded; then the ledger knows them and the sentinels watch them.

        Raises:
            ShardDied, TrainerLost: a member did not come up; the message says why.
        """
        asked = {handle.attend.remote(PingOrder(-1)): member for member, handle in self.members.items()}
        waiting, deadline = list(asked), time.monotonic() + timeout_s
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(str(asked[ref]) for ref in waiting)
                raise ShardDied(f"{late} did not load within {timeout_s:g} s", members=late)
            member = asked[ready[0]]
            self._processes[member] = _came_up(member, ready[0])
            if on_ready is not None:
                on_ready(member)
        self._wait_for_the_others(timeout_s)
        self.ledger.record(*(Registered(shard, self._widths[shard.index]) for shard in self.shards))
        watcher = LedgerClient(self._ledger, writer="supervisor", ledger_s=self._limits.ledger_s)
        self._supervisor = FleetSupervisor(watcher, self.shards)
        self._supervisor.start()
        self.chaos.arm(*self._faults)

    def refit(self, version: int, *, while_waiting: Callable[[], None] | None = None) -> RefitReport:
        """Push ``version`` to every shard that may take part; blocks until it landed.

        Any thread may call it. One that comes while a refit runs waits for its end; a newer version that comes
        meanwhile takes its place. Blocks at most twice ``driver_s``: the refit that runs, and this one.

        Raises:
            Superseded: a newer version was asked for before this one began.
            ElasticRefitError: the refit ended the run; the message is the sentence for a person.
        """
        world = len(self.trainers) + sum(self._widths[shard.index] for shard in self._joinable())
        task = self._coordinator.refit.options(name=f"refit[v{version}] world={world}").remote(version)
        limit_s = self._limits.driver_s(self._config.refit.max_recoveries_per_refit)
        try:
            return _wait(task, 2 * limit_s, while_waiting)
        except RayTaskError as error:
            own = error.cause  # Ray's wrapper has a type of its own, which nobody could match by name
            raise own if isinstance(own, ElasticRefitError) else error from None
        except (GetTimeoutError, RayActorError) as error:
            raise CoordinatorLost(f"refit v{version}: the coordinator is gone or silent: {error}") from None

    def serving(self) -> tuple[ShardId, ...]:
        return self.ledger.serving()

    def close(self) -> None:
        """End every actor of the run and prove it, frozen ones included. Idempotent; bounded."""
        if self._supervisor is not None:
            self._supervisor.stop()
        for handle in (*self.members.values(), *self._servants().values()):
            ray.kill(handle)
        self.chaos.close()
        node = ray.get_runtime_context().get_node_id()
        here = [process for ids in self._processes.values() for process in ids if process.node == node]
        left = kill_proved(here, timeout_s=_CLOSE_S)
        self._channel.close()
        if left:
            logger.error("processes_left", extra={"pids": [process.pid for process in left]})

    def _servants(self) -> dict[str, ActorHandle]:
        return {"ledger": self._ledger, "coordinator": self._coordinator}

    def _wait_for_the_others(self, timeout_s: float) -> None:
        """The ledger and the coordinator load as well; only then do the limits of their calls apply."""
        up = [self._ledger.absent.remote(), self._coordinator.enlist.remote(self.members)]
        try:
            ray.get(up, timeout=timeout_s)
        except (GetTimeoutError, RayActorError) as error:
            raise CoordinatorLost(f"ledger and coordinator did not come up: {error}") from None

    def _joinable(self) -> tuple[ShardId, ...]:
        absent = set(self.ledger.absent())
        return tuple(shard for shard in self.shards if shard not in absent)


def _came_up(member: Member, answer: ray.ObjectRef) -> tuple[ProcessId, ...]:
    try:
        pong = ray.get(answer)
    except ActorDiedError as error:
        why = _construction_error(error)
        if isinstance(member, TrainerId):
            raise TrainerLost(f"{member} did not come up: {why}", member=str(member)) from None
        raise ShardDied(f"{member} did not come up: {why}", member=str(member)) from None
    processes: tuple[ProcessId, ...] = pong.processes
    return processes


def _construction_error(error: ActorDiedError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else "its process ended"


def _wait(task: ray.ObjectRef, limit_s: float, while_waiting: Callable[[], None] | None) -> RefitReport:
    deadline = time.monotonic() + limit_s
    if while_waiting is not None:
        while not ray.wait([task], timeout=_LOOK_S)[0] and time.monotonic() < deadline:
            while_waiting()
    report: RefitReport = ray.get(task, timeout=max(0.0, deadline - time.monotonic()))
    return report
