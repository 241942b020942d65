"""One refit at a time, and of those that wait only the newest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from elastic_refit.errors import Superseded
from elastic_refit.turns import Turns
from tests.waiting import wait_until

WAIT_S = 30.0


class Callers:
    """Refits that are asked for, each on a thread of its own; each stays inside until it is let go."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._turns = Turns()
        self._may_leave = {version: threading.Event() for version in range(10)}
        self.inside: list[int] = []
        self.began: list[int] = []

    def ask(self, version: int) -> Future[None]:
        """Returns once the caller is inside, waits, or was sent home."""
        call = self._pool.submit(self._refit, version)
        wait_until(lambda: call.done() or version in self.inside or self._waits(version), WAIT_S)
        return call

    def let_go(self, version: int) -> None:
        self._may_leave[version].set()

    def let_all_go(self) -> None:
        for event in self._may_leave.values():
            event.set()

    def _waits(self, version: int) -> bool:
        return self._turns._next is not None and self._turns._next.version == version

    def _refit(self, version: int) -> None:
        with self._turns.turn(version):
            assert self.inside == [], "two refits at once"
            self.inside.append(version)
            self.began.append(version)
            assert self._may_leave[version].wait(WAIT_S)
            self.inside.remove(version)


@pytest.fixture
def callers() -> Iterator[Callers]:
    with ThreadPoolExecutor(10) as pool:
        callers = Callers(pool)
        yield callers
        callers.let_all_go()


def test_a_newer_version_takes_the_place_of_one_that_waits(callers: Callers) -> None:
    first, second, third = callers.ask(1), callers.ask(2), callers.ask(3)
    with pytest.raises(Superseded, match="v2 had not begun when v3 was asked for") as caught:
        second.result(WAIT_S)
    assert (caught.value.version, caught.value.by) == (2, 3)
    assert callers.inside == [1], "the refit that runs is left alone"
    callers.let_all_go()
    first.result(WAIT_S)
    third.result(WAIT_S)
    assert callers.began == [1, 3]


def test_an_older_version_does_not_take_the_place_of_a_newer_one(callers: Callers) -> None:
    callers.ask(1)
    waiting, late = callers.ask(5), callers.ask(4)
    with pytest.raises(Superseded, match="v4 had not begun when v5 was asked for"):
        late.result(WAIT_S)
    callers.let_all_go()
    waiting.result(WAIT_S)
    assert callers.began == [1, 5]


def test_of_many_that_wait_only_the_newest_is_pushed(callers: Callers) -> None:
    calls = {version: callers.ask(version) for version in range(10)}
    callers.let_all_go()
    outcomes = {version: call.exception(WAIT_S) for version, call in calls.items()}
    assert [version for version, error in outcomes.items() if error is None] == [0, 9]
    assert callers.began == [0, 9]


def test_a_refit_that_raises_gives_its_turn_away() -> None:
    turns = Turns()
    with pytest.raises(ZeroDivisionError), turns.turn(1):
        raise ZeroDivisionError
    with turns.turn(2):
        pass
