"""The control channel when a process of it is dead or frozen: nobody else waits, and everybody is found again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from elastic_refit.control.end import ControlEnd
from elastic_refit.control.setup import ChannelPlan
from elastic_refit.core.evidence import Beacon
from elastic_refit.errors import CommunicatorAborted
from elastic_refit.watchdog import RefitAbortWatchdog
from tests.control_hosts import EndProcess, HostProcess
from tests.waiting import wait_until

DEADLINE_S = 60.0
FAST_S = 0.005
NAME = "shard[0]"


class Rank:
    """An end in this process whose every beacon carries a number, and the orders that it obeyed."""

    def __init__(self, plan: ChannelPlan, counted_from: int) -> None:
        self.obeyed: list[tuple[int, str]] = []
        self.watchdog = RefitAbortWatchdog()
        self.sent = counted_from
        self._end = ControlEnd(plan.end(NAME), read_beacon=self._count, obey=self._obey, interval_s=FAST_S)

    def _count(self) -> Beacon:
        self.sent += 1
        return Beacon(0, entered=self.sent)

    def _obey(self, epoch: int, reason: str) -> None:
        self.obeyed.append((epoch, reason))
        self.watchdog.order_abort(epoch, reason)

    def sends_on(self) -> None:
        """Return when many more beacons were sent than could be on their way."""
        goal = self.sent + 50
        wait_until(lambda: self.sent >= goal, DEADLINE_S)

    def close(self) -> None:
        self._end.close()
        self.watchdog.close()


@pytest.fixture
def plan() -> Iterator[ChannelPlan]:
    with closing(ChannelPlan()) as plan:
        plan.end(NAME)
        plan.end("shard[1]")
        yield plan


@contextmanager
def rank_of(plan: ChannelPlan, *, counted_from: int = 0) -> Iterator[Rank]:
    with closing(Rank(plan, counted_from)) as rank:
        yield rank


@contextmanager
def ordering(plan: ChannelPlan, *, incarnation: int, epoch: int) -> Iterator[None]:
    """A coordinator that orders one abort, and is killed at the end."""
    with HostProcess(plan.host(incarnation)) as host:
        host.call("order_abort", epoch, f"coordinator {incarnation}")
        yield


def last(host: HostProcess) -> int:
    beacon = host.beacon_of(NAME)
    return -1 if beacon is None else beacon.entered


def blocked_refit(watchdog: RefitAbortWatchdog) -> str | None:
    """Be stuck in a refit that nothing but the watchdog ends; why it fired."""
    freed = threading.Event()

    class Stuck:
        def abort(self, reason: str) -> None:
            freed.set()

    with pytest.raises(CommunicatorAborted):
        with watchdog.armed(epoch=9, abort_s=0.2, hard_s=DEADLINE_S) as armed:
            armed.hand_over(Stuck())
            assert freed.wait(DEADLINE_S)
    return armed.fired


def test_a_frozen_host_blocks_no_send_no_deadline_and_no_close_and_hears_on_when_it_thaws(plan: ChannelPlan) -> None:
    with HostProcess(plan.host()) as host:
        with rank_of(plan) as rank:
            wait_until(lambda: last(host) > 0, DEADLINE_S)
            host.freeze()
            rank.sends_on()
            assert blocked_refit(rank.watchdog) == "no progress for 0.2 s"
            rank.sends_on()
            sent = rank.sent
            host.thaw()
            wait_until(lambda: last(host) > sent, DEADLINE_S)
            host.freeze()  # and frozen it is when the end is closed
        host.thaw()
        with rank_of(plan, counted_from=10**6):
            wait_until(lambda: last(host) > 10**6, DEADLINE_S)


def test_a_dead_host_blocks_nobody_and_its_successor_is_found_under_the_same_address(plan: ChannelPlan) -> None:
    with rank_of(plan) as rank:
        rank.sends_on()  # nobody is there yet
        with HostProcess(plan.host(0)) as host:
            wait_until(lambda: last(host) > 0, DEADLINE_S)
            host.kill()
            rank.sends_on()
            assert blocked_refit(rank.watchdog) == "no progress for 0.2 s"
        with HostProcess(plan.host(1)) as host:
            host.call("order_abort", 4, "shard[1] is frozen")
            wait_until(lambda: rank.obeyed, DEADLINE_S)
            sent = rank.sent
            wait_until(lambda: last(host) > sent, DEADLINE_S)
    assert rank.obeyed == [(4, "shard[1] is frozen")]


def test_a_coordinator_that_was_superseded_is_not_obeyed(plan: ChannelPlan, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with rank_of(plan) as rank:
        with ordering(plan, incarnation=1, epoch=2):
            wait_until(lambda: rank.obeyed, DEADLINE_S)
        with ordering(plan, incarnation=0, epoch=7):
            wait_until(lambda: "coordinator_superseded" in caplog.messages, DEADLINE_S)
        with ordering(plan, incarnation=2, epoch=3):
            wait_until(lambda: len(rank.obeyed) > 1, DEADLINE_S)
        assert rank.obeyed == [(2, "coordinator 1"), (3, "coordinator 2")]
        assert rank.watchdog.aborted_through == 3


def test_a_frozen_end_delays_nobody_and_obeys_when_it_thaws(plan: ChannelPlan) -> None:
    setups = plan.end(NAME), plan.end("shard[1]")
    with (
        HostProcess(plan.host()) as host,
        EndProcess(setups[0], Beacon(0)) as frozen,
        EndProcess(setups[1], Beacon(1)) as free,
    ):
        wait_until(lambda: len(host.call("heard")) == 2, DEADLINE_S)
        frozen.freeze()
        for epoch in range(1, 20):
            host.call("order_abort", epoch, "again")
            assert next_order(free) == epoch
        frozen.thaw()
        assert 19 in iter(lambda: next_order(frozen), None)


def next_order(end: EndProcess) -> int:
    epoch, _ = end.hear()
    assert isinstance(epoch, int)
    return epoch
