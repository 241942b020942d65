"""Fencing by agents, with real processes: gone is what was seen to end, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from elastic_refit.actors.loading import own_process
from elastic_refit.actors.node_agent import Fences, node_agent
from elastic_refit.core.ids import Member, ProcessId, ShardId
from elastic_refit.core.messages import Fenced, FenceOrder
from elastic_refit.processes import identify
from tests.unit.test_shared_memory import mapper
from tests.waiting import wait_until, wait_while

WAIT_S = 60.0
SHARD = ShardId(0)
Culprit = tuple[subprocess.Popen[bytes], ProcessId]


class Shard:
    """Stands for the shard's actor, which Ray is told to end as well."""

    def ready(self) -> None:
        """Up."""


@pytest.fixture(scope="module")
def node(ray_cluster: None) -> str:
    return str(ray.get_runtime_context().get_node_id())


@pytest.fixture
def agent(node: str) -> Iterator[ActorHandle]:
    agent = node_agent(node)
    ray.get(agent.tidy.remote(), timeout=WAIT_S)
    yield agent
    ray.kill(agent)


@pytest.fixture
def member(node: str) -> Iterator[ActorHandle]:
    remote: Any = ray.remote  # its stubs do not know what a class becomes
    handle = remote(num_cpus=0)(Shard).remote()
    ray.get(handle.ready.remote(), timeout=WAIT_S)
    yield handle
    ray.kill(handle)


@pytest.fixture
def culprit(node: str) -> Iterator[Culprit]:
    """A stopped process, as one of the shard's."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process.send_signal(signal.SIGSTOP)
    yield process, identify(process.pid, node)
    process.kill()
    process.wait()


def answers(agent: ActorHandle) -> bool:
    """False for one that is just coming back."""
    try:
        ray.get(agent.tidy.remote(), timeout=WAIT_S)
    except RayActorError:
        return False
    return True


@pytest.fixture
def fences(node: str, agent: ActorHandle, member: ActorHandle, tmp_path: Path) -> Callable[[], Fences]:
    """Those of one refit; the shard has an agent on this node alone."""
    members: dict[Member, ActorHandle] = {SHARD: member}
    return lambda: Fences({node: agent}, members, str(tmp_path))


def fence(made: Fences, *processes: ProcessId, timeout_s: float = WAIT_S) -> list[Fenced | None]:
    """What each call of the fence led to, in the order in which they ended."""
    calls = made.begin(SHARD, FenceOrder(1, processes, "it is silent"), timeout_s=timeout_s)
    answers = []
    waiting = list(calls)
    while waiting:
        ended, waiting = ray.wait(waiting, num_returns=1, timeout=WAIT_S)
        answers += [made.take(SHARD, each) for each in ended]
    return answers


def test_a_stopped_process_is_gone_when_the_agent_says_so(fences: Callable[[], Fences], culprit: Culprit) -> None:
    process, identity = culprit
    made = fences()
    assert fence(made, identity) == [Fenced("gone")]
    assert process.wait(timeout=WAIT_S) == -signal.SIGKILL
    assert made.how() == {"shard[0]": "gone"}


def test_a_process_on_a_node_without_an_agent_is_fenced_by_its_epoch_alone(
    fences: Callable[[], Fences], member: ActorHandle, culprit: Culprit
) -> None:
    process, identity = culprit
    elsewhere = ProcessId("another node", 1, 1, 1)
    made = fences()
    assert fence(made, identity, elsewhere) == [Fenced("by_epoch")]
    assert process.wait(timeout=WAIT_S) == -signal.SIGKILL, "what can be reached is ended all the same"
    ray.get(member.ready.remote(), timeout=WAIT_S)


def test_who_never_said_what_it_consists_of_is_fenced_by_its_epoch_alone(
    fences: Callable[[], Fences],
) -> None:
    made = fences()
    assert fence(made) == []
    assert made.result(SHARD) == Fenced("by_epoch")


def test_an_agent_that_does_not_answer_has_proved_nothing_and_one_that_dies_comes_back(
    fences: Callable[[], Fences], agent: ActorHandle, culprit: Culprit
) -> None:
    process, identity = culprit
    asked: Any = agent.__ray_call__.remote(own_process)
    frozen: ProcessId = ray.get(asked, timeout=WAIT_S)
    os.kill(frozen.pid, signal.SIGSTOP)
    made = fences()
    (call,) = made.begin(SHARD, FenceOrder(1, (identity,), "it is silent"), timeout_s=WAIT_S)
    assert made.how() == {"shard[0]": "by_epoch"}
    assert process.poll() is None
    os.kill(frozen.pid, signal.SIGKILL)
    ray.wait([call], timeout=WAIT_S)
    assert made.take(SHARD, call) == Fenced("by_epoch")
    wait_until(lambda: answers(agent), WAIT_S)
    assert fence(fences(), identity) == [Fenced("gone")]


def test_shared_memory_of_a_member_that_was_killed_whole_is_removed_and_that_of_a_living_one_is_not(
    fences: Callable[[], Fences], node: str, agent: ActorHandle, culprit: Culprit
) -> None:
    dead, alive = (Path(f"/dev/shm/elastic-refit-agent-{os.getpid()}-{number}") for number in range(2))
    dead.write_bytes(bytes(4096))
    alive.write_bytes(bytes(4096))
    with mapper(dead) as first, mapper(alive) as second:
        noted = [agent.note.remote((identify(process.pid, node),)) for process in (first, second)]
        ray.get(noted, timeout=WAIT_S)
        first.kill()
        first.wait()
        assert dead.exists()
        assert fence(fences(), culprit[1]) == [Fenced("gone")]
        wait_while(dead.exists, WAIT_S)
        assert alive.exists()
        second.kill()
        second.wait()
        ray.get(agent.tidy.remote(), timeout=WAIT_S)
        assert not alive.exists()
