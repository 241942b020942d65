"""Faults in a run of actors: the log of those that struck, how an actor is armed, and the driver's hold on both.

What must never happen here: a fault armed in a run whose configuration does not allow any.
"""

from __future__ import annotations

import dataclasses
import logging
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_refit.actors.loading import own_process
from elastic_refit.chaos import Fault, FaultRecord, Moment, Saboteur, aim_at_engine
from elastic_refit.core.ids import Member, ProcessId
from elastic_refit.errors import ConfigError
from elastic_refit.processes import signal_processes
from elastic_refit.rank_faults import RankSaboteurs

__all__ = ["Chaos", "FaultLog", "Sabotaged", "keep_in", "struck_in", "thaw"]

logger = logging.getLogger(__name__)

_CALL_S = 30.0
_DISABLED = "chaos.enabled is false: nothing can be armed in this run"


class FaultLog:
    """Keeps the record of every fault that struck. The driver owns it, so it outlives whoever is struck."""

    def __init__(self) -> None:
        self._records: list[FaultRecord] = []

    def keep(self, record: FaultRecord) -> None:
        """A fault is about to strike. It does when this has returned."""
        self._records.append(dataclasses.replace(record, at_s=time.monotonic()))
        logger.warning("fault_struck", extra={"fault": str(record.fault), "pid": record.pid})

    def records(self) -> tuple[FaultRecord, ...]:
        """In the order in which they were kept."""
        return tuple(self._records)


def keep_in(log: ActorHandle, record: FaultRecord) -> None:
    """Returns when ``log`` has the record; raises if it cannot be reached."""
    ray.get(log.keep.remote(record), timeout=_CALL_S)


def struck_in(log: ActorHandle | None, version: int) -> tuple[FaultRecord, ...]:
    """What struck in the refit of ``version``; nothing in a run without faults, or where the log cannot be reached."""
    if log is None:
        return ()
    try:
        records: tuple[FaultRecord, ...] = ray.get(log.records.remote(), timeout=_CALL_S)
    except (RayActorError, GetTimeoutError) as error:
        logger.error("fault_log_lost", extra={"error": type(error).__name__})
        return ()
    return tuple(record for record in records if record.fault.version == version)


class Sabotaged:
    """What a participant actor adds to be armed while it runs. ``_saboteur`` is None in a run without faults."""

    _saboteur: Saboteur | RankSaboteurs | None = None

    @ray.method(concurrency_group="control")
    def arm(self, *faults: Fault) -> None:
        """Have these strike too, in this member's process."""
        node = ray.get_runtime_context().get_node_id()
        self._require_saboteur().arm(*(aim_at_engine(fault, self._engine_pids(), node) for fault in faults))

    @ray.method(concurrency_group="control")
    def disarm(self) -> None:
        """Nothing that has not struck by now will; what a fault holds up goes on."""
        self._require_saboteur().disarm()

    @ray.method(concurrency_group="control")
    def idle(self, version: int, phase: str = "idle") -> None:
        """The driver says that no refit is in progress and ``version`` comes next: where such faults strike."""
        if self._saboteur is not None:
            self._saboteur.reach(Moment(version, phase))

    def _engine_pids(self) -> tuple[int, ...]:
        return ()

    def _require_saboteur(self) -> Saboteur | RankSaboteurs:
        if self._saboteur is None:
            raise ConfigError(_DISABLED, field="chaos.enabled")
        return self._saboteur


class Chaos:
    """The driver's side of one run: arms members and says what struck. Without ``is_enabled`` it refuses every fault.

    ``servants`` are the actors that are no members, ``ledger`` and ``coordinator``: a member strikes them.
    """

    def __init__(
        self,
        members: Callable[[], Mapping[Member, ActorHandle]],
        servants: Callable[[], Mapping[str, ActorHandle]],
        *,
        is_enabled: bool,
    ) -> None:
        self._members = members
        self._servants = servants
        self.log: ActorHandle | None = None
        """On the driver's node: its times are those of the coordinator's clock."""
        if is_enabled:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            self.log = ray.remote(num_cpus=0)(FaultLog).options(scheduling_strategy=here).remote()

    def arm(self, *faults: Fault) -> None:
        """Returns when every fault is armed.

        Raises:
            ConfigError: the run was not started for faults.
        """
        if not faults:
            return
        if self.log is None:
            raise ConfigError(_DISABLED, field="chaos.enabled")
        by_striker: dict[Member, list[Fault]] = defaultdict(list)
        for fault in faults:
            by_striker[fault.striker].append(self._aimed(fault))
        members = self._members()
        ray.get([members[member].arm.remote(*armed) for member, armed in by_striker.items()], timeout=_CALL_S)

    def disarm(self, *, timeout_s: float = 5.0) -> None:
        """Have every member strike no more, and go on; whoever is frozen costs ``timeout_s``."""
        if self.log is not None:
            told = [handle.disarm.remote() for handle in self._members().values()]
            ray.wait(told, num_returns=len(told), timeout=timeout_s)

    def records(self) -> tuple[FaultRecord, ...]:
        """Every fault of the run that struck, in the order of the records."""
        if self.log is None:
            return ()
        records: tuple[FaultRecord, ...] = ray.get(self.log.records.remote(), timeout=_CALL_S)
        return records

    def close(self) -> None:
        if self.log is not None:
            ray.kill(self.log)

    def _aimed(self, fault: Fault) -> Fault:
        """A fault against an actor that is no member, with the process to strike."""
        if not isinstance(fault.victim, str) or fault.targets:
            return fault
        process = ray.get(self._servants()[fault.victim].__ray_call__.remote(own_process), timeout=_CALL_S)
        return dataclasses.replace(fault, targets=(process,))


def thaw(processes: tuple[ProcessId, ...]) -> list[ProcessId]:
    """Let stopped processes of this node go on; returns those that are still there."""
    return signal_processes(processes, signal.SIGCONT)
