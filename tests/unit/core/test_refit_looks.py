"""A stall is a reason to look, not evidence: the attempt goes on meanwhile, and only a name breaks it off."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_refit.core.evidence import Beacon, Testimony
from elastic_refit.core.messages import Fault, Op, Pong
from elastic_refit.core.refit_state import (
    Answered,
    Died,
    Event,
    Ignored,
    Landed,
    RoundTimedOut,
    Running,
    StallSeen,
    StartTimer,
)
from elastic_refit.core.refit_turn import ATTEMPT
from tests.chains import LIMITS
from tests.unit.core.refit_driver import S0, S1, S2, T0, T1, FakeFleet, Kind, names

WITHIN_S = LIMITS.apply_s - 1


def in_round(op: Op, fleet: FakeFleet | None = None) -> FakeFleet:
    """A refit whose present round is ``op``, with no answer given yet."""
    fleet = fleet or FakeFleet()
    fleet.begin(1)
    while fleet.op is not op:
        fleet.advance()
    return fleet


def running(fleet: FakeFleet) -> Running:
    assert fleet.state.running is not None
    return fleet.state.running


def look(fleet: FakeFleet, *, is_for_silence: bool = False) -> None:
    fleet.send(StallSeen(running(fleet).round.token, is_for_silence))


@pytest.mark.parametrize("op", [Op.JOIN, Op.TRANSFER])
def test_a_stall_has_everybody_asked_for_as_long_as_a_ping_may_take(op: Op) -> None:
    fleet = in_round(op)
    fleet.commands.clear()
    look(fleet)
    assert fleet.called(Op.PING) == [T0, T1, S0, S1, S2]
    (timer,) = [each for each in fleet.commands if isinstance(each, StartTimer)]
    assert timer.seconds == LIMITS.ping_s
    assert not running(fleet).in_incident


@pytest.mark.parametrize("op", [Op.PREPARE, Op.READY, Op.COMMIT])
def test_where_nobody_waits_for_anybody_there_is_no_stall(op: Op) -> None:
    fleet = in_round(op)
    (said,) = fleet.send(StallSeen(running(fleet).round.token))
    assert isinstance(said, Ignored)


@pytest.mark.parametrize("op", sorted(set(Op) - ATTEMPT - {Op.WAIT}))
def test_outside_an_attempt_nobody_looks(op: Op) -> None:
    fleet = FakeFleet(late_s=LIMITS.ping_s)
    fleet.plan("kill", S1, Op.TRANSFER)
    fleet.begin(1)
    while fleet.op is not op:
        fleet.advance()
    (said,) = fleet.send(StallSeen(running(fleet).round.token, is_for_silence=True))
    assert isinstance(said, Ignored)


@pytest.mark.parametrize("op", sorted(ATTEMPT))
def test_a_silent_member_is_named_in_every_round_of_the_attempt(op: Op) -> None:
    fleet = FakeFleet()
    fleet.plan("freeze", S1, op)
    in_round(op, fleet)
    look(fleet, is_for_silence=True)
    outcome = fleet.finish()
    assert isinstance(outcome, Landed)
    assert (names(outcome), outcome.recoveries) == ({"shard[1]": 2}, 1)
    rounds = [timer.op for timer in fleet.commands if isinstance(timer, StartTimer)]
    assert rounds.count(Op.PING) == 1, "the round did not have to run out"


def test_who_has_done_what_the_round_asks_for_may_be_silent() -> None:
    fleet = FakeFleet(hung_s=WITHIN_S)
    in_round(Op.COMMIT, fleet)
    fleet.answer(S1)
    fleet.frozen.add(S1)
    fleet.wedged |= {S0, S2}
    before = running(fleet).round
    look(fleet, is_for_silence=True)
    while fleet.op is Op.PING:
        fleet.advance()
    assert (running(fleet).round, running(fleet).findings) == (before, ())


def test_a_suspect_that_pauses_as_long_as_all_others_is_not_named_by_a_look_for_silence() -> None:
    fleet = FakeFleet(suspects=frozenset({S1}), hung_s=LIMITS.pause_s / 2)
    fleet.state = replace(fleet.state, policy=replace(fleet.state.policy, has_links=False))
    fleet.plan("freeze", S1, Op.READY)
    in_round(Op.READY, fleet)
    fleet.wedged |= {T0, T1, S0, S2}
    look(fleet, is_for_silence=True)
    while running(fleet).round.waiting != {S1}:
        fleet.advance()
    pauses = Beacon(fleet.state.epoch, -1, -1, -1, "engine", None, "pausing", LIMITS.pause_s / 2)
    fleet.send(RoundTimedOut(running(fleet).round.token, beacons={S1: (pauses, 0.0)}))
    assert (fleet.op, running(fleet).stalled, running(fleet).findings) == (Op.READY, None, ())


@pytest.mark.parametrize("op", [Op.JOIN, Op.TRANSFER])
def test_a_refit_that_was_only_slow_lands_as_if_nobody_had_looked(op: Op) -> None:
    fleet = in_round(op)
    look(fleet)
    outcome = fleet.finish()
    assert isinstance(outcome, Landed)
    assert (outcome.recoveries, outcome.findings, fleet.rebuilds) == (0, (), 1)


def test_what_was_answered_before_and_during_a_look_counts_and_the_last_answer_ends_it() -> None:
    fleet = in_round(Op.TRANSFER)
    fleet.answer(S0)
    look(fleet)
    for member in (T0, T1, S1, S2):
        assert fleet.op is Op.PING
        fleet.answer(member)  # to the transfer, which was asked first
    assert fleet.op is Op.COMMIT
    assert isinstance(fleet.finish(), Landed)


def test_a_look_that_names_nobody_leaves_the_attempt_as_it_was() -> None:
    fleet = in_round(Op.TRANSFER, FakeFleet(hung_s=WITHIN_S))
    fleet.wedged.add(S1)
    before = running(fleet).round
    look(fleet)
    while fleet.op is Op.PING:
        assert not fleet.advance(), "nobody is silent"
    assert running(fleet).round == before
    assert (running(fleet).stalled, running(fleet).in_incident) == (None, False)
    look(fleet)
    assert running(fleet).stalled == before, "it can be looked again"


@pytest.mark.parametrize(
    ("kind", "op", "rule"), [("freeze", Op.JOIN, 2), ("freeze", Op.TRANSFER, 2), ("wedge", Op.TRANSFER, 3)]
)
def test_a_look_that_names_somebody_breaks_off_the_attempt_at_once(kind: Kind, op: Op, rule: int) -> None:
    fleet = FakeFleet()
    fleet.plan(kind, S1, op)
    in_round(op, fleet)
    look(fleet)
    outcome = fleet.finish()
    assert isinstance(outcome, Landed)
    assert (names(outcome), outcome.recoveries) == ({"shard[1]": rule}, 1)
    assert [timer.op for timer in fleet.commands if isinstance(timer, StartTimer)].count(Op.PING) == 1


def test_an_early_look_is_over_once_all_have_answered_and_names_nobody_for_standing_still() -> None:
    fleet = FakeFleet()
    fleet.plan("wedge", S1, Op.TRANSFER)
    in_round(Op.TRANSFER, fleet)
    before = running(fleet).round
    look(fleet, is_for_silence=True)
    while fleet.op is Op.PING:
        fleet.advance()
    run = running(fleet)
    assert (run.round, run.stalled, run.is_for_silence, run.findings) == (before, None, False, ())
    look(fleet)
    assert names(fleet.finish()) == {"shard[1]": 3}, "once it is a stall"


@pytest.mark.parametrize(("still_s", "is_named"), [(LIMITS.ping_s - 0.1, False), (LIMITS.ping_s, True)])
def test_silence_in_an_early_look_counts_only_if_nobody_has_moved_meanwhile(still_s: float, *, is_named: bool) -> None:
    fleet = FakeFleet()
    fleet.plan("freeze", S1, Op.TRANSFER)
    in_round(Op.TRANSFER, fleet)
    look(fleet, is_for_silence=True)
    while running(fleet).round.waiting != {S1}:
        fleet.advance()
    fleet.send(RoundTimedOut(running(fleet).round.token, still_s=still_s))
    run = running(fleet)
    assert [finding.rule for finding in run.findings] == [2] * is_named
    assert (run.stalled, run.is_for_silence) == (None, False)
    assert is_named or (fleet.op is Op.TRANSFER and S1 not in run.evidence)


def test_what_was_answered_in_an_earlier_look_is_no_sign_of_life_in_this_one() -> None:
    fleet = in_round(Op.TRANSFER)
    fleet.answer(S0)
    fleet.wedged |= {T0, T1, S1, S2}
    look(fleet, is_for_silence=True)
    while fleet.op is Op.PING:
        fleet.advance()
    fleet.frozen |= {T0, T1, S0, S1, S2}
    look(fleet, is_for_silence=True)
    fleet.send(RoundTimedOut(running(fleet).round.token))
    assert (fleet.op, running(fleet).findings) == (Op.TRANSFER, ()), "the coordinator is cut off, and nobody to blame"


@pytest.mark.parametrize("max_recoveries", [0, 1])
def test_a_shard_that_has_committed_and_died_does_not_break_off_a_refit_that_will_land(max_recoveries: int) -> None:
    fleet = in_round(Op.COMMIT, FakeFleet(max_recoveries=max_recoveries, hung_s=WITHIN_S))
    fleet.answer(S1)
    fleet.send(Died(S1, "SIGKILL"))
    fleet.dead.add(S1)
    fleet.wedged |= {S0, S2}
    look(fleet, is_for_silence=True)
    assert fleet.called(Op.PING)[-4:] == [T0, T1, S0, S2], "the dead are not asked"
    while fleet.op is Op.PING:
        fleet.advance()
    fleet.wedged.clear()
    fleet.answer(S0)
    fleet.answer(S2)
    assert isinstance(fleet.outcome, Landed)
    assert (fleet.outcome.recoveries, fleet.outcome.findings) == (0, ())


def test_a_trainer_that_packs_for_long_is_not_named_because_another_missed_a_ping() -> None:
    fleet = in_round(Op.READY, FakeFleet(hung_s=LIMITS.pack_s + 1))
    for member in (T1, S0, S2):
        fleet.answer(member)
    fleet.wedged.add(T0)
    fleet.frozen.add(S1)
    look(fleet, is_for_silence=True)
    while running(fleet).round.waiting != {S1}:
        fleet.advance()
    pauses = Beacon(fleet.state.epoch, -1, -1, -1, "engine", None, "pausing", 1.0)
    fleet.send(RoundTimedOut(running(fleet).round.token, beacons={S1: (pauses, 0.1)}))
    assert (fleet.op, running(fleet).ending, running(fleet).findings) == (Op.READY, None, ())


def test_who_is_silent_too_when_a_look_names_another_is_condemned_with_it() -> None:
    fleet = in_round(Op.TRANSFER)
    fleet.answer(S2)
    fleet.frozen |= {S1, S2}
    look(fleet)
    outcome = fleet.finish()
    assert isinstance(outcome, Landed)
    assert (names(outcome), outcome.recoveries) == ({"shard[1]": 2, "shard[2]": 2}, 1)


def test_silence_in_a_look_condemns_nobody_while_the_observer_is_late() -> None:
    fleet = FakeFleet(late_s=LIMITS.ping_s)
    fleet.plan("freeze", S1, Op.TRANSFER)
    in_round(Op.TRANSFER, fleet)
    look(fleet)
    while fleet.op is Op.PING:
        fleet.advance()
    assert (fleet.op, running(fleet).findings) == (Op.TRANSFER, ())


@pytest.mark.parametrize(("age_s", "is_named"), [(LIMITS.ping_s / 2, False), (LIMITS.ping_s + 1, True)])
def test_a_beacon_that_came_by_itself_is_a_sign_of_life_while_it_is_young(age_s: float, *, is_named: bool) -> None:
    fleet = FakeFleet()
    fleet.plan("freeze", S1, Op.TRANSFER)
    in_round(Op.TRANSFER, fleet)
    look(fleet)
    while running(fleet).round.waiting != {S1}:
        fleet.advance()
    waits = Beacon(fleet.state.epoch, 1, 0, 0, "recv", None, "in_collective", 4.0)
    fleet.send(RoundTimedOut(running(fleet).round.token, beacons={S1: (waits, age_s)}))
    assert [finding.member for finding in running(fleet).findings] == [S1] * is_named
    assert running(fleet).evidence[S1].beacon == waits


@pytest.mark.parametrize("what", ["fault", "testimony", "death", "deadline"])
def test_whatever_fails_during_a_look_is_an_incident_of_its_own(what: str) -> None:
    fleet = in_round(Op.TRANSFER)
    token, epoch = running(fleet).round.token, fleet.state.epoch
    look(fleet)
    events: dict[str, Event] = {
        "fault": Answered(Op.TRANSFER, epoch, S1, Fault("E/1", "E: no"), token),
        "testimony": Answered(Op.TRANSFER, epoch, S1, Testimony("peer_lost", 3, "gone"), token),
        "death": Died(S1, "SIGKILL"),
        "deadline": RoundTimedOut(token),
    }
    fleet.send(events[what])
    run = running(fleet)
    assert (run.in_incident, run.stalled, fleet.op) == (True, None, Op.PING)
    assert run.interrupted is not None
    assert run.interrupted.op is Op.TRANSFER
    assert run.round.asks == 1, "the look is none of the times that an incident may ask"


def test_an_answer_to_a_look_that_is_over_is_ignored() -> None:
    fleet = in_round(Op.TRANSFER)
    look(fleet)
    pong = Pong(fleet._beacon(S0))
    while fleet.op is Op.PING:
        fleet.advance()
    (said,) = fleet.send(Answered(Op.PING, fleet.state.epoch, S0, pong))
    assert isinstance(said, Ignored)
