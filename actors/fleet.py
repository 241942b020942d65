"""The driver's fleet: makes every actor, because actors die with their maker, and takes every one of them down again.

What must never happen here: a process that outlives the run, a frozen one included.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError

from elastic_refit.actors.coordination import Coordination
from elastic_refit.actors.launch import Launcher
from elastic_refit.actors.ledger_client import LedgerClient
from elastic_refit.actors.loading import OnReady, own_process, wait_until_up
from elastic_refit.actors.reports import RefitReport
from elastic_refit.actors.sabotage import Chaos
from elastic_refit.actors.supervisor import FleetSupervisor
from elastic_refit.actors.trainer import TrainerActor
from elastic_refit.chaos import Fault
from elastic_refit.config import RunConfig
from elastic_refit.control.setup import ChannelPlan
from elastic_refit.core.events import Loaded, Registered, RestartFailed, Restarting
from elastic_refit.core.ids import Member, ProcessId, ShardId, TrainerId
from elastic_refit.errors import ElasticRefitError, LedgerLost, ShardError
from elastic_refit.processes import kill_proved

__all__ = ["Fleet"]

logger = logging.getLogger(__name__)

_CLOSE_S = 20.0


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
        self.ports = self._channel.address.beacon_port, self._channel.address.order_port
        self._faults = faults
        self.chaos = Chaos(lambda: self.members, self._servants, is_enabled=config.chaos.enabled)
        self._launcher = launcher = Launcher(config, secrets.token_hex(8), folder, self._channel, self.chaos.log)
        self._model = model
        self._config = config
        self._limits = config.deadlines.limits
        self._widths = launcher.widths
        self._ledger = launcher.ledger()
        self._ledger_process: ProcessId | None = None
        self.trainers: dict[TrainerId, ActorHandle] = {
            trainer: launcher.trainer(trainer, trainer_class, trainer_arguments) for trainer in launcher.trainers
        }
        self.shards: dict[ShardId, ActorHandle] = {shard: launcher.shard(shard, model) for shard in launcher.shards}
        self.processes: dict[Member, tuple[ProcessId, ...]] = {}
        self.coordination = Coordination(launcher, self._ledger, lambda: self.members, self.processes)
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
        self.processes.update(wait_until_up(self.members, timeout_s=timeout_s, on_ready=on_ready))
        self._wait_for_the_others(timeout_s)
        self.ledger.record(*(Registered(shard, self._widths[shard.index]) for shard in self.shards))
        watcher = LedgerClient(self._ledger, writer="supervisor", ledger_s=self._limits.ledger_s)
        self._supervisor = FleetSupervisor(watcher, self.shards)
        self._supervisor.start()
        self.chaos.arm(*self._faults)

    def replace(self, *lost: ShardId, timeout_s: float) -> tuple[ShardId, ...]:
        """Make a successor for each of these shards, which the ledger holds dead; blocks until they have loaded.

        They are STALE then: they join the next refit, and serve once it has landed. No refit may run meanwhile.

        Raises:
            ShardError: the ledger does not allow it, a predecessor lives on, or a successor did not come up.
        """
        successors = tuple(ShardId(shard.index, shard.incarnation + 1) for shard in lost)
        receipt = self.ledger.record(*map(Restarting, successors))
        made: dict[ShardId, ActorHandle] = {}
        try:
            if receipt.rejected:
                raise ShardError(f"the ledger lets nobody be replaced: {receipt.rejected[0].reason}")
            self._require_gone(lost)
            made.update((shard, self._launcher.shard(shard, self._model)) for shard in successors)
            for shard, processes in wait_until_up(made, timeout_s=timeout_s).items():
                self.processes[shard] = processes
            self._introduce(made)
        except ElasticRefitError as error:
            for handle in made.values():
                ray.kill(handle)
            begun = [s for s, ack in zip(successors, receipt.acks, strict=True) if ack.status == "applied"]
            self.ledger.record(*(RestartFailed(shard, str(error)) for shard in begun))
            raise
        self.ledger.record(*map(Loaded, successors))
        return successors

    def refit(self, version: int, *, while_waiting: Callable[[], None] | None = None) -> RefitReport:
        """Push ``version`` to every shard that may take part; blocks until it landed.

        Any thread may call it. One that comes while a refit runs waits for its end; a newer version that comes
        meanwhile takes its place. A coordinator that dies is followed by another, which pushes the version again.
        Blocks at most twice ``driver_s``: the refit that runs, and this one; and once more after such a death.

        Raises:
            Superseded: a newer version was asked for before this one began.
            CoordinatorLost: the coordinator fell silent, or died twice.
            ElasticRefitError: the refit ended the run; the message is the sentence for a person.
        """
        world = len(self.trainers) + sum(self._widths[shard.index] for shard in self._joinable())
        return self.coordination.refit(version, f"refit[v{version}] world={world}", while_waiting)

    def serving(self) -> tuple[ShardId, ...]:
        return self.ledger.serving()

    def close(self) -> None:
        """End every actor of the run and prove it, frozen ones included. Idempotent; bounded."""
        self.coordination.stop()
        if self._supervisor is not None:
            self._supervisor.stop()
        for handle in (*self.members.values(), *self._servants().values()):
            ray.kill(handle)
        self.chaos.close()
        servants = [each for each in (self._ledger_process, self.coordination.process) if each is not None]
        left = kill_proved([*self._here(self.processes), *servants], timeout_s=_CLOSE_S)
        self.coordination.close()
        self._channel.close()
        if left:
            logger.error("processes_left", extra={"pids": [process.pid for process in left]})

    def _require_gone(self, shards: Iterable[ShardId]) -> None:
        left = kill_proved(self._here(shards), timeout_s=self._limits.fence_s)
        if left:
            raise ShardError(f"a predecessor lives on: {', '.join(f'pid {process.pid}' for process in left)}")

    def _here(self, members: Iterable[Member]) -> list[ProcessId]:
        """Their processes on the driver's node; those elsewhere are not ours to signal."""
        node = ray.get_runtime_context().get_node_id()
        return [each for member in members for each in self.processes.get(member, ()) if each.node == node]

    def _introduce(self, made: Mapping[ShardId, ActorHandle]) -> None:
        """The coordinator calls the newcomers from the next refit on, and the supervisor watches them."""
        ends = {end.name: end.public_key for shard in made for end in self._launcher.ends(shard)}
        self.coordination.introduce(made, timeout_s=self._limits.ledger_s, ends=ends)
        seats = {shard.index for shard in made}
        self.shards = {shard: handle for shard, handle in self.shards.items() if shard.index not in seats}
        self.shards.update(made)
        if self._supervisor is not None:
            self._supervisor.watch(made)

    def _servants(self) -> dict[str, ActorHandle]:
        return {"ledger": self._ledger, "coordinator": self.coordination.handle}

    def _wait_for_the_others(self, timeout_s: float) -> None:
        """The ledger and the coordinator load as well; only then do the limits of their calls apply."""
        try:
            self._ledger_process = ray.get(self._ledger.__ray_call__.remote(own_process), timeout=timeout_s)
        except (GetTimeoutError, RayActorError) as error:
            raise LedgerLost(f"the ledger did not come up: {error}") from None
        self.coordination.introduce(self.members, timeout_s=timeout_s)

    def _joinable(self) -> tuple[ShardId, ...]:
        absent = set(self.ledger.absent())
        return tuple(shard for shard in self.shards if shard not in absent)
