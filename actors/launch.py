"""How the driver makes each actor of a run: options, names and arguments in one place."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_refit.actors.coordinator import RefitCoordinator, coordinator_options
from elastic_refit.actors.ledger import ledger_actor
from elastic_refit.actors.setup import ParticipantSetup
from elastic_refit.actors.trainer import TrainerActor, trainer_options
from elastic_refit.actors.vllm_shard import VllmShardActor, shard_options
from elastic_refit.config import RunConfig
from elastic_refit.control.setup import ChannelPlan, EndSetup
from elastic_refit.core.ids import Member, ShardId, TrainerId
from elastic_refit.core.ledger_state import LedgerPolicy
from elastic_refit.core.refit_state import RefitPolicy
from elastic_refit.engines.base import Hosting
from elastic_refit.engines.registry import engine_environment
from elastic_refit.errors import ConfigError
from elastic_refit.ranks import rank_name
from elastic_refit.transports.base import Packing
from elastic_refit.transports.registry import load_transport

__all__ = ["Launcher", "require_cpus"]

_FREE_CPUS_S = 15.0
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Launcher:
    """Starts actors of one run; none of its methods waits for them. ``folder`` is on the driver's node."""

    config: RunConfig
    run_id: str
    folder: Path
    channel: ChannelPlan
    fault_log: ActorHandle | None = None

    @property
    def widths(self) -> tuple[int, ...]:
        """Ranks of each shard, by shard index."""
        return tuple(self.config.fleet.widths or [1] * self.config.fleet.shards)

    @property
    def trainers(self) -> tuple[TrainerId, ...]:
        return tuple(TrainerId(rank) for rank in range(self.config.fleet.trainers))

    @property
    def shards(self) -> tuple[ShardId, ...]:
        """Those that the run begins with."""
        return tuple(ShardId(index) for index in range(self.config.fleet.shards))

    @property
    def incidents(self) -> str:
        return str(self.folder / "incidents")

    def ledger(self) -> ActorHandle:
        policy = LedgerPolicy(min_healthy=self.config.fleet.min_healthy, **self.config.ledger.model_dump())
        return ledger_actor(self.folder / "ledger.journal", run_id=self.run_id, policy=policy)

    def coordinator(self, ledger: ActorHandle, incarnation: int = 0) -> ActorHandle:
        """On the driver's node, where the incidents are kept."""
        policy = RefitPolicy(
            self.config.deadlines.limits,
            max_recoveries=self.config.refit.max_recoveries_per_refit,
            min_healthy=self.config.fleet.min_healthy,
            commit=self.config.refit.commit,
            has_links=load_transport(self.config.refit.transport).has_links,
        )
        for trainer in self.trainers:
            self.ends(trainer)
        for shard in self.shards:
            self.ends(shard)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(**coordinator_options())(RefitCoordinator)
        return actor.options(name=f"coordinator {self.run_id} {incarnation}", scheduling_strategy=here).remote(
            policy,
            ledger,
            self.channel.host(incarnation),
            widths=self.widths,
            incident_folder=self.incidents,
            fault_log=self.fault_log,
        )

    def trainer(self, trainer: TrainerId, kind: type[TrainerActor], arguments: Mapping[str, Any]) -> ActorHandle:
        actor = ray.remote(**trainer_options(num_cpus=self.config.ray.cpus_per_trainer))(kind)
        return actor.options(name=f"{trainer} {self.run_id}").remote(self._setup(trainer), **arguments)

    def shard(self, shard: ShardId, model: str) -> ActorHandle:
        engine = self.config.engine
        actor = ray.remote(**shard_options(num_cpus=self.config.ray.cpus_per_shard))(VllmShardActor)
        hosting = Hosting(self.widths[shard.index], engine.process, engine.pause)
        environment = {"env_vars": engine_environment(engine.kind, hosting)}
        return actor.options(name=f"{shard} {self.run_id}", runtime_env=environment).remote(
            self._setup(shard),
            engine=engine.kind,
            model=model,
            engine_options=engine.options,
            hosting=hosting,
        )

    def _setup(self, member: Member) -> ParticipantSetup:
        refit = self.config.refit
        return ParticipantSetup(
            member,
            self.config.deadlines.limits,
            Packing(refit.bucket_bytes, refit.digest),
            control=self.ends(member),
            stacks_folder=self.incidents,
            transport=refit.transport,
            fault_log=self.fault_log,
        )

    def ends(self, member: Member) -> tuple[EndSetup, ...]:
        """The ends of the control channel of all ranks of ``member``."""
        width = self.widths[member.index] if isinstance(member, ShardId) else 1
        return tuple(self.channel.end(rank_name(member, rank)) for rank in range(width))


def require_cpus(config: RunConfig) -> None:
    """Raises ConfigError if the cluster has too few free CPUs for the fleet; waits for a cluster that is still busy.

    A driver that has just connected sees no resources at all for a moment.
    """
    needed = config.fleet.trainers * config.ray.cpus_per_trainer + config.fleet.shards * config.ray.cpus_per_shard
    deadline = time.monotonic() + _FREE_CPUS_S
    while (free := ray.available_resources().get("CPU", 0.0)) < needed:
        owned = ray.cluster_resources().get("CPU", 0.0)
        if 0 < owned < needed or time.monotonic() >= deadline:
            raise ConfigError(
                f"ray: {config.fleet.trainers} trainers and {config.fleet.shards} shards need {needed:g} CPUs and the "
                f"cluster has {free:g} of {owned:g} free; lower ray.cpus_per_shard and ray.cpus_per_trainer, or start "
                "fewer",
                field="ray.num_cpus",
            )
        time.sleep(_LOOK_S)
