"""Every order of answers, errors, deaths, notices and deadlines in small worlds, and what holds in each of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

import pytest

from elastic_refit.core.ids import Member, ShardId, TrainerId
from elastic_refit.core.messages import Fault, Op
from elastic_refit.core.refit import step
from elastic_refit.core.refit_state import (
    Answered,
    Died,
    Ended,
    Event,
    Finish,
    Ignored,
    Landed,
    RoundTimedOut,
    StallSeen,
)
from elastic_refit.core.refit_turn import ATTEMPT, IN_STEP, Turn
from tests.model.refit_world import Move, Scenario, World, after, begin, key, moves


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


def explore(scenario: Scenario, *, limit: int = 50_000) -> Explored:
    """Breadth first; more than ``limit`` worlds are a counter that nothing bounds."""
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
        assert len(explored.worlds) <= limit, f"there is no end to it: {explored.story(number)}"
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
    for event in _junk(world):
        state, said = step(world.machine, event)
        assert state == world.machine, f"{event} changed something"
        assert [type(command) for command in said] == [Ignored], f"{event} was not ignored"


def _junk(world: World) -> Iterator[Event]:
    """Events of something that is over, each with what it would have to say to do harm."""
    run, epoch = world.running, world.machine.epoch
    member = next(iter(run.round.waiting), TrainerId(0))
    answer = Fault("E/2", "E: late")
    yield Answered(run.round.op, epoch - 1, member, answer, run.round.token)
    yield Answered(run.round.op, epoch, member, answer, run.first_token - 1)
    yield Answered(run.round.op, epoch, ShardId(9), answer, run.round.token)
    yield RoundTimedOut((run.stalled or run.round).token - 1)
    yield StallSeen(run.round.token - 1)
    if run.round.op not in IN_STEP:
        yield StallSeen(run.round.token)
    if run.round.op not in ATTEMPT:
        yield StallSeen(run.round.token, is_for_silence=True)
    yield Died(ShardId(0, 9), "exit")
    for op in (Op.TRANSFER, Op.SETTLE):
        if op not in [asked.op for asked in (run.round, run.stalled, run.interrupted) if asked is not None]:
            yield Answered(op, epoch, member, answer, run.round.token)
    for dead in world.gone:
        known = run.evidence.get(dead)
        if known is not None and known.died is not None:
            yield Died(dead, "again")
            return


def _name(outcome: Landed | Ended) -> str:
    if isinstance(outcome, Ended):
        return outcome.error
    return "recovered" if outcome.recoveries else "landed"


def assert_it_ends(explored: Explored) -> None:
    """There is no way back to any world; a move that changes nothing is none."""
    graph = {number: set(targets) - {number} for number, targets in enumerate(explored.edges)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"it may go on for ever: {explored.story(error.args[1][0])}") from error


T0, T1, S0, S1, S2, S3 = TrainerId(0), TrainerId(1), *(ShardId(index) for index in range(4))


def only(*members: Member) -> frozenset[Member]:
    return frozenset(members)


ENDS_UNNAMED = "CoordinatorLost UnattributedHang"
SCENARIOS = {
    "any deadline passes at any time": (
        Scenario(1, 2, late=None, witnesses=only(S1)),
        f"landed recovered {ENDS_UNNAMED} NoSurvivingShards TrainerLost",
    ),
    "anybody crashes": (
        Scenario(1, 2, crashes=1),
        "landed recovered TrainerLost",
    ),
    "one trainer of two crashes, over two refits": (
        Scenario(2, 2, crashes=1, num_refits=2, victims=only(T1), witnesses=only(S1)),
        "landed TrainerLost",
    ),
    "a shard crashes, over two refits": (
        Scenario(2, 2, crashes=1, num_refits=2, victims=only(S0), witnesses=only(S1), is_in_order=True),
        "landed recovered",
    ),
    "a deadline passes early, over two refits": (
        Scenario(1, 2, num_refits=2, late=1, victims=only(S0), witnesses=only(S0), is_in_order=True),
        f"landed {ENDS_UNNAMED} NoSurvivingShards TrainerLost",
    ),
    "a shard crashes, over two refits, with a staged commit": (
        Scenario(2, 2, crashes=1, num_refits=2, is_staged=True, victims=only(S0), witnesses=only(S1), is_in_order=True),
        "landed recovered",
    ),
    "a trainer crashes in the second refit, with a staged commit": (
        Scenario(2, 2, crashes=1, num_refits=2, is_staged=True, victims=only(T1), witnesses=only(), is_in_order=True),
        "landed TrainerLost",
    ),
    "two shards of three crash": (
        Scenario(1, 3, crashes=2, victims=only(S0, S1), witnesses=only(), is_in_order=True),
        "landed recovered RecoveryBudgetExhausted",
    ),
    "one shard of four crashes, and all are needed": (
        Scenario(1, 4, crashes=1, min_healthy=4, victims=only(S1), witnesses=only(S3), is_in_order=True),
        "landed FleetExhausted",
    ),
    "two shards err, and two recoveries are allowed": (
        Scenario(1, 2, errors=2, max_recoveries=2, victims=only(S0, S1), witnesses=only()),
        "landed recovered RefitRejected NoSurvivingShards",
    ),
    "a shard hangs or errs, and the observer is late": (
        Scenario(1, 2, wedges=1, errors=1, has_late_observer=True, victims=only(S0)),
        "landed recovered UnattributedHang",
    ),
    "nobody moves, for a shard hangs": (
        Scenario(1, 2, wedges=1, stalls=2, victims=only(S0), witnesses=only(S1), is_in_order=True),
        "landed recovered UnattributedHang",
    ),
    "nobody moves, for anybody errs or crashes": (
        Scenario(1, 2, crashes=1, errors=1, stalls=1, witnesses=only(), is_in_order=True),
        "landed recovered TrainerLost",
    ),
    "nobody moves, for a link is cut, and the observer is late": (
        Scenario(1, 2, cuts=1, stalls=2, has_late_observer=True, victims=only(), is_in_order=True),
        "landed UnattributedHang",
    ),
    "nobody moves, and a deadline passes early": (
        Scenario(1, 2, stalls=1, late=1, victims=only(), witnesses=only(S0), is_in_order=True),
        f"landed recovered {ENDS_UNNAMED} NoSurvivingShards",
    ),
    "wrong bytes arrive, and a deadline passes early": (
        Scenario(1, 3, corruptions=2, late=1, victims=only(), witnesses=only(S2), is_in_order=True),
        f"landed recovered {ENDS_UNNAMED} NoSurvivingShards RecoveryBudgetExhausted",
    ),
    "wrong bytes keep arriving": (
        Scenario(1, 3, corruptions=4, max_recoveries=2, victims=only(), witnesses=only(), is_in_order=True),
        "landed recovered DigestMismatch NoSurvivingShards RecoveryBudgetExhausted",
    ),
    "a link is cut, and the observer is late": (
        Scenario(1, 2, cuts=1, late=1, has_late_observer=True, victims=only(), is_in_order=True),
        f"landed recovered {ENDS_UNNAMED} NoSurvivingShards",
    ),
}
"""What may go wrong, and every way in which a refit comes to its end then."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_order_of_events_breaks_a_promise(name: str) -> None:
    scenario, outcomes = SCENARIOS[name]
    explored = explore(scenario)
    assert_it_ends(explored)
    assert explored.outcomes == set(outcomes.split())


def _any_epoch(turn: Turn, event: Answered) -> str | None:
    return NOT_ASKED(turn, replace(event, epoch=turn.state.epoch))


def _whoever_lives(turn: Turn) -> tuple[Member, ...]:
    return tuple(member for member in turn.members if not turn.is_dead(member))


NOT_ASKED = Turn.not_asked
HANG = "a shard hangs or errs, and the observer is late"
MISTAKES: dict[str, tuple[str, object, str, str]] = {
    "answers of any epoch count": ("refit_turn.Turn.not_asked", _any_epoch, "anybody crashes", "changed something"),
    "the condemned stay": (
        "refit_turn.Turn.survivors",
        _whoever_lives,
        "two shards err, and two recoveries are allowed",
        "of shard",
    ),
    "nobody is asked for mixtures": (
        "refit.mixture",
        lambda run, answer: None,
        "a deadline passes early, over two refits",
        "serves a mixture",
    ),
    "evidence is gathered for ever": (
        "refit_turn.Turn.may_ask_again",
        lambda turn: True,
        HANG,
        "there is no end to it",
    ),
    "a look breaks off what goes on": (
        "refit_turn.Turn.resume",
        lambda turn: None,
        "nobody moves, for a shard hangs",
        "a look at what is over",
    ),
    "silence counts whoever is late": (
        "refit_verdict.ON_TIME_SHARE",
        9.0,
        "a link is cut, and the observer is late",
        "the observer was late",
    ),
}
"""A mistake, where it is made, and a world in which the search must find it."""


@pytest.mark.parametrize("name", MISTAKES)
def test_the_search_finds_a_protocol_in_which(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, mistake, scenario, promise = MISTAKES[name]
    monkeypatch.setattr(f"elastic_refit.core.{where}", mistake)
    with pytest.raises(AssertionError, match=promise):
        explore(SCENARIOS[scenario][0], limit=5_000)
