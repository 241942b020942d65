"""The driver's hold on the coordinator: one that dies is followed by another, one that falls silent ends the run.

What must never happen here: two coordinators at work at a time; a driver that waits for one that is frozen for as long
as a refit might take.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from elastic_refit.actors.launch import Launcher
from elastic_refit.actors.loading import own_process, wait_for
from elastic_refit.actors.node_agent import by_node, node_agent
from elastic_refit.actors.reports import RefitReport
from elastic_refit.core.ids import Member, ProcessId
from elastic_refit.errors import CoordinatorLost, ElasticRefitError
from elastic_refit.processes import kill_proved

__all__ = ["Coordination"]

logger = logging.getLogger(__name__)

_LEDGER_CALLS = 3
"""Of a takeover."""
_TIDY_S = 2.0
_BEAT_S = 1.0
"""Between two questions: each is a row in the dashboard's table of tasks."""


class Coordination:
    """The coordinators of one run, one at a time, and the agents that they have on every node. Any thread may call.

    ``members`` and ``processes`` say who takes part now, and of what each consists.
    """

    def __init__(
        self,
        launcher: Launcher,
        ledger: ActorHandle,
        members: Callable[[], Mapping[Member, ActorHandle]],
        processes: Mapping[Member, tuple[ProcessId, ...]],
    ) -> None:
        self._make: Callable[[int], ActorHandle] = lambda incarnation: launcher.coordinator(ledger, incarnation)
        self._limits = launcher.config.deadlines.limits
        self._max_recoveries = launcher.config.refit.max_recoveries_per_refit
        self._members = members
        self._processes = processes
        self._incarnation = 0
        self._lock = threading.Lock()
        self._is_closing = False
        self.handle = self._make(0)
        self.agents: dict[str, ActorHandle] = {}
        """By node."""
        self.process: ProcessId | None = None
        """That of the coordinator, once it is up."""

    def introduce(
        self, made: Mapping[Any, ActorHandle], *, timeout_s: float, ends: Mapping[str, bytes] | None = None
    ) -> None:
        """Have the coordinator call these from the next refit on; blocks until it, and an agent for each, is up.

        Raises:
            CoordinatorLost: it did not answer in time.
        """
        consist = {member: by_node(self._processes.get(member, ())) for member in made}
        for node in sorted({node for nodes in consist.values() for node in nodes} - self.agents.keys()):
            self.agents[node] = node_agent(node)
        up = [self.agents[node].note.remote(each) for nodes in consist.values() for node, each in nodes.items()]
        self._ask([*up, self.handle.enlist.remote(dict(made), self.agents, ends=ends)], timeout_s)
        if self.process is None:
            (self.process,) = self._ask([self.handle.__ray_call__.remote(own_process)], timeout_s)

    def stop(self) -> None:
        """From here on nobody follows a coordinator that dies; its end is the fleet's to see to."""
        self._is_closing = True

    def close(self) -> None:
        """End the agents, which first remove what members that are gone have left in shared memory."""
        tidying = [agent.tidy.remote() for agent in self.agents.values()]
        if tidying:
            ray.wait(tidying, num_returns=len(tidying), timeout=_TIDY_S)
        for agent in self.agents.values():
            ray.kill(agent)

    def refit(self, version: int, name: str, while_waiting: Callable[[], None] | None) -> RefitReport:
        """Push ``version``; when the coordinator dies meanwhile, another one closes what is open and pushes it again.

        Raises:
            CoordinatorLost: the second one died too, or one has not answered for ``coordinator_restart_s``.
            ElasticRefitError: the refit ended the run.
        """
        handle = self.handle
        try:
            return self._push(handle, version, name, while_waiting)
        except RayActorError as error:
            logger.error("coordinator_died", extra={"version": version, "reason": str(error).splitlines()[0]})
            self._follow(handle)
        try:
            return self._push(self.handle, version, name, while_waiting)
        except RayActorError as error:
            raise CoordinatorLost(f"refit v{version}: a second coordinator died: {error}") from None

    def _push(
        self, handle: ActorHandle, version: int, name: str, while_waiting: Callable[[], None] | None
    ) -> RefitReport:
        task = handle.refit.options(name=name).remote(version)
        pulse = _Pulse(handle, f"refit v{version}", self._limits.coordinator_restart_s)

        def look() -> None:
            pulse.look()
            if while_waiting is not None:
                while_waiting()

        limit_s = 2 * self._limits.driver_s(self._max_recoveries)
        try:
            report: RefitReport = wait_for(task, limit_s, look)
            return report
        except RayTaskError as error:
            raise _own(error) from None
        except GetTimeoutError:
            raise CoordinatorLost(f"refit v{version}: no end after {limit_s:g} s, twice driver_s") from None

    def _follow(self, died: ActorHandle) -> None:
        """Put another coordinator in the place of ``died``, unless another thread has done so."""
        with self._lock:
            if self.handle is not died:
                return
            if self._is_closing:
                raise CoordinatorLost("the run is being closed")
            if self.process is not None:
                kill_proved([self.process], timeout_s=self._limits.fence_s)
            self._incarnation += 1
            self.handle, self.process = self._make(self._incarnation), None
            limit_s = self._limits.settle_s + _LEDGER_CALLS * self._limits.ledger_s
            try:
                self.introduce(self._members(), timeout_s=self._limits.coordinator_restart_s)
                self._ask([self.handle.take_over.remote(dict(self._processes))], limit_s)
            except BaseException:
                ray.kill(self.handle)  # one that has not taken over knows no epoch: nobody may call it
                raise
            logger.warning("coordinator_followed", extra={"incarnation": self._incarnation})

    def _ask(self, calls: list[ray.ObjectRef], timeout_s: float) -> list[Any]:
        try:
            answers: list[Any] = ray.get(calls, timeout=timeout_s)
            return answers
        except RayTaskError as error:
            raise _own(error) from None
        except (GetTimeoutError, RayActorError) as error:
            raise CoordinatorLost(f"the coordinator is gone or silent: {error}") from None


class _Pulse:
    """Asks a coordinator again and again whether it is there, and raises CoordinatorLost once it has been silent."""

    def __init__(self, handle: ActorHandle, what: str, limit_s: float) -> None:
        self._handle = handle
        self._what = what
        self._limit_s = limit_s
        self._asked_s = time.monotonic()
        self._asked: ray.ObjectRef | None = None

    def look(self) -> None:
        """Does not block. The coordinator's death is not for this to report: the refit's own call does."""
        if self._asked is not None and not ray.wait([self._asked], timeout=0)[0]:
            silent_s = time.monotonic() - self._asked_s
            if silent_s >= self._limit_s:
                raise CoordinatorLost(f"{self._what}: the coordinator has not answered for {silent_s:.1f} s")
            return
        if self._asked is None or time.monotonic() - self._asked_s >= _BEAT_S:
            self._asked, self._asked_s = self._handle.alive.remote(), time.monotonic()


def _own(error: RayTaskError) -> Exception:
    """Ray's wrapper has a type of its own, which nobody could match by name."""
    return error.cause if isinstance(error.cause, ElasticRefitError) else error
