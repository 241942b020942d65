"""The agent of one node: ends the processes of who is condemned there, and proves that they are gone.

The driver makes one for each node that members run on, and owns them; the coordinator calls them. What must never
happen here: "gone" said of a process that nobody has seen end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_refit.core.ids import Member, ProcessId
from elastic_refit.core.messages import Fenced, FenceOrder
from elastic_refit.processes import exit_when_orphaned, living
from elastic_refit.shared_memory import mapped_segments, remove_abandoned
from elastic_refit.stacks import asked_path, end_with_stacks

__all__ = ["Fences", "NodeAgent", "by_node", "node_agent"]

logger = logging.getLogger(__name__)

_AT_ONCE = 16
"""Culprits that one agent may be ending at the same time."""


class NodeAgent:
    """Lives on the node that it acts on. Needs no CPU, and comes back when it dies.

    Several threads call it.
    """

    def __init__(self) -> None:
        self._segments: dict[tuple[ProcessId, ...], set[str]] = {}
        exit_when_orphaned()

    def fence(self, processes: tuple[ProcessId, ...], stacks: Path, timeout_s: float) -> Fenced:
        """Ask whoever of them runs for its stacks, kill all of them, and wait until each is gone."""
        left = end_with_stacks(processes, stacks, timeout_s=timeout_s)
        return Fenced("by_epoch" if left else "gone")

    def note(self, processes: tuple[ProcessId, ...]) -> None:
        """Remember what shared memory these have mapped, which nobody removes when they are all killed at once."""
        self.tidy()
        self._segments[processes] = mapped_segments(processes)

    def tidy(self) -> None:
        """Remove the shared memory of those who are gone whole."""
        for processes in [each for each in tuple(self._segments) if not living(each)]:
            remove_abandoned(self._segments.pop(processes, set()))


def node_agent(node: str) -> ActorHandle:
    """Start the agent of ``node``, without waiting for it; it dies with the caller."""
    pinned = NodeAffinitySchedulingStrategy(node, soft=False)
    made = ray.remote(NodeAgent).options(
        num_cpus=0, max_concurrency=_AT_ONCE, max_restarts=-1, scheduling_strategy=pinned
    )
    handle: ActorHandle = made.remote()
    return handle


def by_node(processes: Iterable[ProcessId]) -> dict[str, tuple[ProcessId, ...]]:
    """The same processes, by the node that each is on."""
    nodes: dict[str, tuple[ProcessId, ...]] = {}
    for process in processes:
        nodes[process.node] = (*nodes.get(process.node, ()), process)
    return nodes


class Fences:
    """Has condemned members ended by the agents of every node that they have processes on; for one refit."""

    def __init__(
        self, agents: Mapping[str, ActorHandle], members: Mapping[Member, ActorHandle], stacks_folder: str
    ) -> None:
        self._agents = agents
        self._members = members
        self._stacks_folder = stacks_folder
        self._waiting: dict[Member, set[ray.ObjectRef]] = {}
        self._is_proved: dict[Member, bool] = {}

    def begin(self, member: Member, order: FenceOrder, *, timeout_s: float) -> tuple[ray.ObjectRef, ...]:
        """Returns the calls of which each is to be given to :meth:`take` when it ends; none if nobody can act."""
        logger.warning("member_condemned", extra={"member": str(member), "why": order.why})
        nodes = by_node(order.processes)
        stacks = asked_path(self._stacks_folder, member)
        calls = tuple(
            self._agents[node].fence.remote(processes, stacks, timeout_s)
            for node, processes in nodes.items()
            if node in self._agents
        )
        self._waiting[member] = set(calls)
        self._is_proved[member] = bool(nodes) and nodes.keys() <= self._agents.keys()
        return calls

    def take(self, member: Member, call: ray.ObjectRef) -> Fenced | None:
        """An agent has answered, or cannot be reached; None as long as another one has not."""
        try:
            answer: Fenced = ray.get(call)
            is_gone = answer.how == "gone"
        except RayError:
            is_gone = False
        self._waiting[member].discard(call)
        self._is_proved[member] &= is_gone
        return None if self._waiting[member] else self.result(member)

    def result(self, member: Member) -> Fenced:
        """``gone`` if every process was seen to end; else only its epoch keeps the member out."""
        fenced = Fenced(self._how(member))
        if fenced.how == "gone":
            ray.kill(self._members[member])  # its processes are gone: now Ray knows too
            for agent in self._agents.values():
                agent.tidy.remote()  # looks at every process of its node, so nobody waits for it
        else:
            logger.error("fenced_by_epoch_only", extra={"member": str(member)})
        return fenced

    def how(self) -> dict[str, str]:
        """How each member was fenced, by its name, for the incident."""
        return {str(member): self._how(member) for member in self._waiting}

    def _how(self, member: Member) -> str:
        return "gone" if self._is_proved[member] and not self._waiting[member] else "by_epoch"
