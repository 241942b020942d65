"""A small world around the refit protocol: members that answer, err, hang, die and are heard of late, and a ledger.

A world is a value. :func:`moves` lists everything that may happen in it next, whoever would do it; :func:`after` does
one of these, and checks on the way that no command breaks a promise. What a member holds is kept apart from what
the protocol believes, so that the two can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from elastic_refit.core import events as ev
from elastic_refit.core import ledger_queries
from elastic_refit.core.evidence import Beacon, Testimony
from elastic_refit.core.ids import Member, ShardId, TrainerId
from elastic_refit.core.ledger import fold, new_ledger
from elastic_refit.core.ledger_state import LedgerPolicy, LedgerState
from elastic_refit.core.manifest import Manifest, TensorSpec, build_manifest
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
    SettleOrder,
    TransferOrder,
)
from elastic_refit.core.refit import step
from elastic_refit.core.refit_state import (
    Answered,
    Call,
    Command,
    Died,
    Ended,
    Event,
    Finish,
    Fleet,
    Ignored,
    Landed,
    Record,
    RefitPolicy,
    RefitRequested,
    RefitState,
    Round,
    RoundTimedOut,
    Running,
    StallSeen,
    StartTimer,
)
from elastic_refit.core.refit_turn import ATTEMPT, IN_STEP
from tests.chains import LIMITS

NUM_BUCKETS = 2
MANIFEST: Manifest = build_manifest([TensorSpec("w", (32,), "uint8", 32)], bucket_bytes=16)
DIGESTS = (11, 12)
WRONG = (11, 13)
LATE_S = LIMITS.ping_s
ASKED_TWICE = (Op.PROBE, Op.PING, Op.SETTLE)
WITHIN, OVERDUE = LIMITS.apply_s - 1, LIMITS.apply_s + 1


@dataclass(frozen=True)
class Scenario:
    """What may go wrong in a world, and how often; ``victims`` limits to whom, None: to anybody."""

    num_trainers: int
    num_shards: int
    crashes: int = 0
    """Members that stop for good, at any time; their death is noticed at any later time, or never."""
    errors: int = 0
    wedges: int = 0
    corruptions: int = 0
    cuts: int = 0
    """A link stops: members report that they were aborted, and nobody is to blame."""
    stalls: int = 0
    """How often the shell sees nobody move, at any time."""
    num_refits: int = 1
    is_staged: bool = False
    max_recoveries: int = 1
    min_healthy: int = 1
    late: int | None = 0
    """How often a deadline passes that a healthy member would still have met; None: always, at any time."""
    has_late_observer: bool = False
    victims: frozenset[Member] | None = None
    is_in_order: bool = False
    """Members that are no victims answer a round in the order of their ranks, and victims crash in that order: this
    spares most of a larger world, and a smaller one is searched without it."""
    witnesses: frozenset[Member] | None = None
    """Whose calls may come back after the attempt was broken off, or report that it was; None: anybody's."""

    @property
    def members(self) -> tuple[Member, ...]:
        shards = (ShardId(index) for index in range(self.num_shards))
        return (*(TrainerId(index) for index in range(self.num_trainers)), *shards)

    def may_fail(self, member: Member) -> bool:
        return self.victims is None or member in self.victims

    def policy(self) -> RefitPolicy:
        commit: ev.CommitMode = "staged" if self.is_staged else "streamed"
        return RefitPolicy(LIMITS, self.max_recoveries, self.min_healthy, commit=commit, max_asks=2)


class Held(NamedTuple):
    """What a shard really holds of ``version``, and what it serves."""

    version: int = 0
    applied_through: int = -1
    serving: int | None = None
    is_wrong: bool = False


class Budget(NamedTuple):
    """What may still go wrong."""

    crashes: int
    errors: int
    wedges: int
    corruptions: int
    cuts: int
    stalls: int
    late: int | None
    refits: int


class Seen(NamedTuple):
    """What the commands have said so far, as far as later ones must agree with it."""

    token: int = -1
    attempt_token: int = -1
    epoch: int = 0
    opened: int = 0
    condemned: frozenset[ShardId] = frozenset()
    committed: frozenset[ShardId] = frozenset()
    rolled_back: frozenset[Member] = frozenset()
    served: frozenset[ShardId] = frozenset()
    """When the refit began."""
    num_records: int = 0


class World(NamedTuple):
    scenario: Scenario
    machine: RefitState
    ledger: LedgerState
    budget: Budget
    gone: frozenset[Member] = frozenset()
    wedged: frozenset[Member] = frozenset()
    held: tuple[Held, ...] = ()
    seen: Seen = Seen()
    ledger_key: tuple[Any, ...] = ()

    @property
    def running(self) -> Running:
        assert self.machine.running is not None, "no refit is in progress"
        return self.machine.running


class Move(NamedTuple):
    """One thing that happens: ``event`` is what the protocol hears of it, ``change`` what becomes true."""

    label: str
    event: Event | None
    change: dict[str, Any]


def begin(scenario: Scenario) -> World:
    ledger = new_ledger(LedgerPolicy())
    left = {what: getattr(scenario, what) for what in Budget._fields if what != "refits"}
    budget = Budget(**left, refits=scenario.num_refits)
    world = World(scenario, RefitState(scenario.policy()), ledger, budget, held=(Held(),) * scenario.num_shards)
    for index in range(scenario.num_shards):
        world = record(world, ev.Registered(ShardId(index)))
    return world


def record(world: World, event: ev.Event) -> World:
    """Tell the ledger; it accepts whatever a correct protocol tells it."""
    seen = world.seen._replace(num_records=world.seen.num_records + 1)
    ledger, ack = fold(world.ledger, ev.Entry("coordinator", 0, seen.num_records, 0.0, event))
    assert ack.status in ("applied", "ignored"), f"{event}: {ack}"
    assert ack.status == "applied" or not isinstance(event, ev.FleetEvent), f"{event}: {ack}"
    return world._replace(ledger=ledger, ledger_key=_ledger_key(ledger), seen=seen)


def _ledger_key(ledger: LedgerState) -> tuple[Any, ...]:
    shards = tuple((each.id, each.state, each.version, each.weights_epoch) for each in ledger.shards.values())
    return shards, ledger.refits


# -- what may happen


def moves(world: World) -> Iterator[Move]:
    if world.machine.running is None:
        yield from _requests(world)
        return
    run = world.running
    late = _not_yet(world)
    for member in run.round.waiting - late:
        yield from _answers(world, run.round.op, member)
    for asked in (run.stalled, run.interrupted):
        if asked is not None:
            for member in asked.waiting - late:
                yield from _answers(world, asked.op, member)
    if world.budget.stalls and run.round.op in ATTEMPT:
        budget = world.budget._replace(stalls=world.budget.stalls - 1)
        yield Move("look for silence", StallSeen(run.round.token, is_for_silence=True), {"budget": budget})
        if run.round.op in IN_STEP:
            yield Move("stall", StallSeen(run.round.token), {"budget": budget})
    yield from _losses(world)
    yield from _deadlines(world)


def _is_early(world: World, asked: Round) -> bool:
    """Somebody would still have answered in time: all of a round of the attempt if nobody in it hangs, else anybody."""
    if asked.op in ATTEMPT:
        return not asked.waiting & (world.gone | world.wedged)
    return asked.op is Op.FENCE or bool(asked.waiting - world.gone)


def _not_yet(world: World) -> frozenset[Member]:
    """Who does not answer yet, because others do so first."""
    if not world.scenario.is_in_order:
        return frozenset()
    left = world.running.round.waiting - world.gone - world.wedged - (world.scenario.victims or frozenset())
    return left - set([member for member in world.scenario.members if member in left][:1])


def _deadlines(world: World) -> Iterator[Move]:
    for timed in filter(None, (world.running.round, world.running.stalled)):
        budget = world.budget
        if _is_early(world, timed):
            if budget.late == 0:
                continue
            budget = budget._replace(late=budget.late and budget.late - 1)
        late_s = (0.0, LATE_S) if world.scenario.has_late_observer and timed.op in ASKED_TWICE else (0.0,)
        for seconds in late_s:
            yield Move(f"{timed.op} over, {seconds:g} s late", RoundTimedOut(timed.token, seconds), {"budget": budget})
        if world.running.is_for_silence and timed is world.running.round:
            yield Move("no stall after all", RoundTimedOut(timed.token, still_s=0.0), {"budget": budget})


def _requests(world: World) -> Iterator[Move]:
    """The next refit. The ledger has heard of the deaths meanwhile, or of none of them."""
    if not world.budget.refits:
        return
    scenario = world.scenario
    budget = world.budget._replace(refits=world.budget.refits - 1)
    version = scenario.num_refits - budget.refits
    for heard in ({member for member in world.gone if isinstance(member, ShardId)}, set()):
        ledger = world.ledger
        for number, shard in enumerate(sorted(heard)):
            ledger, _ = fold(ledger, ev.Entry("supervisor", version, number, 0.0, ev.ActorDied(shard, "exit")))
        present = frozenset(ledger_queries.joinable(ledger))
        fleet = Fleet(scenario.num_trainers, (1,) * scenario.num_shards, present)
        served = frozenset(ledger_queries.serving(ledger))
        seen = world.seen._replace(condemned=frozenset(), rolled_back=frozenset(), served=served)
        change = {"ledger": ledger, "ledger_key": _ledger_key(ledger), "budget": budget, "seen": seen}
        yield Move(f"refit v{version}", RefitRequested(version, fleet), change)
        if not heard:
            return


def _losses(world: World) -> Iterator[Move]:
    scenario, budget = world.scenario, world.budget
    yield from (Move(f"notice {member}", Died(member, "exit"), {}) for member in world.gone)
    left = [each for each in scenario.members if each not in world.gone and scenario.may_fail(each)]
    if budget.crashes:
        for member in left[:1] if scenario.is_in_order else left:
            change = {"gone": world.gone | {member}, "budget": budget._replace(crashes=budget.crashes - 1)}
            yield Move(f"crash {member}", None, change)
    if budget.cuts:
        yield Move("cut", None, {"budget": budget._replace(cuts=budget.cuts - 1)})


def _answers(world: World, op: Op, member: Member) -> Iterator[Move]:
    machine = world.machine

    def says(answer: Answer, label: str, **change: Any) -> Move:
        event = Answered(op, machine.epoch, member, answer, world.running.round.token)
        return Move(f"{member} {op}: {label}", event, change)

    if op is Op.FENCE:
        yield says(Fenced("gone"), "gone", gone=world.gone | {member})
        return
    if member in world.gone:
        return
    interrupted = world.running.interrupted
    is_interrupted = interrupted is not None and op is interrupted.op is not world.running.round.op
    can_fail = world.scenario.may_fail(member)
    if world.budget.errors and can_fail:
        budget = world.budget._replace(errors=world.budget.errors - 1)
        yield says(Fault("E/1", "E: no"), "error", budget=budget)
    if op in ATTEMPT:
        may_finish = isinstance(member, ShardId) and op in (Op.TRANSFER, Op.COMMIT)  # well, and make a difference
        is_witness = world.scenario.witnesses is None or member in world.scenario.witnesses
        if is_witness and is_troubled(world):
            yield says(Testimony("aborted", None, "broken"), "aborted")
        if member in world.wedged or (is_interrupted and not (is_witness and may_finish)):
            return
        if world.budget.wedges and can_fail:
            budget = world.budget._replace(wedges=world.budget.wedges - 1)
            yield Move(f"wedge {member}", None, {"wedged": world.wedged | {member}, "budget": budget})
    for answer, label, change in _good_answers(world, op, member):
        yield says(answer, label, **change)


def is_troubled(world: World) -> bool:
    """Something has happened for which a healthy member may see its group break."""
    cut = world.budget.cuts < world.scenario.cuts
    group = world.running.membership
    hang = [member for member in world.gone | world.wedged if group is not None and group.contains(member)]
    return bool(hang or cut or world.running.interrupted)


Good = tuple[Answer, str, dict[str, Any]]


def _good_answers(world: World, op: Op, member: Member) -> Iterator[Good]:
    match op:
        case Op.PROBE | Op.PING:
            yield from _pongs(world, member)
        case Op.PREPARE:
            yield Prepared((str(member),)), "", {}
        case Op.JOIN:
            yield Done(), "", {}
        case Op.READY:
            yield (Ready(MANIFEST) if isinstance(member, TrainerId) else Done()), "", {}
        case Op.TRANSFER if isinstance(member, TrainerId):
            yield Sent(DIGESTS if member.index == 0 else ()), "", {}
        case Op.TRANSFER:
            yield from _receptions(world, member)
        case Op.COMMIT:
            version = world.running.version
            yield Committed(version), "", {"held": _with(world, member, serving=version)}
        case _:
            yield from _settlements(world, member)


def _pongs(world: World, member: Member) -> Iterator[Good]:
    epoch = world.machine.epoch
    if member not in world.wedged or world.running.round.op is Op.PROBE:
        yield Pong(Beacon(epoch, 0, -1, -1, "recv", None, "in_collective", 1.0)), "", {}
        return
    for age_s in (WITHIN, OVERDUE):
        beacon = Beacon(epoch, -1, -1, -1, "engine", None, "applying", age_s)
        yield Pong(beacon), f"busy for {age_s:g} s", {}


def _receptions(world: World, member: Member) -> Iterator[Good]:
    now = held(world, member)
    change = {"version": world.running.version, "applied_through": NUM_BUCKETS - 1, "serving": now.serving}
    if now.version != world.running.version or now.applied_through < NUM_BUCKETS - 1:
        change["serving"] = _while_open(world, now)
    if now.is_wrong and now.version == world.running.version:
        yield Received(WRONG), "still wrong", {"held": _with(world, member, **change)}
        return
    yield Received(DIGESTS), "", {"held": _with(world, member, **change, is_wrong=False)}
    if world.budget.corruptions:
        budget = world.budget._replace(corruptions=world.budget.corruptions - 1)
        yield Received(WRONG), "wrong", {"held": _with(world, member, **change, is_wrong=True), "budget": budget}


def _settlements(world: World, member: Member) -> Iterator[Good]:
    """A member leaves its call wherever it was: a shard may have applied more, or have committed, unheard."""
    run = world.running
    if isinstance(member, TrainerId):
        yield Settled(-1, 0.1), "", {}
        return
    now = held(world, member)
    if now.version != run.version:
        now = now._replace(version=run.version, applied_through=-1, is_wrong=False)
    reached = [now]
    if run.interrupted is not None and member in run.interrupted.waiting:
        if run.interrupted.op is Op.TRANSFER and now.applied_through < NUM_BUCKETS - 1:
            serving = _while_open(world, now)
            reached += [now._replace(applied_through=NUM_BUCKETS - 1 - left, serving=serving) for left in (0, 1)]
        elif run.interrupted.op is Op.COMMIT:
            reached.append(now._replace(serving=run.version))
    rolls_back = run.ending is not None or run.rolls_back
    for then in dict.fromkeys(reached):
        is_over = rolls_back and then.serving != run.version
        after_all = then._replace(applied_through=-1, is_wrong=False) if is_over else then
        answer = Settled(then.applied_through, 0.1, then.serving, is_beside=world.scenario.is_staged)
        yield answer, f"{then.applied_through}", {"held": _with(world, member, **after_all._asdict())}


def _while_open(world: World, now: Held) -> int | None:
    """What a shard serves that has taken in some of a version and not committed it."""
    return now.serving if world.scenario.is_staged else None


def held(world: World, member: Member) -> Held:
    return world.held[member.index]


def _with(world: World, member: Member, **facts: Any) -> tuple[Held, ...]:
    changed = list(world.held)
    changed[member.index] = changed[member.index]._replace(**facts)
    return tuple(changed)


# -- what follows


def after(world: World, move: Move) -> tuple[World, tuple[Command, ...]]:
    """The world after ``move``, and the commands; raises AssertionError where a promise is broken."""
    world = world._replace(**move.change)
    if move.event is None:
        return world, ()
    before = world.machine.running
    machine, commands = step(world.machine, move.event)
    world = world._replace(machine=machine)
    for command in commands:
        world = _obey(world, before, command)
        if isinstance(command, Record) and isinstance(command.event, ev.Condemned):
            is_late = isinstance(move.event, RoundTimedOut) and move.event.observer_late_s > 0
            assert not is_late or command.event.rule != "2", "silence counts though the observer was late"
    _check(world, commands)
    return world, commands


def _obey(world: World, before: Running | None, command: Command) -> World:
    match command:
        case Record():
            return _note(record(world, command.event), command.event)
        case StartTimer():
            attempt = command.token if command.op in ATTEMPT else world.seen.attempt_token
            return world._replace(seen=world.seen._replace(token=command.token, attempt_token=attempt))
        case Call():
            return _called(world, before, command)
        case Finish():
            _check_outcome(world, before, command.outcome)
            return world
        case Ignored():
            return world


def _note(world: World, event: ev.Event) -> World:
    seen = world.seen
    match event:
        case ev.EpochOpened():
            assert event.epoch > seen.epoch, "epochs only rise"
            seen = seen._replace(epoch=event.epoch, committed=frozenset(), rolled_back=frozenset())
        case ev.RefitOpened():
            assert event.epoch == seen.epoch
            assert not set(event.participants) & seen.condemned, "somebody condemned takes part"
            seen = seen._replace(opened=event.epoch, committed=frozenset())
        case ev.Condemned():
            assert event.shard not in seen.condemned, f"{event.shard} is condemned twice"
            assert event.rule, "condemned without a rule"
            assert event.evidence, "condemned without evidence"
            seen = seen._replace(condemned=seen.condemned | {event.shard})
        case ev.WeightsPartial():
            assert not world.scenario.is_staged, f"{event.shard} is called a mixture, and it was not touched"
        case ev.ShardCommitted():
            seen = seen._replace(committed=seen.committed | {event.shard})
    return world._replace(seen=seen)


def _called(world: World, before: Running | None, call: Call) -> World:
    seen = world.seen
    assert call.epoch == world.machine.epoch
    assert call.token == seen.token, "the round's timer is started before its calls are made"
    assert (call.op is Op.FENCE) == (call.member in seen.condemned), f"{call.op} of {call.member}"
    if call.op is Op.FENCE:
        assert isinstance(call.member, ShardId), "a trainer is fenced"
    if call.op in ATTEMPT:
        assert seen.epoch == call.epoch, "a call of the attempt before its epoch is recorded"
        known = before.evidence.get(call.member) if before is not None else None
        assert known is None or known.died is None, f"{call.member} is in a membership, and known dead"
    if call.op in (Op.TRANSFER, Op.COMMIT):
        assert seen.opened == call.epoch, "bytes before RefitOpened is recorded"
    if isinstance(call.order, TransferOrder) and isinstance(call.member, ShardId):
        now = held(world, call.member)
        through = now.applied_through if now.version == call.order.version else -1
        assert call.order.start_bucket <= through + 1, f"{call.member} lacks buckets before {call.order.start_bucket}"
    if call.op is Op.COMMIT:
        assert not held(world, call.member).is_wrong, "a commit of wrong bytes"
    if isinstance(call.order, SettleOrder) and call.order.roll_back:
        return world._replace(seen=seen._replace(rolled_back=seen.rolled_back | {call.member}))
    return world


def _check(world: World, commands: tuple[Command, ...]) -> None:
    machine = world.machine
    assert machine.epoch == world.seen.epoch
    if machine.running is None:
        return
    run = world.running
    seen = world.seen
    assert run.round.token == (seen.attempt_token if run.round.op in ATTEMPT else seen.token), "it has no timer"
    assert run.stalled is None or (run.round.op is Op.PING and run.stalled.waiting), "a look at what is over"
    assert run.stalled or not run.is_for_silence
    assert run.round.waiting or run.round.op in (Op.WAIT, Op.PING), "a round that waits for nobody"
    assert run.recoveries <= machine.policy.max_recoveries
    condemned = {finding.member for finding in run.findings}
    assert condemned == world.seen.condemned
    called = {c.member for c in commands if isinstance(c, Call) and c.token == run.round.token}
    assert not called or called == run.round.waiting, "not everybody who is waited for was called"


def _check_outcome(world: World, before: Running | None, outcome: Landed | Ended) -> None:
    named = {finding.member for finding in outcome.findings if isinstance(finding.member, ShardId)}
    assert all(finding.rule and finding.why for finding in outcome.findings)
    ledger = world.ledger
    assert ledger.refits.open is None
    serving = set(ledger_queries.serving(ledger))
    if isinstance(outcome, Landed):
        group = set(outcome.membership.shard_ids)
        assert named == world.seen.condemned
        assert group <= world.seen.committed, "it landed, and a participant has not committed"
        assert group == serving, "who serves is not who took part"
        assert outcome.recoveries <= world.machine.policy.max_recoveries
        assert all(held(world, shard).serving == outcome.version for shard in group)
        return
    assert outcome.error == "RefitRejected" or named == world.seen.condemned
    assert outcome.sentence
    if outcome.error == "UnattributedHang" and not world.scenario.has_late_observer:
        unheard = [known.member for known in outcome.evidence if not known.answered_ping]
        assert not unheard, f"nobody is named, and {unheard} had not answered"
    ended = before if before is not None and before.ending is not None else None
    settled = ended.settled if ended is not None else {}
    assert not [shard for shard in serving & set(settled) if held(world, shard).serving is None], "serves a mixture"
    if world.scenario.is_staged:
        left_out = world.seen.served - world.gone - named - serving
        assert not left_out, f"{left_out} hold their old version whole and do not serve it"
    if ended is not None and ended.membership is not None:
        dead = {member for member, known in ended.evidence.items() if known.died is not None}
        left = set(ended.membership.members) - dead - world.seen.condemned
        assert left <= world.seen.rolled_back, "somebody was left in the attempt"


# -- when two worlds are the same


def key(world: World) -> tuple[Any, ...]:
    """Equal for worlds with the same future."""
    seen, condemned = world.seen, world.seen.condemned
    return (
        _machine_key(world.machine),
        world.ledger_key,
        world.budget,
        world.gone | condemned,
        world.wedged - condemned,
        world.held,
        (seen.opened, condemned, seen.committed, seen.rolled_back),
    )


def _machine_key(machine: RefitState) -> tuple[Any, ...]:
    run = machine.running
    built = machine.built.shard_ids if machine.built is not None else None
    if run is None:
        return machine.epoch, built
    current, interrupted = run.round, run.interrupted
    return (
        machine.epoch,
        built,
        run.version,
        (current.op, current.waiting, len(current.answers), current.asks),
        interrupted and (interrupted.op, interrupted.waiting),
        run.stalled and (run.stalled.op, run.stalled.waiting, len(run.stalled.answers), run.is_for_silence),
        run.membership and run.membership.epoch,
        run.fleet.present,
        run.manifest is None,
        (run.start_bucket, run.recoveries, run.in_incident, run.is_opened, run.rolls_back, run.link_resends),
        _evidence_key(run),
        tuple((finding.member, finding.rule) for finding in run.findings),
        run.fenced,
        frozenset(run.settled.items()),
        run.ending and run.ending.error,
    )


def _evidence_key(run: Running) -> frozenset[Any]:
    """What later steps read: once the verdict is given, only what speaks against somebody, and how far each came."""
    condemned = {finding.member for finding in run.findings}
    is_judged = run.ending is not None or run.round.op in (Op.FENCE, Op.SETTLE)
    facts = []
    for member, known in run.evidence.items():
        if member in condemned:
            continue
        beacon = known.beacon
        fact: tuple[Any, ...] = (member, known.died is None, known.fault is None, known.finished)
        if not is_judged:
            fact += (known.testimony is None, known.answered_ping, beacon and (beacon.entered, beacon.tick_age_s))
        facts.append(fact)
    return frozenset(facts)
