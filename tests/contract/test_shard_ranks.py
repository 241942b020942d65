"""A shard of two ranks in processes of their own, without a model: what makes it one member, as good as the worst."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

import psutil
import pytest

from elastic_refit.core.evidence import Testimony
from elastic_refit.core.messages import Fault, PingOrder, Pong, ReadyOrder
from elastic_refit.engines.torch_workers import TorchWorkersEngine
from elastic_refit.errors import ShardError
from elastic_refit.transports.base import Packing
from tests.light_rank import feeds_until, holds
from tests.refit_group import BUCKET_BYTES, Weights
from tests.waiting import wait_until
from tests.wide_fleet import WideFleet

WAIT_S = 60.0


class LightEngine(TorchWorkersEngine):
    rank_module = "tests.light_rank"


class Fleet(WideFleet):
    """Two ranks without a model."""

    def __init__(self, folder: str) -> None:
        self.engine = LightEngine(folder, width=2)
        super().__init__(self.engine, folder, Packing(BUCKET_BYTES))

    def close(self) -> None:
        super().close()
        self.engine.close()

    def told(self, version: int) -> list[str]:
        """What the engines were told, each the same; all hold the version whole."""
        found = self.engine.in_workers(partial(holds, version))
        assert all(same for same, _ in found)
        assert found[0] == found[1]
        return found[0][1]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One for all tests, in their order; the last one ends it."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").touch()
    (folder / "none.safetensors").touch()
    fleet = Fleet(str(folder))
    yield fleet
    fleet.close()


def test_a_refit_reaches_every_rank_and_the_shard_serves_what_all_of_them_hold(fleet: Fleet) -> None:
    assert fleet.shard.serving_version is None
    for version in (1, 2):
        fleet.refit(version, Weights(version))
        assert fleet.told(version)[-2:] == ["begin", f"finish {version}"]
    pong = fleet.shard.attend(PingOrder(fleet.epoch))
    assert isinstance(pong, Pong)
    assert {each.pid for each in pong.processes} == {os.getpid(), *fleet.engine.pids()}


def test_a_shard_with_a_frozen_rank_is_silent_although_its_sibling_speaks(fleet: Fleet) -> None:
    frozen = fleet.engine.pids()[2]
    os.kill(frozen, signal.SIGSTOP)
    pinged = fleet.threads.submit(fleet.shard.attend, PingOrder(fleet.epoch))
    sibling = fleet.shard._lines[0].ask("attend", PingOrder(fleet.epoch))  # type: ignore[attr-defined]
    assert isinstance(sibling.result(WAIT_S), Pong)
    assert not pinged.done()
    os.kill(frozen, signal.SIGCONT)
    assert isinstance(pinged.result(WAIT_S), Pong)


def test_an_abort_frees_every_rank_and_the_retry_reaches_them_all(fleet: Fleet) -> None:
    fleet.build()
    receiving = fleet.threads.submit(fleet.shard.work, fleet.ready(3, Weights(3)))
    wait_until(lambda: fleet.beacon().phase == "in_collective", WAIT_S)
    assert fleet.settle(3).applied_through == -1
    assert isinstance(receiving.result(WAIT_S), Testimony)
    fleet.refit(3, Weights(3))
    assert fleet.told(3)[-2:] == ["begin", "finish 3"]


def test_a_shard_that_rolls_back_closes_the_update_of_every_rank_and_serves_nothing(fleet: Fleet) -> None:
    fleet.build()
    for each in fleet.transfer(fleet.ready(4, Weights(4))):
        each.result(WAIT_S)
    assert fleet.settle(4, roll_back=True).serving_version is None
    assert fleet.told(4)[-2:] == ["begin", "rollback"]
    assert fleet.shard.serving_version is None


def test_a_pause_that_hangs_is_seen_in_the_ranks_and_ended_by_an_abort(fleet: Fleet) -> None:
    fleet.build()
    fleet.engine._everywhere("hold_pause")
    pausing = fleet.threads.submit(fleet.shard.work, ReadyOrder(fleet.epoch, 5, 0))
    wait_until(lambda: fleet.beacon().phase == "pausing", WAIT_S)
    fleet.settle(5)
    fleet.engine._everywhere("may_pause")
    assert isinstance(pausing.result(WAIT_S), Testimony)


def test_a_rank_that_hangs_is_heard_of_and_one_that_dies_ends_the_shard(fleet: Fleet) -> None:
    told: Future[str] = Future()
    fleet.engine.when_dead(told.set_result)
    fleet.engine.in_workers(partial(feeds_until, "w3", 1))
    fleet.build()
    _, received = fleet.transfer(fleet.ready(6, Weights(6)))
    wait_until(fleet.slowest_is_heard, WAIT_S)
    assert not received.done()
    pids = fleet.engine.pids()
    os.kill(pids[2], signal.SIGKILL)
    answer = received.result(WAIT_S)
    assert isinstance(answer, Fault)
    assert answer.signature == "ShardDied"
    assert str(pids[2]) in told.result(WAIT_S)
    assert isinstance(fleet.shard.attend(PingOrder(fleet.epoch)), Fault)
    fleet.engine.close()
    assert not any(psutil.pid_exists(pid) for pid in pids[1:])
    with pytest.raises(ShardError, match="closed"):
        fleet.engine.resume()
