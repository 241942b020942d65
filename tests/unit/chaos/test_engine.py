"""Which processes a fault against an engine strikes, of a tree such as an engine's with workers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from elastic_refit.chaos import Fault, aim_at_engine
from elastic_refit.core.ids import ShardId
from elastic_refit.errors import ConfigError

SHARD = ShardId(0)
TREE = "sleep 600 & echo $!; sleep 600 & echo $!; read line; kill %1 %2; wait"


@pytest.fixture
def tree() -> Iterator[tuple[int, ...]]:
    """This process, an engine that it started, and two workers that the engine has."""
    with subprocess.Popen(["bash", "-c", TREE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        workers = [int(engine.stdout.readline()) for _ in range(2)]
        yield os.getpid(), engine.pid, *workers


def _aim(fault: Fault, tree: tuple[int, ...]) -> list[int]:
    return [process.pid for process in aim_at_engine(fault, tree, "here").targets]


def test_the_engine_proper_is_what_the_actor_has_started(tree: tuple[int, ...]) -> None:
    for fault in (Fault("engine_kill", SHARD, 1, "bucket:1"), Fault("engine_freeze", SHARD, 1, "bucket:1")):
        assert _aim(fault, tree) == [tree[1]]


def test_a_worker_is_one_of_those_that_the_engine_has(tree: tuple[int, ...]) -> None:
    assert _aim(Fault("worker_kill", SHARD, 1, "bucket:1"), tree) == [tree[2]]
    assert _aim(Fault("worker_kill", SHARD, 1, "bucket:1", rank_in_shard=1), tree) == [tree[3]]


def test_other_faults_are_left_as_they_are(tree: tuple[int, ...]) -> None:
    fault = Fault("kill", SHARD, 1, "bucket:1")
    assert aim_at_engine(fault, tree, "here") == fault


def test_an_engine_without_processes_of_its_own_cannot_be_struck() -> None:
    with pytest.raises(ConfigError, match="0 processes"):
        aim_at_engine(Fault("engine_kill", SHARD, 1, "bucket:1"), (os.getpid(),), "here")
