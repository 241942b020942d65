"""The watchdog on a clock of its own: when it fires, what it aborts, and what it lets pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from elastic_refit.errors import CommunicatorAborted
from elastic_refit.watchdog import Armed, RefitAbortWatchdog


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Target:
    """Counts its aborts; ``on_abort`` stands for what a real communicator does then."""

    def __init__(self, on_abort: Callable[[], None] = lambda: None) -> None:
        self.reasons: list[str] = []
        self._on_abort = on_abort

    def abort(self, reason: str) -> None:
        self.reasons.append(reason)
        self._on_abort()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watchdog(clock: Clock) -> Iterator[RefitAbortWatchdog]:
    watchdog = RefitAbortWatchdog(clock=clock)
    yield watchdog
    watchdog.close()


def test_a_refit_that_ticks_in_time_ends_well(watchdog: RefitAbortWatchdog, clock: Clock) -> None:
    target = Target()
    with watchdog.armed(epoch=1, abort_s=5, hard_s=100) as armed:
        armed.hand_over(target)
        for _ in range(10):
            clock.now += 4.9
            watchdog.check()
            armed.tick()
    assert armed.fired is None
    assert target.reasons == []


def test_it_fires_when_the_ticks_stop(watchdog: RefitAbortWatchdog, clock: Clock) -> None:
    target = Target()
    with (
        pytest.raises(CommunicatorAborted, match="no progress for 5 s"),
        watchdog.armed(epoch=1, abort_s=5, hard_s=100) as armed,
    ):
        armed.hand_over(target)
        clock.now += 3
        armed.tick()
        clock.now += 4.9
        watchdog.check()
        assert armed.fired is None
        clock.now += 0.1
        watchdog.check()
    assert armed.fired == "no progress for 5 s"
    assert target.reasons == ["no progress for 5 s"]


def test_it_fires_at_the_hard_deadline_however_often_it_was_ticked(watchdog: RefitAbortWatchdog, clock: Clock) -> None:
    with (
        pytest.raises(CommunicatorAborted, match="hard deadline of 10 s") as raised,
        watchdog.armed(epoch=1, abort_s=5, hard_s=10) as armed,
    ):
        for _ in range(10):
            clock.now += 1
            armed.tick()
            watchdog.check()
    assert raised.value.reason == "the hard deadline of 10 s passed"


def test_an_order_fires_the_running_refit(watchdog: RefitAbortWatchdog) -> None:
    target = Target()
    with (
        pytest.raises(CommunicatorAborted, match="shard\\[2\\] is behind"),
        watchdog.armed(epoch=7, abort_s=5, hard_s=10) as armed,
    ):
        armed.hand_over(target)
        watchdog.order_abort(7, "shard[2] is behind")
        watchdog.check()
    assert target.reasons == ["ordered: shard[2] is behind"]


def test_an_order_that_came_first_fires_at_once_and_a_later_epoch_is_spared(watchdog: RefitAbortWatchdog) -> None:
    watchdog.order_abort(7, "over")
    assert watchdog.aborted_through == 7
    for epoch in (3, 7):
        target = Target()
        with pytest.raises(CommunicatorAborted), watchdog.armed(epoch=epoch, abort_s=5, hard_s=10) as armed:
            assert armed.fired == "ordered: over"
            armed.hand_over(target)
            assert target.reasons == ["ordered: over"]
    with watchdog.armed(epoch=8, abort_s=5, hard_s=10) as armed:
        watchdog.check()
    assert armed.fired is None


def test_a_lower_order_does_not_take_a_higher_one_back(watchdog: RefitAbortWatchdog) -> None:
    watchdog.order_abort(7, "seven")
    watchdog.order_abort(5, "five")
    with pytest.raises(CommunicatorAborted, match="seven"), watchdog.armed(epoch=6, abort_s=5, hard_s=10):
        pass


def test_everything_handed_over_is_aborted_though_one_cannot_be(watchdog: RefitAbortWatchdog) -> None:
    def fail() -> None:
        raise RuntimeError("stuck in reclaim")

    targets = [Target(), Target(fail), Target()]
    with pytest.raises(CommunicatorAborted), watchdog.armed(epoch=1, abort_s=5, hard_s=10) as armed:
        for target in targets[:2]:
            armed.hand_over(target)
        armed.fire("enough")
        armed.fire("twice")
        armed.hand_over(targets[2])
    assert [target.reasons for target in targets] == [["enough"]] * 3


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the engine's own"), SystemExit(3)])
@pytest.mark.parametrize("has_fired", [False, True])
def test_errors_of_the_body_pass_unchanged(watchdog: RefitAbortWatchdog, error: BaseException, has_fired: bool) -> None:
    with pytest.raises(type(error)) as raised, watchdog.armed(epoch=1, abort_s=5, hard_s=10) as armed:
        if has_fired:
            armed.fire("enough")
        raise error
    assert raised.value is error


def test_what_fires_after_the_body_was_left_aborts_nothing(watchdog: RefitAbortWatchdog, clock: Clock) -> None:
    target = Target()
    with watchdog.armed(epoch=1, abort_s=5, hard_s=10) as armed:
        armed.hand_over(target)
    armed.fire("too late")
    clock.now += 100
    watchdog.check()
    assert (armed.fired, target.reasons) == (None, [])


def test_a_thousand_refits_share_one_thread(watchdog: RefitAbortWatchdog) -> None:
    with watchdog.armed(epoch=0, abort_s=5, hard_s=10):
        threads = set(threading.enumerate())
    for epoch in range(1000):
        with watchdog.armed(epoch=epoch, abort_s=5, hard_s=10) as armed:
            armed.tick()
    assert set(threading.enumerate()) <= threads


def test_the_thread_ends_when_the_watchdog_is_closed() -> None:
    before = set(threading.enumerate())
    watchdog = RefitAbortWatchdog()
    with watchdog.armed(epoch=0, abort_s=5, hard_s=10):
        pass
    watchdog.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(ValueError, match="closed"), watchdog.armed(epoch=1, abort_s=5, hard_s=10):
        pass


def test_two_refits_are_not_guarded_at_once(watchdog: RefitAbortWatchdog) -> None:
    with watchdog.armed(epoch=1, abort_s=5, hard_s=10) as armed:
        with pytest.raises(ValueError, match="one refit at a time"), watchdog.armed(epoch=2, abort_s=5, hard_s=10):
            pass
        assert armed.fired is None


@pytest.mark.parametrize("limits", [(0, 1, None), (2, 1, None), (1, 2, 1), (1, 2, 0.5)])
def test_limits_out_of_order_are_refused(watchdog: RefitAbortWatchdog, limits: tuple[float, float, float]) -> None:
    abort_s, hard_s, rung_s = limits
    with (
        pytest.raises(ValueError, match="limits"),
        watchdog.armed(epoch=1, abort_s=abort_s, hard_s=hard_s, rung_s=rung_s),
    ):
        pass


def _stall(armed: Armed, freed: threading.Event) -> None:
    armed.hand_over(Target(freed.set))
    assert freed.wait(30)


def test_the_thread_frees_a_body_that_is_blocked_by_time_alone() -> None:
    watchdog = RefitAbortWatchdog()
    freed = threading.Event()
    with (
        pytest.raises(CommunicatorAborted, match="no progress"),
        watchdog.armed(epoch=1, abort_s=0.05, hard_s=60) as armed,
    ):
        _stall(armed, freed)
    watchdog.close()


def test_the_thread_frees_a_body_that_is_blocked_by_an_order_from_another_thread() -> None:
    watchdog = RefitAbortWatchdog()
    freed = threading.Event()
    with (
        pytest.raises(CommunicatorAborted, match="ordered: stop"),
        watchdog.armed(epoch=1, abort_s=50, hard_s=60) as armed,
    ):
        orderer = threading.Thread(target=watchdog.order_abort, args=(1, "stop"))
        orderer.start()
        _stall(armed, freed)
        orderer.join()
    watchdog.close()


def test_orders_and_exits_that_race_never_leave_a_target_aborted_after_a_good_end() -> None:
    watchdog = RefitAbortWatchdog()
    for epoch in range(300):
        target = Target()
        orderer = threading.Thread(target=watchdog.order_abort, args=(epoch, "race"))
        try:
            with watchdog.armed(epoch=epoch, abort_s=50, hard_s=60) as armed:
                armed.hand_over(target)
                orderer.start()
            ended_well = True
        except CommunicatorAborted:
            ended_well = False
        orderer.join()
        watchdog.check()
        if ended_well:
            assert (armed.fired, target.reasons) == (None, [])
        else:
            assert armed.fired == "ordered: race"
    watchdog.close()
