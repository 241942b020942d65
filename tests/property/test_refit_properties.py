"""What holds of the refit protocol in larger worlds, and whatever it is told."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_refit.core.evidence import Beacon, Testimony
from elastic_refit.core.ids import Member, ShardId, TrainerId
from elastic_refit.core.membership import Membership
from elastic_refit.core.messages import (
    Answer,
    Committed,
    Done,
    Fault,
    Fenced,
    Op,
    Pong,
    Prepared,
    Ready,
    Received,
    Sent,
    Settled,
)
from elastic_refit.core.refit import step
from elastic_refit.core.refit_state import (
    Answered,
    Died,
    Event,
    Fleet,
    Ignored,
    RefitPolicy,
    RefitRequested,
    RefitState,
    RoundTimedOut,
)
from tests.chains import LIMITS
from tests.model.refit_world import DIGESTS, MANIFEST, WRONG, Move, Scenario, World, after, begin, moves

MAX_SHARDS = 12
PATIENCE = 400
"""Moves after which a world only waits for deadlines."""


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    few = st.integers(0, 2)
    return Scenario(
        num_trainers=draw(st.integers(1, 2)),
        num_shards=draw(st.integers(1, MAX_SHARDS)),
        crashes=draw(st.integers(0, 4)),
        errors=draw(few),
        wedges=draw(few),
        corruptions=draw(st.integers(0, 4)),
        cuts=draw(st.integers(0, 1)),
        num_refits=draw(st.integers(1, 3)),
        max_recoveries=draw(st.integers(0, 3)),
        min_healthy=draw(st.integers(0, 3)),
        late=draw(few),
        has_late_observer=draw(st.booleans()),
    )


def usual(move: Move) -> bool:
    return isinstance(move.event, Answered) and not isinstance(move.event.answer, Fault | Testimony)


def choose(world: World, random: Random, moved: int) -> Move | None:
    """Mostly what goes well, or refits would rarely come far."""
    possible = sorted(moves(world), key=lambda move: move.label)
    if moved > PATIENCE:
        possible = [move for move in possible if usual(move) or isinstance(move.event, RoundTimedOut)]
    well = [move for move in possible if usual(move)]
    if well and random.random() < 0.9:
        return random.choice(well)
    return random.choice(possible) if possible else None


@given(scenarios(), st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_no_interleaving_of_a_larger_world_breaks_a_promise(scenario: Scenario, random: Random) -> None:
    world, moved = begin(scenario), 0
    while (move := choose(world, random, moved)) is not None:
        world, _ = after(world, move)
        moved += 1
        assert moved < 4 * PATIENCE, "it goes on and on"
    assert world.machine.running is None


# -- whatever it is told

MEMBERS: st.SearchStrategy[Member] = st.sampled_from(
    [TrainerId(0), TrainerId(1), ShardId(0), ShardId(1), ShardId(1, 1), ShardId(2), ShardId(7), TrainerId(-1)]
)
TOKENS = st.none() | st.integers(-1, 12)
EPOCHS = st.integers(0, 4)
BEACONS = st.builds(
    Beacon,
    EPOCHS,
    entered=st.integers(-2, 3),
    completed=st.integers(-2, 3),
    applied=st.integers(-1, 3),
    waiting_on=st.sampled_from(["recv", "send", "engine", "none"]),
    phase=st.sampled_from(["preparing", "in_collective", "applying", "finalizing", "done", "aborted", "?"]),
    tick_age_s=st.floats(0, 100),
)
ANSWERS: st.SearchStrategy[Answer] = st.one_of(
    st.builds(Pong, BEACONS),
    st.sampled_from([Prepared(("a",)), Prepared(()), Done(), Ready(MANIFEST), Ready(None), Fenced("gone")]),
    st.sampled_from([Sent(DIGESTS), Sent(()), Received(DIGESTS), Received(WRONG), Committed(1), Committed(2)]),
    st.builds(Settled, st.integers(-3, 9), st.just(0.1), st.none() | st.integers(0, 3)),
    st.builds(Fault, st.sampled_from(["E/1", "E/2"]), st.just("E: no")),
    st.builds(Testimony, st.sampled_from(["aborted", "peer_lost"]), st.none() | st.integers(-1, 9), st.just("")),
)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Answered, st.sampled_from(Op), EPOCHS, MEMBERS, ANSWERS, TOKENS),
    st.builds(Died, MEMBERS, st.just("exit")),
    st.builds(RoundTimedOut, st.integers(-1, 12), st.sampled_from([0.0, LIMITS.ping_s])),
    st.builds(
        RefitRequested,
        st.integers(1, 3),
        st.builds(
            Fleet,
            st.integers(1, 2),
            st.just((1, 2, 1)),
            st.frozensets(st.sampled_from([ShardId(0), ShardId(1), ShardId(2)])),
        ),
    ),
)


def nearer(event: Event, state: RefitState, random: Random) -> Event:
    """Often an answer that is waited for, or the round's own deadline, so that the walk gets on."""
    run = state.running
    if run is None or random.random() < 0.3:
        return event
    if isinstance(event, Answered) and run.round.waiting:
        member = random.choice(sorted(run.round.waiting, key=str))
        answer = good_answer(run.round.op, member, run.membership) if random.random() < 0.6 else event.answer
        return Answered(run.round.op, state.epoch, member, answer, run.round.token)
    return RoundTimedOut(run.round.token) if isinstance(event, RoundTimedOut) else event


def good_answer(op: Op, member: Member, group: Membership | None) -> Answer:
    width = 1 if group is None else len(group.ranks(member))
    is_trainer = isinstance(member, TrainerId)
    good: dict[Op, Answer] = {
        Op.PREPARE: Prepared(("a",) * width),
        Op.JOIN: Done(),
        Op.READY: Ready(MANIFEST) if is_trainer else Done(),
        Op.TRANSFER: Sent(DIGESTS) if is_trainer else Received(DIGESTS),
        Op.COMMIT: Committed(1),
        Op.FENCE: Fenced("gone"),
        Op.SETTLE: Settled(-1, 0.1),
    }
    return good.get(op, Pong(Beacon(1)))


@given(st.lists(EVENTS, max_size=120), st.randoms(use_true_random=False), st.integers(0, 2))
@settings(max_examples=300)
def test_step_takes_any_event_in_any_phase(events: list[Event], random: Random, max_recoveries: int) -> None:
    state = RefitState(RefitPolicy(LIMITS, max_recoveries))
    for told in events:
        event = nearer(told, state, random)
        then, commands = step(state, event)
        is_ignored = [isinstance(command, Ignored) for command in commands]
        assert not any(is_ignored) or (then == state and len(commands) == 1), "what is ignored changes nothing"
        assert then.epoch >= state.epoch
        state = then
    ends_by_deadlines_alone(state)


def ends_by_deadlines_alone(state: RefitState) -> None:
    for _ in range(8 * MAX_SHARDS):
        if state.running is None:
            return
        state, _ = step(state, RoundTimedOut(state.running.round.token))
    raise AssertionError("deadlines alone do not bring it to an end")
