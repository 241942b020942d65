"""Waiting for actors: to come up, or in one sentence why they did not; and for a call, while something else is done."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError

from elastic_refit.core.ids import Member, ProcessId, TrainerId
from elastic_refit.core.messages import PingOrder
from elastic_refit.errors import ShardDied, TrainerLost
from elastic_refit.processes import identify

__all__ = ["OnReady", "own_process", "wait_for", "wait_until_up"]

M = TypeVar("M", bound=Member)
OnReady = Callable[[Member], None]

_LOOK_S = 0.1


def wait_until_up(
    members: Mapping[M, ActorHandle], *, timeout_s: float, on_ready: OnReady | None = None
) -> dict[M, tuple[ProcessId, ...]]:
    """Return the processes of every member once all of them have loaded.

    Raises:
        ShardDied, TrainerLost: a member did not come up; the message says why.
    """
    asked = {handle.attend.remote(PingOrder(-1)): member for member, handle in members.items()}
    processes: dict[M, tuple[ProcessId, ...]] = {}
    waiting, deadline = list(asked), time.monotonic() + timeout_s
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(str(asked[ref]) for ref in waiting)
            raise ShardDied(f"{late} did not load within {timeout_s:g} s", members=late)
        member = asked[ready[0]]
        processes[member] = _came_up(member, ready[0])
        if on_ready is not None:
            on_ready(member)
    return processes


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


def wait_for(task: ray.ObjectRef, limit_s: float, while_waiting: Callable[[], None] | None) -> Any:
    """The answer of ``task``, of whatever type; ``while_waiting`` is called every tenth of a second until it comes.

    Raises:
        GetTimeoutError: it did not come within ``limit_s``.
    """
    deadline = time.monotonic() + limit_s
    if while_waiting is not None:
        while not ray.wait([task], timeout=_LOOK_S)[0] and time.monotonic() < deadline:
            while_waiting()
    return ray.get(task, timeout=max(0.0, deadline - time.monotonic()))


def own_process(_: object) -> ProcessId:
    """For ``handle.__ray_call__``: which process an actor is."""
    return identify(os.getpid(), ray.get_runtime_context().get_node_id())
