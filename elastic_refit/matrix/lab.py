"""One fleet that cells of one shape run on: brought up, made ready for the next cell, and taken down.

After a cell only what died is made anew. What must never happen here: a cell that runs on a fleet that the one before
left in another state than a new one is in.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from elastic_refit.actors.fleet import Fleet
from elastic_refit.actors.loading import own_process
from elastic_refit.actors.reports import RefitReport
from elastic_refit.actors.sabotage import thaw
from elastic_refit.core.events import ActorDied, RequestFailed, RequestSucceeded, RestartFailed, Restarting, Retired
from elastic_refit.core.ids import Member, ProcessId, ShardId
from elastic_refit.core.ledger_queries import record_of
from elastic_refit.core.ledger_state import LedgerState
from elastic_refit.core.ledger_table import ShardState
from elastic_refit.demo.tiny_model import make_tiny_model
from elastic_refit.engines.plain_lm import PlainShape, write_plain_checkpoint
from elastic_refit.errors import ElasticRefitError
from elastic_refit.matrix.cells import Cell
from elastic_refit.matrix.shape import Shape
from elastic_refit.matrix.trainer import LabTrainer
from elastic_refit.processes import kill_proved, living, signal_processes
from elastic_refit.shared_memory import mapped_segments

__all__ = ["Lab", "LabUnclean"]

_LOAD_S = {"torch": 120.0, "vllm": 300.0}
_CALL_S = 20.0
_GONE_S = 10.0
_LOOK_S = 0.02
_LAYERS = 9
_KEPT_TIMES = 9
_ABSENT = (ShardState.DEAD, ShardState.RESTARTING)


class LabUnclean(Exception):
    """The fleet is not as a new one is: close it, and make another."""


class Lab:
    """A fleet, and how far its versions have come. One thread uses it."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        """Start everybody, without waiting for any."""
        self.shape = shape
        self.incidents = folder / "incidents"
        model = folder / "model"
        self.config = shape.config(model_bytes=_make_model(shape, model))
        self.limits = self.config.deadlines.limits
        self.version = 0
        self.num_buckets = 0
        self.ever: set[ProcessId] = set()
        """Every process that a member of this fleet has had."""
        self.segments: set[str] = set()
        """Shared memory that they had mapped."""
        self._times: list[float] = []
        self._is_built = False
        self.fleet = Fleet(
            self.config,
            trainer_class=LabTrainer,
            trainer_arguments={"model": str(model), "secret": secrets.token_bytes(16) if shape.gathering else None},
            model=str(model),
            folder=folder,
        )

    def bring_up(self) -> None:
        """Blocks until everybody has loaded."""
        self.fleet.wait_until_loaded(timeout_s=_LOAD_S[self.shape.engine])
        if self.shape.gathering:
            self.tell_trainers("meet", self.tell_trainers("gathers_at"))
        self._note_processes()

    # -- between cells

    def make_ready(self, cell: Cell) -> None:
        """Everybody is there and serves the last version, unless ``cell`` is cold: then nobody is in a group.

        Raises:
            LabUnclean: that cannot be had of this fleet.
        """
        try:
            self._replace_the_absent()
            if cell.cold:
                self._break_up(cell)
            else:
                self._warm_up()
            self._set_state(cell)
        except (ElasticRefitError, RayActorError, GetTimeoutError) as error:
            raise LabUnclean(f"{type(error).__name__}: {error}") from error

    def clear_up(self) -> None:
        """Nothing is armed and nothing is frozen any more; who is dead is dead whole."""
        thaw(tuple(living(self.ever - self._own_processes(self._absent()))))
        kill_proved(living(self._own_processes(self._absent())), timeout_s=_GONE_S)
        self.fleet.chaos.disarm()
        state = self.fleet.ledger.state()
        suspects = [record.id for record in state.shards.values() if record.request_failures]
        if suspects:
            self.fleet.ledger.record(*map(RequestSucceeded, suspects))

    def close(self) -> list[str]:
        """End the fleet; returns what of it is still there."""
        self._note_processes()
        self.fleet.close()
        deadline = time.monotonic() + _GONE_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return left

    # -- refits

    def refit(self, *, while_waiting: Callable[[], None] | None = None) -> RefitReport:
        """Push weights that nobody has had before."""
        self.version += 1
        self.tell_trainers("advance", self.version)
        self._is_built = False
        report = self.fleet.refit(self.version, while_waiting=while_waiting)
        self._is_built = True
        self.num_buckets = report.num_buckets
        return report

    @property
    def refit_s(self) -> float | None:
        """A refit in which nothing happened, in seconds."""
        return median(self._times) if self._times else None

    def tell_trainers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every trainer; returns what they answer, by rank."""
        calls = [getattr(handle, method).remote(*arguments) for handle in self.fleet.trainers.values()]
        answers: list[Any] = ray.get(calls, timeout=_CALL_S)
        return answers

    def shard(self, index: int) -> ShardId:
        """Who sits in the seat now."""
        return next(shard for shard in self.fleet.shards if shard.index == index)

    def processes(self, *members: Member) -> tuple[ProcessId, ...]:
        return tuple(process for member in members for process in self.fleet.processes[member])

    def servants(self) -> set[ProcessId]:
        """The processes of ledger and coordinator that a fault was aimed at."""
        records = self.fleet.chaos.records()
        return {each for record in records if isinstance(record.fault.victim, str) for each in record.fault.targets}

    def stop_agents(self) -> tuple[ProcessId, ...]:
        """Have no node answer: its agent is frozen, so nobody there can be ended. Returns whom to thaw afterwards."""
        agents = self.fleet.coordination.agents.values()
        processes = tuple(ray.get([agent.__ray_call__.remote(own_process) for agent in agents], timeout=_CALL_S))
        signal_processes(processes, signal.SIGSTOP)
        return processes

    def state(self) -> LedgerState:
        return self.fleet.ledger.state()

    # -- inside

    def _left(self) -> list[str]:
        processes = [f"pid {process.pid} of a fleet that was closed" for process in living(self.ever)]
        return processes + [f"port {port} of a fleet that was closed" for port in _listening(self.fleet.ports)]

    def _replace_the_absent(self) -> None:
        state = self.state()
        begun = [record.id for record in state.shards.values() if record.state is ShardState.RESTARTING]
        if begun:
            self.fleet.ledger.record(*(RestartFailed(shard, "nobody had begun to make it") for shard in begun))
        absent = self._absent()
        if absent:
            self.fleet.replace(*absent, timeout_s=_LOAD_S[self.shape.engine])
            self._is_built = False
            self._note_processes()

    def _absent(self) -> list[ShardId]:
        state = self.state()
        if any(record.state is ShardState.RETIRED for record in state.shards.values()):
            raise LabUnclean("a seat was retired, and is not used again")
        return sorted(record.id for record in state.shards.values() if record.state in _ABSENT)

    def _break_up(self, cell: Cell) -> None:
        """A group that stands is no longer one once a member of it was replaced."""
        if self._is_built:
            self._lose(self.shard(cell.victim))
            self._replace_the_absent()

    def _warm_up(self) -> None:
        """One refit without a fault; another one if the first had to build the group, to know what a refit takes."""
        report = self.refit()
        if report.rebuilt:
            report = self.refit()
        if report.incident is not None:
            raise LabUnclean(f"a refit without a fault had an incident: {report.incident.sentence}")
        self._times = [*self._times, report.seconds][-_KEPT_TIMES:]
        unwell = [record.id for record in self.state().shards.values() if record.state is not ShardState.HEALTHY]
        if unwell:
            raise LabUnclean(f"{', '.join(map(str, unwell))} does not serve after a refit without a fault")

    def _set_state(self, cell: Cell) -> None:
        victim = self.shard(cell.victim)
        match cell.state:
            case "SUSPECT":
                self._suspect([cell.victim])
            case "STALE":
                self._lose(victim)
                self._replace_the_absent()
            case "DEAD":
                self._lose(victim)
            case "RESTARTING":
                self._lose(victim)
                self.fleet.ledger.record(Restarting(ShardId(victim.index, victim.incarnation + 1)))
            case "RETIRED":
                self.fleet.ledger.record(Retired(victim, "the cell asks for it"))
            case _:
                pass
        found = self._state_of(victim).name
        if found != cell.state and not cell.cold:
            raise LabUnclean(f"{victim} is {found} and the cell wants it {cell.state}")
        self._suspect(cell.suspects)

    def _suspect(self, indices: Sequence[int]) -> None:
        failures = [RequestFailed(self.shard(index), "shard", "a request failed on purpose") for index in indices]
        if failures:
            self.fleet.ledger.record(*failures)

    def _lose(self, shard: ShardId) -> None:
        """The shard's processes are gone, and the ledger knows."""
        kill_proved(self.processes(shard), timeout_s=_GONE_S)
        deadline = time.monotonic() + _GONE_S
        while self._state_of(shard) is not ShardState.DEAD:
            if time.monotonic() > deadline:
                self.fleet.ledger.record(ActorDied(shard, "its processes were ended"))
            time.sleep(_LOOK_S)
        self._is_built = False

    def _state_of(self, shard: ShardId) -> ShardState:
        record = record_of(self.state(), shard.index)
        assert record is not None, "every seat of a fleet is known to its ledger"
        return record.state

    def _own_processes(self, members: Sequence[Member]) -> set[ProcessId]:
        return {process for member in members for process in self.fleet.processes.get(member, ())}

    def _note_processes(self) -> None:
        self.ever.update(process for each in self.fleet.processes.values() for process in each)
        self.segments.update(mapped_segments(living(self.ever)))


def _make_model(shape: Shape, folder: Path) -> int:
    """A model that fills the buckets of a cell; returns its bytes."""
    if shape.engine == "vllm":
        return make_tiny_model(folder, family="llama", seed=0, num_layers=_LAYERS).size_bytes
    return write_plain_checkpoint(folder, PlainShape(num_hidden_layers=_LAYERS), seed=0)


def _listening(ports: Sequence[int]) -> list[int]:
    listeners = (each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
    return sorted({each.laddr[1] for each in listeners if each.laddr} & set(ports))
