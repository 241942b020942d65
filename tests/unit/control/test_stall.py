"""When nobody moves: whose beacons count, from when on, and in which rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_refit.control.host import Heard
from elastic_refit.control.stall import StallWatch
from elastic_refit.core.evidence import Beacon
from elastic_refit.core.ids import ShardId
from elastic_refit.core.messages import Op
from elastic_refit.core.refit_state import Fleet, Round, Running

STALL_S = 3.0
EPOCH = 4
RUN = Running(1, Fleet(1, (1,), frozenset()), Round(Op.TRANSFER, 7, frozenset()))


class Group:
    """Beacons as a host would have heard them, and the watch over them."""

    def __init__(self) -> None:
        self.heard: dict[str, Heard] = {}
        self.watch = StallWatch(lambda: self.heard, STALL_S)
        self.watch.follow(RUN, 10.0)

    def hear(self, name: str, at_s: float, *, tick_age_s: float, epoch: int = EPOCH) -> None:
        self.heard[name] = Heard(Beacon(epoch, tick_age_s=tick_age_s), at_s)


def test_it_is_a_stall_only_once_nobody_has_moved_for_long_enough() -> None:
    group = Group()
    assert group.watch.due(EPOCH) == (13.0, 7)
    group.hear("shard[0]", 12.0, tick_age_s=0.5)
    group.hear("shard[1]", 14.0, tick_age_s=9.0)
    assert group.watch.due(EPOCH) == (14.5, 7)
    group.hear("shard[1]", 15.0, tick_age_s=0.0)
    assert group.watch.due(EPOCH) == (18.0, 7)


def test_moves_of_another_epoch_and_from_before_the_round_count_for_nothing() -> None:
    group = Group()
    group.hear("shard[0]", 12.0, tick_age_s=0.0, epoch=EPOCH - 1)
    group.hear("shard[1]", 12.0, tick_age_s=5.0)
    assert group.watch.due(EPOCH) == (13.0, 7)


def test_the_last_beacon_of_a_member_has_the_age_since_it_came() -> None:
    group = Group()
    group.hear("shard[0]#1", 12.0, tick_age_s=0.5)
    found = group.watch.beacons([ShardId(0), ShardId(0, 1)], 14.0)
    assert found == {ShardId(0, 1): (Beacon(EPOCH, tick_age_s=2.5), 2.0)}


@pytest.mark.parametrize("op", sorted(set(Op) - {Op.JOIN, Op.TRANSFER}))
def test_no_other_round_is_watched(op: Op) -> None:
    group = Group()
    group.watch.follow(replace(RUN, round=Round(op, 8, frozenset())), 11.0)
    assert group.watch.due(EPOCH) is None


def test_after_a_look_the_same_round_has_its_time_again_and_after_the_refit_none() -> None:
    group = Group()
    group.watch.follow(replace(RUN, round=Round(Op.PING, 8, frozenset()), stalled=RUN.round), 13.0)
    group.watch.follow(RUN, 14.0)
    assert group.watch.due(EPOCH) == (17.0, 7)
    group.watch.follow(RUN, 16.0)
    assert group.watch.due(EPOCH) == (17.0, 7), "a step within the round is no move"
    group.watch.follow(None, 16.0)
    assert group.watch.due(EPOCH) is None
