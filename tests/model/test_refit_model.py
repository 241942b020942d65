"""Every order of answers, errors, deaths, notices and deadlines in small worlds, and what holds in each of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from elastic_refit.core.ids import Member, ShardId, TrainerId
from elastic_refit.core.refit import step
from elastic_refit.core.refit_state import Ended, Finish, Ignored, Landed
from tests.model.refit_world import Move, Scenario, World, after, begin, junk, key, moves


@dataclass
class Explored:
    """All worlds that can be reached, numbered in the order in which they were found."""

    worlds: list[World] = field(default_factory=list)
    edges: list[list[int]] = field(default_factory=list)
    outcomes: set[str] = field(default_factory=set)
    situations: set[Any] = field(default_factory=set)
    found: dict[Any, int] = field(default_factory=dict)
    came_by: list[tuple[int, Move | None]] = field(default_factory=list)

    def add(self, world: World, by: tuple[int, Move | None]) -> int:
        number = self.found.setdefault(key(world), len(self.worlds))
        if number == len(self.worlds):
            self.worlds.append(world)
            self.edges.append([])
            self.came_by.append(by)
        return number

    def story(self, number: int) -> str:
        """How the world came about, for a person."""
        steps = []
        while number:
            number, move = self.came_by[number]
            steps.append(str(move and move.label))
        return " · ".join(reversed(steps))


def explore(scenario: Scenario) -> Explored:
    explored = Explored()
    queue = deque([explored.add(begin(scenario), (0, None))])
    while queue:
        number = queue.popleft()
        known = len(explored.worlds)
        try:
            _expand(explored, number)
        except AssertionError as error:
            raise AssertionError(f"{error}\nafter: {explored.story(number)}") from error
        queue.extend(range(known, len(explored.worlds)))
    return explored


def _expand(explored: Explored, number: int) -> None:
    world = explored.worlds[number]
    for move in moves(world):
        try:
            then, commands = after(world, move)
        except AssertionError as error:
            raise AssertionError(f"{move.label}: {error}") from error
        explored.edges[number].append(explored.add(then, (number, move)))
        for command in commands:
            if isinstance(command, Finish):
                explored.outcomes.add(_name(command.outcome))
    _send_junk(explored, world)


def _send_junk(explored: Explored, world: World) -> None:
    """Once in every kind of situation."""
    run = world.machine.running
    if run is None:
        return
    situation = (run.round.op, run.interrupted and run.interrupted.op, run.ending is None, len(run.round.waiting))
    if situation in explored.situations:
        return
    explored.situations.add(situation)
    for event in junk(world):
        state, said = step(world.machine, event)
        assert state == world.machine, f"{event} changed something"
        assert [type(command) for command in said] == [Ignored], f"{event} was not ignored"


def _name(outcome: Landed | Ended) -> str:
    if isinstance(outcome, Ended):
        return outcome.error
    return "recovered" if outcome.recoveries else "landed"


def cycle(explored: Explored) -> list[int]:
    """Worlds from which one may come back to them for ever; a move that changes nothing is none."""
    incoming = [0] * len(explored.worlds)
    for number, targets in enumerate(explored.edges):
        for target in targets:
            incoming[target] += target != number
    free = deque(number for number, count in enumerate(incoming) if not count)
    while free:
        number = free.popleft()
        for target in explored.edges[number]:
            if target != number:
                incoming[target] -= 1
                if not incoming[target]:
                    free.append(target)
    return [number for number, count in enumerate(incoming) if count]


T0, T1, S0, S1, S2, S3 = TrainerId(0), TrainerId(1), *(ShardId(index) for index in range(4))


def only(*members: Member) -> frozenset[Member]:
    return frozenset(members)


SCENARIOS = {
    "any deadline passes at any time": Scenario(1, 2, late=None),
    "anybody crashes": Scenario(1, 2, crashes=1),
    "one trainer of two crashes, over two refits": Scenario(
        2, 2, crashes=1, num_refits=2, victims=only(T1), witnesses=only(S1)
    ),
    "a shard crashes, over two refits": Scenario(
        2, 2, crashes=1, num_refits=2, victims=only(S0), witnesses=only(S1), is_in_order=True
    ),
    "a deadline passes early, over two refits": Scenario(
        1, 2, num_refits=2, late=1, victims=only(S0), witnesses=only(S0), is_in_order=True
    ),
    "two shards of three crash": Scenario(1, 3, crashes=2, victims=only(S0, S1), witnesses=only(), is_in_order=True),
    "two shards of three crash, and two recoveries are allowed": Scenario(
        1, 3, crashes=2, max_recoveries=2, victims=only(S0, S1), witnesses=only(), is_in_order=True
    ),
    "one shard of four crashes": Scenario(
        1, 4, crashes=1, min_healthy=4, victims=only(S1), witnesses=only(S3), is_in_order=True
    ),
    "two errors": Scenario(1, 3, errors=2, victims=only(S0, S1), witnesses=only(), is_in_order=True),
    "a shard hangs or errs, and the observer is late": Scenario(
        1, 2, wedges=1, errors=1, has_late_observer=True, victims=only(S0)
    ),
    "wrong bytes arrive, and a deadline passes early": Scenario(
        1, 3, corruptions=2, late=1, victims=only(), witnesses=only(S2), is_in_order=True
    ),
    "a link is cut, and the observer is late": Scenario(
        1, 2, cuts=1, late=1, has_late_observer=True, victims=only(), is_in_order=True
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_order_of_events_breaks_a_promise(name: str) -> None:
    import time

    began = time.process_time()
    explored = explore(SCENARIOS[name])
    print(
        name,
        len(explored.worlds),
        sum(map(len, explored.edges)),
        time.process_time() - began,
        sorted(explored.outcomes),
    )
    stuck = cycle(explored)
    assert not stuck, f"it may go on for ever: {explored.story(stuck[0])}"
