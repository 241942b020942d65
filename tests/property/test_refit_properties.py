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
    StallSeen,
)
from tests.chains import LIMITS
from tests.model.refit_world import DIGESTS, MANIFEST, WRONG, Move, Scenario, World, after, begin, moves

MAX_SHARDS = 12
ALL_SHARDS = frozenset[Member](ShardId(index) for index in range(MAX_SHARDS))
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
        stalls=draw(few),
        num_refits=draw(st.integers(1, 3)),
        max_recoveries=draw(st.integers(0, 3)),
        min_healthy=draw(st.integers(0, 2)),
        late=draw(few),
        has_late_observer=draw(st.booleans()),
        victims=draw(st.sampled_from([ALL_SHARDS, ALL_SHARDS, None])),
    )


def usual(move: Move) -> bool:
    return isinstance(move.event, Answered) and not isinstance(move.event.answer, Fault | Testimony)


def choose(world: World, random: Random, moved: int) -> Move | None:
    """Mostly what goes well, or refits would rarely come far."""
    possible = sorted(moves(world), key=lambda move: move.label)
    if moved > PATIENCE:
        possible = [move for move in possible if usual(move) or isinstance(move.event, RoundTimedOut)]
    well = [move for move in possible if usual(move)]
    if well and random.random() < 0.95:
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
    st.builds(StallSeen, st.integers(-1, 12), st.booleans()),
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


def usual_event(state: RefitState, random: Random) -> Event:
    """What brings it on: a refit, an answer that is waited for, or the deadline of a round that waits for nobody."""
    run = state.running
    if run is None:
        return RefitRequested(1, Fleet(1, (1, 2, 1), frozenset({ShardId(0), ShardId(1), ShardId(2)})))
    if not run.round.waiting:
        return RoundTimedOut(run.round.token)
    member = random.choice(sorted(run.round.waiting, key=str))
    return Answered(run.round.op, state.epoch, member, good_answer(run.round.op, member, run.membership))


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


@given(st.lists(st.tuples(st.integers(0, 20), EVENTS), max_size=20), st.randoms(use_true_random=False))
@settings(max_examples=200)
def test_step_takes_any_event_in_any_phase(story: list[tuple[int, Event]], random: Random) -> None:
    state = RefitState(RefitPolicy(LIMITS, max_recoveries=2))
    for num_usual, odd in story:
        for _ in range(num_usual):
            state, _ = step(state, usual_event(state, random))
        for event in (odd, *_aimed(odd, state)):
            then, commands = step(state, event)
            is_ignored = any(isinstance(command, Ignored) for command in commands)
            assert not is_ignored or (then == state and len(commands) == 1), "what is ignored changes nothing"
            assert then.epoch >= state.epoch
            state = then
    ends_by_deadlines_alone(state)


def _aimed(odd: Event, state: RefitState) -> tuple[Event, ...]:
    """The same answer, from somebody who is asked just now, to what is asked; or the same stall, of this round."""
    run = state.running
    if run is not None and isinstance(odd, StallSeen):
        return (StallSeen(run.round.token, odd.is_for_silence),)
    if run is None or not isinstance(odd, Answered) or not run.round.waiting:
        return ()
    return (Answered(run.round.op, state.epoch, min(run.round.waiting, key=str), odd.answer, run.round.token),)


def ends_by_deadlines_alone(state: RefitState) -> None:
    for _ in range(8 * MAX_SHARDS):
        if state.running is None:
            return
        state, _ = step(state, RoundTimedOut(state.running.round.token))
    raise AssertionError("deadlines alone do not bring it to an end")
