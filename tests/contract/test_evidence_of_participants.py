"""What a member says of itself while it hangs, and after it lost a peer: an attribution rests on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from elastic_refit.core.evidence import Testimony
from elastic_refit.core.ids import Member, ShardId, TrainerId
from elastic_refit.core.messages import PingOrder, ReadyOrder
from tests.refit_group import Group, Weights
from tests.waiting import wait_until


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group(shards=2)
    yield group
    group.close()


def test_a_trainer_that_hangs_before_it_packs_is_behind_its_own_refit_and_not_ahead_with_the_one_before(
    group: Group,
) -> None:
    packing, may_go_on = threading.Event(), threading.Event()

    def hang(member: Member, phase: str) -> None:
        if phase == "packing" and group.weights.version == 2:  # type: ignore[attr-defined]
            packing.set()
            assert may_go_on.wait(30)

    group.weights = _Versioned(1)
    group.refit(1, epoch=1, shards=[0, 1])
    group.weights, group.on_reach = _Versioned(2), hang
    with ThreadPoolExecutor(max_workers=1) as thread:
        pinned = thread.submit(group.pin, ReadyOrder(1, 2, 0))
        assert packing.wait(30)
        beacon = group.members[TrainerId(0)].ping(PingOrder(1)).beacon
        may_go_on.set()
        pinned.result(timeout=30)
    assert (beacon.phase, beacon.entered, beacon.completed) == ("packing", -1, -1)


class _Versioned(Weights):
    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.version = version


def test_a_shard_that_lost_its_peer_still_says_whom_it_waited_for(group: Group) -> None:
    membership = group.build(1, [0, 1])
    last, receiving = group.receive_from_nobody(membership)
    participant = group.members[last]
    wait_until(lambda: participant.ping(PingOrder(1)).beacon.waiting_on == "recv", timeout_s=30)
    group.members[ShardId(0)].close()
    testimony = receiving.result(timeout=30)
    assert isinstance(testimony, Testimony)
    assert testimony.kind == "peer_lost"
    beacon = participant.ping(PingOrder(1)).beacon
    assert (beacon.phase, beacon.waiting_on, beacon.waiting_peer) == ("aborted", "recv", 1)
