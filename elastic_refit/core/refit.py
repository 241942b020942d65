"""The refit protocol, as a pure machine: ``step(state, event) -> (state, commands)``.

A refit is a sequence of rounds; in each, every member concerned is asked one thing::

    PROBE → (PREPARE → JOIN, when the membership changed) → READY → TRANSFER → COMMIT → landed
       a stall in any of them: PING beside it; if that names somebody, it is a failure
       any failure after PROBE:  PING → FENCE → SETTLE → PREPARE → JOIN → READY → TRANSFER → COMMIT
       any end after PROBE:      FENCE whoever is condemned → SETTLE, rolling back → ended

``step`` is total: an event of another epoch or refit, of somebody who was not asked, or of a round that is over gives
:class:`Ignored` with the reason and changes nothing. What must never happen here: a condemnation without a finding, a
byte before its ``RefitOpened`` is recorded, somebody condemned in a membership, a refit that neither lands nor ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import assert_never

from elastic_refit.core.events import (
    Condemned,
    EpochOpened,
    RefitEnded,
    RefitLanded,
    RefitOpened,
    ShardCommitted,
    WeightsPartial,
)
from elastic_refit.core.evidence import Testimony
from elastic_refit.core.ids import Member, ShardId, TrainerId
from elastic_refit.core.membership import Membership, plan_membership, should_rebuild
from elastic_refit.core.messages import (
    Answer,
    CommitOrder,
    Committed,
    Fault,
    FenceOrder,
    JoinOrder,
    Op,
    PingOrder,
    Pong,
    Prepared,
    PrepareOrder,
    Ready,
    ReadyOrder,
    Received,
    Sent,
    Settled,
    SettleOrder,
    TransferOrder,
    describe,
)
from elastic_refit.core.refit_state import (
    Answered,
    Command,
    Died,
    Ended,
    Event,
    Finish,
    Ignored,
    Landed,
    RefitRequested,
    RefitState,
    Round,
    RoundTimedOut,
    Running,
    StallSeen,
)
from elastic_refit.core.refit_turn import ATTEMPT, IN_STEP, Turn, everybody
from elastic_refit.core.refit_verdict import (
    Judgement,
    judge,
    judge_digests,
    judge_probe,
    judge_settle,
    misfit,
    mixture,
    told_by_look,
)
from elastic_refit.core.verdict import Finding

__all__ = ["step"]


def step(state: RefitState, event: Event) -> tuple[RefitState, tuple[Command, ...]]:
    """Take one event; give the next state and what the shell must do, in order."""
    if isinstance(event, RefitRequested):
        return _request(state, event)
    if state.running is None:
        return state, (Ignored(f"no refit is in progress: {type(event).__name__}"),)
    turn = _Protocol(state, state.running)
    match event:
        case Answered():
            turn.answered(event)
        case Died():
            turn.died(event.member, event.why)
        case RoundTimedOut():
            turn.timed_out(event)
        case StallSeen():
            turn.stall_seen(event)
        case _:
            assert_never(event)
    return turn.result()


def _request(state: RefitState, event: RefitRequested) -> tuple[RefitState, tuple[Command, ...]]:
    if state.running is not None:
        return state, (Ignored(f"refit v{state.running.version} is in progress"),)
    asked = everybody(event.fleet)
    known = {member: processes for member, processes in state.processes.items() if member in asked}
    nothing = Round(Op.PROBE, state.next_token, frozenset(), asks=0)
    running = Running(event.version, event.fleet, nothing, first_token=state.next_token)
    turn = _Protocol(replace(state, processes=known), running)
    if event.fleet.present:
        turn.open_round(Op.PROBE, dict.fromkeys(asked, PingOrder(state.epoch)))
    else:
        turn.end("NoSurvivingShards", f"no shard is left to receive v{event.version}")
    return turn.result()


class _Protocol(Turn):
    """The rules. Each method is one of them, and names what it must not let happen where that is not plain."""

    def round_done(self) -> None:
        rules: dict[Op, Callable[[], None]] = {
            Op.PROBE: self._probed,
            Op.PREPARE: self._prepared,
            Op.JOIN: self._joined,
            Op.READY: self._ready,
            Op.TRANSFER: self._transferred,
            Op.COMMIT: self._committed,
            Op.PING: self._weigh,
            Op.WAIT: self._ask,
            Op.FENCE: self._fenced,
            Op.SETTLE: self._settled,
        }
        rules[self.running.round.op]()

    def evidence_came(self) -> None:
        if self.running.round.op is Op.PING:
            self._weigh()
        elif self.running.round.op is Op.WAIT:
            self._ask()

    # -- events

    def answered(self, event: Answered) -> None:
        reason = self.not_asked(event)
        if reason is not None:
            return self.ignore(reason)
        op, member, answer = event.op, event.member, event.answer
        wrong = None if isinstance(answer, Fault) else misfit(self.running, op, member, answer)
        if wrong is not None:
            answer = Fault(f"misfit/{op}", wrong)
        if op is not Op.FENCE and isinstance(answer, Fault | Testimony):
            return self._failed(op, member, answer)
        self._learn(member, answer)
        return self.answer_came(op, member, answer)

    def _learn(self, member: Member, answer: Answer) -> None:
        match answer:
            case Pong():
                self.know(member, answered_ping=True, beacon=answer.beacon)
                self.learn_processes(member, answer.processes)
            case Prepared():
                self.learn_processes(member, answer.processes)
            case Sent() | Received():
                self.know(member, finished=True)
            case Settled():
                self._learn_settled(member, answer)
            case Committed() if isinstance(member, ShardId):
                self.record(ShardCommitted(member, self.state.epoch, answer.version))
            case _:
                pass

    def _failed(self, op: Op, member: Member, failure: Fault | Testimony) -> None:
        if isinstance(failure, Fault):
            self.know(member, fault=failure.sentence, fault_signature=failure.signature)
        else:
            self.know(member, testimony=failure)
        if op in ATTEMPT:
            self.resume()
        if self.running.round.op in ATTEMPT:
            self._investigate(member)
        else:
            self.answer_came(op, member, failure)

    def died(self, member: Member, why: str) -> None:
        if member not in self.members or self.is_dead(member):
            return self.ignore(f"the death of {member} is known, or none of this refit's")
        self.resume()
        current = self.running.round
        self.know(member, died=why)
        if current.op in ATTEMPT:
            return None if isinstance(current.answers.get(member), Committed) else self._investigate(member)
        self.stop_expecting(member)
        if current.op is Op.FENCE:
            return None  # who is fenced is done with when the fence says so: its processes may outlive the notice
        if member in current.waiting:
            return self.answer_came(current.op, member, None)
        return self.evidence_came()

    def timed_out(self, event: RoundTimedOut) -> None:
        stalled = self.running.stalled
        if stalled is not None and event.token == stalled.token:
            self.resume()
        current = self.running.round
        if event.token != current.token:
            return self.ignore(f"the timer of round {event.token} is over")
        if current.op in ATTEMPT:
            return self._investigate()
        match current.op:
            case Op.PROBE:
                self._probed(event.observer_late_s)
            case Op.PING:
                self._time_is_up(event)
            case Op.SETTLE:
                self._settled(event.observer_late_s)
            case _:
                self.round_done()
        return None

    def _time_is_up(self, event: RoundTimedOut) -> None:
        """What looked like a stall and was none says nothing of who was silent meanwhile."""
        if self.running.is_for_silence and event.still_s < self.state.policy.deadlines.ping_s:
            return self.resume()
        self.missed(event)
        return self._weigh(event.observer_late_s, final=True)

    def stall_seen(self, event: StallSeen) -> None:
        """Ask everybody, and disturb nobody: the attempt goes on, and may end well meanwhile."""
        current = self.running.round
        if event.token != current.token or current.op not in (ATTEMPT if event.is_for_silence else IN_STEP):
            return self.ignore(f"round {event.token} is over, or not one in which all wait for each other")
        self.change(stalled=current, is_for_silence=event.is_for_silence)
        return self._ask(seconds=self.state.policy.deadlines.ping_s)

    # -- before the refit

    def _probed(self, late_s: float = 0.0) -> None:
        condemned = self.condemned
        members = [member for member in self.members if member not in condemned]
        judgement = judge_probe(self.state.policy, self.running, members, late_s)
        if judgement.again_in_s is not None and self.may_ask_again():
            silent = self.in_order(self.running.round.waiting)
            return self.open_round(Op.PROBE, dict.fromkeys(silent, PingOrder(self.state.epoch)))
        return self._act_on(judgement, self._reconcile)

    def _reconcile(self) -> None:
        left = self.surviving_shards()
        if self._ends_for_want_of(len(left)):
            return
        desired = self._plan(left)
        if self.state.built is None or should_rebuild(desired, self.state.built):
            self._open_epoch(desired)
        else:
            self.change(membership=self.state.built, evidence={})
            self._open_refit()

    def _plan(self, shards: Iterable[ShardId]) -> Membership:
        fleet = self.running.fleet
        return plan_membership(fleet.num_trainers, fleet.widths, shards, epoch=self.state.epoch + 1)

    def _open_epoch(self, group: Membership) -> None:
        self.state = replace(self.state, epoch=group.epoch, built=None)
        self.change(membership=group, rebuilt=True, evidence={}, settled={}, interrupted=None, rolls_back=False)
        self.record(EpochOpened(group.epoch, self.state.coordinator))
        order = PrepareOrder(group.epoch, self.state.coordinator, self.running.version)
        self.open_round(Op.PREPARE, dict.fromkeys(group.members, order))

    # -- the attempt

    def _prepared(self) -> None:
        run, group = self.running, self.group
        answers = [run.round.answers[member] for member in group.members]
        addresses = tuple(address for answer in answers if isinstance(answer, Prepared) for address in answer.addresses)
        if run.in_incident:
            self.change(recoveries=run.recoveries + 1)
        order = JoinOrder(group.epoch, group, addresses, run.version)
        self.open_round(Op.JOIN, dict.fromkeys(group.members, order))

    def _joined(self) -> None:
        self.state = replace(self.state, built=self.group)
        self._open_refit()

    def _open_refit(self) -> None:
        run, group = self.running, self.group
        self.change(is_opened=True)
        self.record(RefitOpened(group.epoch, run.version, group.shard_ids, self.state.policy.commit))
        order = ReadyOrder(group.epoch, run.version, run.start_bucket)
        self.open_round(Op.READY, dict.fromkeys(group.members, order))

    def _ready(self) -> None:
        run, group = self.running, self.group
        first = run.round.answers[TrainerId(0)]
        manifest = first.manifest if isinstance(first, Ready) else None
        assert manifest is not None, "no other answer fits"
        if run.manifest not in (None, manifest):
            return self.end("PlanMismatch", "trainer[0] changed its manifest between an attempt and its retry")
        if run.in_incident:
            self.change(resent_buckets=run.resent_buckets + manifest.num_buckets - run.start_bucket)
        self.change(manifest=manifest)
        order = TransferOrder(group.epoch, run.version, manifest, run.start_bucket, self.state.policy.commit)
        return self.open_round(Op.TRANSFER, dict.fromkeys(group.members, order))

    def _transferred(self) -> None:
        run, group = self.running, self.group
        sent = run.round.answers[TrainerId(0)]
        assert isinstance(sent, Sent), "no other answer fits"
        received = {s: a.digests for s in group.shard_ids if isinstance(a := run.round.answers[s], Received)}
        wrong = judge_digests(sent.digests, received)
        if wrong is None:
            order = CommitOrder(group.epoch, run.version, sent.digests)
            return self.open_round(Op.COMMIT, dict.fromkeys(group.shard_ids, order))
        self._open_incident()
        if wrong.culprit is not None:
            self._condemn([Finding(wrong.culprit, 1, wrong.why)])
        elif run.link_resends:
            return self.end("DigestMismatch", f"{wrong.why}, also after it was resent")
        else:
            self.change(link_resends=1, rolls_back=True)
        return self._fence_or(self._settle)

    def _committed(self) -> None:
        run, group = self.running, self.group
        if self._ends_for_want_of(len(self.surviving_shards())):
            return
        self.record(RefitLanded(group.epoch, run.version))
        assert run.manifest is not None, "a transfer has a manifest"
        landed = Landed(run.version, group, run.manifest, run.rebuilt, run.recoveries, run.findings, run.resent_buckets)
        self.commands.append(Finish(landed))
        self.run = None

    # -- the incident

    def _open_incident(self) -> None:
        self.state = replace(self.state, built=None)
        self.change(in_incident=True)

    def _investigate(self, failed: Member | None = None) -> None:
        """Break off the attempt and ask everybody who may still live; what still comes of it is evidence too."""
        self._open_incident()
        self.change(interrupted=self.running.round)
        if failed is not None:
            self.stop_expecting(failed)
        self._ask()

    def _ask(self, seconds: float | None = None) -> None:
        alive = [member for member in self.members if not self.is_dead(member)]
        self.open_round(Op.PING, dict.fromkeys(alive, PingOrder(self.state.epoch)), seconds=seconds)

    def _weigh(self, late_s: float = 0.0, *, final: bool = False) -> None:
        """Give the verdict once the evidence is complete, or its time is up, or the dead speak for themselves."""
        run = self.running
        if run.round.waiting and not final:
            return None
        if run.is_for_silence and not final:
            return self.resume()
        judgement = judge(self.state.policy, run, self.group, late_s)
        if run.stalled is not None:
            return self._looked(judgement)
        is_complete = run.interrupted is not None and not run.interrupted.waiting
        if not (final or is_complete or judgement.is_only_deaths):
            return None
        if judgement.again_in_s is not None and self.may_ask_again():
            return self.wait(judgement.again_in_s) if judgement.again_in_s > 0 else self._ask()
        return self._act_on(judgement, self._settle)

    def _looked(self, judgement: Judgement) -> None:
        told = told_by_look(self.running, judgement)
        self.resume()
        if told is not None:
            self._open_incident()
            self.change(interrupted=self.running.round)
            self._act_on(told, self._settle)

    def _act_on(self, judgement: Judgement, go_on: Callable[[], None]) -> None:
        self._condemn(judgement.findings)
        if judgement.error is not None:
            self.end(judgement.error, judgement.sentence, judgement.named)
        else:
            self._fence_or(go_on)

    def _condemn(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            assert isinstance(finding.member, ShardId), "a trainer's loss ends the run"
            self.change(findings=(*self.running.findings, finding))
            self.stop_expecting(finding.member)
            self.record(Condemned(finding.member, str(finding.rule), finding.why))

    def _fence_or(self, go_on: Callable[[], None]) -> None:
        """Fence whoever is condemned and not yet fenced; if nobody is, ``go_on``."""
        fenced, processes = self.running.fenced, self.state.processes
        orders = {
            each.member: FenceOrder(self.state.epoch, processes.get(each.member, ()), each.why)
            for each in self.running.findings
            if each.member not in fenced
        }
        if orders:
            self.open_round(Op.FENCE, orders)
        else:
            go_on()

    def _fenced(self) -> None:
        self.change(fenced=self.condemned)
        if self.running.membership is None and self.running.ending is None:
            self._probed()
        else:
            self._settle()

    def _settle(self) -> None:
        run = self.running
        if run.ending is not None:
            return self._roll_back(run.ending)
        if self._ends_for_want_of(len(self.surviving_shards())) or self._ends_for_want_of_budget():
            return None
        who = describe(set(self.condemned)) or "a link"
        reason = f"refit v{run.version} is aborted: {who} failed"
        order = SettleOrder(self.state.epoch, run.version, reason, roll_back=run.rolls_back)
        asked = [member for member in self.survivors() if member not in run.settled]
        return self.open_round(Op.SETTLE, dict.fromkeys(asked, order))

    def _learn_settled(self, member: Member, answer: Settled) -> None:
        self.change(settled={**self.running.settled, member: answer})
        self.know(member, answered_abort=True)
        self.stop_expecting(member)  # it has left its call: what that call returns is no news any more
        through = mixture(self.running, answer)
        if through is not None and isinstance(member, ShardId):
            self.record(WeightsPartial(member, self.state.epoch, self.running.version, through))

    def _settled(self, late_s: float = 0.0) -> None:
        run = self.running
        if run.ending is not None:
            return self._wind_up(run.ending)
        condemned = self.condemned
        members = [member for member in self.members if member not in condemned]
        judgement = judge_settle(self.state.policy, run, members, late_s)
        if judgement.again_in_s is not None and self.may_ask_again():
            return self._settle()
        for member in run.round.waiting:
            self.know(member, answered_abort=False)
        return self._act_on(judgement, self._settle if judgement.findings else self._recover)

    def _recover(self) -> None:
        run, shards = self.running, self.surviving_shards()
        start = 0
        if run.manifest is not None and not run.rolls_back:
            lowest = min(run.settled[shard].applied_through for shard in shards)
            start = 1 + max(-1, min(lowest, run.manifest.num_buckets - 1))
        self.change(start_bucket=start)
        self._open_epoch(self._plan(shards))

    # -- the end

    def _ends_for_want_of(self, shards_left: int) -> bool:
        run, floor = self.running, self.state.policy.min_healthy
        if shards_left >= max(floor, 1):
            return False
        because = "; ".join(f"{finding.member}: {finding.why}" for finding in run.findings)
        because = f" ({because})" if because else ""
        if shards_left == 0:
            self.end("NoSurvivingShards", f"no shard is left to receive v{run.version}{because}")
        else:
            self.end("FleetExhausted", f"{shards_left} of min_healthy={floor} shards are left{because}")
        return True

    def _ends_for_want_of_budget(self) -> bool:
        run, limit = self.running, self.state.policy.max_recoveries
        if run.recoveries < limit:
            return False
        who = "; ".join(f"{finding.member}: {finding.why}" for finding in run.findings) or "nobody was condemned"
        self.end(
            "RecoveryBudgetExhausted",
            f"refit v{run.version} failed again after {run.recoveries} of max_recoveries_per_refit={limit}: {who}",
        )
        return True

    def end(self, error: str, sentence: str, named: tuple[Finding, ...] = ()) -> None:
        """Wind up: let every survivor leave its call and roll back, then finish with ``error``."""
        run = self.running
        evidence = tuple(run.evidence[member] for member in self.members if member in run.evidence)
        self.change(ending=Ended(error, sentence, (*run.findings, *named), evidence))
        self._fence_or(self._settle)

    def _roll_back(self, ended: Ended) -> None:
        if self.running.membership is None:
            return self._wind_up(ended)
        self._open_incident()
        order = SettleOrder(self.state.epoch, self.running.version, ended.sentence, roll_back=True)
        return self.open_round(Op.SETTLE, dict.fromkeys(self.survivors(), order))

    def _wind_up(self, ended: Ended) -> None:
        if self.running.is_opened:
            self.record(RefitEnded(self.state.epoch, self.running.version, ended.error))
        self.commands.append(Finish(ended))
        self.state = replace(self.state, built=None)
        self.run = None
