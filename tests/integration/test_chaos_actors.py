"""Faults among real actors: refused unless the run asked for them, recorded by somebody who outlives them, aimed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayTaskError

from elastic_refit.actors.sabotage import Chaos, Sabotaged, keep_in, struck_in
from elastic_refit.chaos import Fault, Saboteur
from elastic_refit.core.ids import Member, TrainerId
from elastic_refit.errors import ConfigError
from elastic_refit.processes import identify

WAIT_S = 60.0
T0, T1, T2 = TrainerId(0), TrainerId(1), TrainerId(2)


class Struck(Sabotaged):
    """An actor that can be struck, if there is a log, and does nothing else."""

    def __init__(self, member: Member, log: ActorHandle | None) -> None:
        if log is not None:
            own = identify(os.getpid(), ray.get_runtime_context().get_node_id())
            self._saboteur = Saboteur(member, partial(keep_in, log), processes=[own])

    def pid(self) -> int:
        return os.getpid()


class Actors:
    """Three members, a ledger that only has a process, somebody without a log, and the driver's hold on them."""

    def __init__(self) -> None:
        remote: Any = ray.remote  # its stubs do not know what a class becomes
        kind = remote(num_cpus=0, concurrency_groups={"control": 2})(Struck)
        self.ledger = kind.remote(T0, None)
        self.unarmed = kind.remote(T0, None)
        self.chaos = Chaos(lambda: self.members, lambda: {"ledger": self.ledger}, is_enabled=True)
        self.members: dict[Member, ActorHandle] = {
            member: kind.remote(member, self.chaos.log) for member in (T0, T1, T2)
        }
        everybody = (self.ledger, self.unarmed, *self.members.values())
        ray.get([actor.pid.remote() for actor in everybody], timeout=WAIT_S)

    def close(self) -> None:
        for actor in (self.ledger, self.unarmed, *self.members.values()):
            ray.kill(actor)
        self.chaos.close()


@pytest.fixture(scope="module")
def actors(ray_cluster: None) -> Iterator[Actors]:
    actors = Actors()
    yield actors
    actors.close()


def test_nothing_is_armed_in_a_run_that_was_not_started_for_it(actors: Actors) -> None:
    fault = Fault("kill", T0, 1, "idle")
    chaos = Chaos(lambda: {T0: actors.unarmed}, dict, is_enabled=False)
    with pytest.raises(ConfigError, match=r"chaos\.enabled"):
        chaos.arm(fault)
    with pytest.raises(RayTaskError, match=r"chaos\.enabled"):
        ray.get(actors.unarmed.arm.remote(fault), timeout=WAIT_S)
    ray.get(actors.unarmed.idle.remote(1), timeout=WAIT_S)
    assert chaos.records() == ()
    assert struck_in(chaos.log, 1) == ()


def test_a_member_is_struck_when_it_comes_to_the_phase_and_its_record_outlives_it(actors: Actors) -> None:
    pid = ray.get(actors.members[T2].pid.remote(), timeout=WAIT_S)
    fault = Fault("kill", T2, 2, "idle")
    actors.chaos.arm(fault)
    ray.get(actors.members[T2].idle.remote(1), timeout=WAIT_S)
    with pytest.raises(ActorDiedError):
        ray.get(actors.members[T2].idle.remote(2), timeout=WAIT_S)
    (record,) = struck_in(actors.chaos.log, 2)
    assert (record.fault, record.pid, record.phase) == (fault, pid, "idle")
    assert record.at_s is not None
    assert record in actors.chaos.records()


def test_the_ledger_is_struck_by_a_member_that_lives_on(actors: Actors) -> None:
    actors.chaos.arm(Fault("kill", "ledger", 3, "idle", by=T1))
    ray.get(actors.members[T1].idle.remote(3), timeout=WAIT_S)
    with pytest.raises(ActorDiedError):
        ray.get(actors.ledger.pid.remote(), timeout=WAIT_S)
    (record,) = struck_in(actors.chaos.log, 3)
    assert record.fault.victim == "ledger"
    assert ray.get(actors.members[T1].pid.remote(), timeout=WAIT_S) == record.pid


def test_what_the_driver_disarms_does_not_strike(actors: Actors) -> None:
    actors.chaos.arm(Fault("kill", T0, 4, "idle"), Fault("kill", T1, 4, "idle"))
    actors.chaos.disarm()
    ray.get([actors.members[member].idle.remote(4) for member in (T0, T1)], timeout=WAIT_S)
    assert struck_in(actors.chaos.log, 4) == ()
