"""When nobody moves: whose beacons count, from when on, and in which rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_refit.control.host import Heard
from elastic_refit.control.stall import StallWatch
from elastic_refit.core.evidence import Beacon
from elastic_refit.core.ids import ShardId
from elastic_refit.core.messages import Op
from elastic_refit.core.refit_state import Fleet, Round, Running, StallSeen
from elastic_refit.core.refit_turn import ATTEMPT, IN_STEP
from tests.chains import LIMITS

LIMITS = replace(LIMITS, stall_s=3.0, ping_s=2.0)
EPOCH = 4
RUN = Running(1, Fleet(1, (1,), frozenset()), Round(Op.TRANSFER, 7, frozenset()))


class Group:
    """Beacons as a host would have heard them, and the watch over them."""

    def __init__(self, op: Op = Op.TRANSFER) -> None:
        self.heard: dict[str, Heard] = {}
        self.watch = StallWatch(lambda: self.heard, LIMITS)
        self.run = replace(RUN, round=replace(RUN.round, op=op))
        self.watch.follow(self.run, 10.0)

    def hear(self, name: str, at_s: float, *, tick_age_s: float, epoch: int = EPOCH) -> None:
        self.heard[name] = Heard(Beacon(epoch, tick_age_s=tick_age_s), at_s)

    def look(self, until: float) -> StallSeen:
        """The look that is due, which names nobody and lasts ``until`` then."""
        due = self.watch.due(EPOCH)
        assert due is not None
        seen = self.watch.look(EPOCH, due)
        self.watch.follow(replace(self.run, round=Round(Op.PING, 8, frozenset()), stalled=self.run.round), due)
        assert self.watch.due(EPOCH) is None, "it is being looked"
        self.watch.follow(self.run, until)
        return seen


def test_it_is_looked_only_once_nobody_has_moved_for_long_enough() -> None:
    group = Group()
    assert group.watch.due(EPOCH) == 11.0
    group.hear("shard[0]", 12.0, tick_age_s=0.5)
    group.hear("shard[1]", 14.0, tick_age_s=9.0)
    assert group.watch.due(EPOCH) == 12.5
    group.hear("shard[1]", 15.0, tick_age_s=0.0)
    assert group.watch.due(EPOCH) == 16.0


def test_moves_of_another_epoch_and_from_before_the_round_count_for_nothing() -> None:
    group = Group()
    group.hear("shard[0]", 12.0, tick_age_s=0.0, epoch=EPOCH - 1)
    group.hear("shard[1]", 12.0, tick_age_s=5.0)
    assert group.watch.due(EPOCH) == 11.0


def test_a_silence_that_began_with_the_last_move_is_as_long_as_a_ping_may_take_when_it_is_a_stall() -> None:
    assert LIMITS.look_s + LIMITS.ping_s == LIMITS.stall_s
    assert replace(LIMITS, ping_s=LIMITS.stall_s).look_s == 0.25 * LIMITS.stall_s, "but nobody is asked at once"


def test_it_is_still_for_as_long_as_no_rank_of_anybody_has_moved() -> None:
    group = Group()
    assert group.watch.still_s(EPOCH, 12.5) == 2.5
    group.hear("shard[0]", 14.0, tick_age_s=4.0)
    group.hear("shard[0]/1", 14.0, tick_age_s=0.5)
    assert group.watch.still_s(EPOCH, 14.0) == 0.5


def test_it_is_looked_early_then_at_the_stall_and_then_as_if_somebody_had_moved() -> None:
    group = Group()
    assert group.look(until=11.1) == StallSeen(7, is_for_silence=True)
    assert group.watch.due(EPOCH) == 13.0
    assert group.look(until=14.0) == StallSeen(7)
    assert group.watch.due(EPOCH) == 14.0
    assert group.look(until=14.1) == StallSeen(7, is_for_silence=True)
    assert group.watch.due(EPOCH) == 16.0


def test_whoever_moves_after_an_early_look_puts_off_the_next_which_is_early_again() -> None:
    group = Group()
    group.look(until=11.1)
    group.hear("shard[0]", 12.0, tick_age_s=0.5)
    assert group.watch.due(EPOCH) == 12.5
    assert group.look(until=12.6) == StallSeen(7, is_for_silence=True)
    assert group.watch.due(EPOCH) == 14.5


def test_the_last_beacon_of_a_member_has_the_age_since_it_came() -> None:
    group = Group()
    group.hear("shard[0]#1", 12.0, tick_age_s=0.5)
    found = group.watch.beacons({ShardId(0): 1, ShardId(0, 1): 1}, 14.0)
    assert found == {ShardId(0, 1): (Beacon(EPOCH, tick_age_s=2.5), 2.0)}


def test_a_member_of_which_one_rank_was_never_heard_has_no_beacon_and_else_the_age_of_the_most_silent_one() -> None:
    group = Group()
    group.hear("shard[0]", 14.0, tick_age_s=0.0)
    assert group.watch.beacons({ShardId(0): 2}, 14.0) == {}
    group.hear("shard[0]/1", 11.0, tick_age_s=0.0)
    assert group.watch.beacons({ShardId(0): 2}, 14.0) == {ShardId(0): (Beacon(EPOCH, tick_age_s=3.0), 3.0)}


@pytest.mark.parametrize("op", sorted(set(Op) - ATTEMPT))
def test_only_the_attempt_is_watched(op: Op) -> None:
    group = Group()
    group.watch.follow(replace(RUN, round=Round(op, 8, frozenset())), 11.0)
    assert group.watch.due(EPOCH) is None


@pytest.mark.parametrize("op", sorted(ATTEMPT - IN_STEP))
def test_where_nobody_waits_for_the_others_only_silence_is_looked_for(op: Op) -> None:
    group = Group(op)
    assert group.look(until=11.1) == StallSeen(7, is_for_silence=True)
    assert group.look(until=13.1) == StallSeen(7, is_for_silence=True)


def test_a_step_within_the_round_is_no_move_another_round_is_and_after_the_refit_nothing_is_watched() -> None:
    group = Group()
    group.watch.follow(RUN, 10.5)
    assert group.watch.due(EPOCH) == 11.0
    group.watch.follow(replace(RUN, round=Round(Op.JOIN, 9, frozenset())), 20.0)
    assert group.watch.due(EPOCH) == 21.0
    group.watch.follow(None, 20.5)
    assert group.watch.due(EPOCH) is None
