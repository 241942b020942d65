"""The refit protocol, as a pure machine: ``step(state, event) -> (state, commands)``.

A refit is a sequence of rounds; in each, every member concerned is asked one thing::

    PROBE → (PREPARE → JOIN, when the membership changed) → READY → TRANSFER → COMMIT → landed
       any failure after PROBE:  PING → FENCE → SETTLE → PREPARE → JOIN → READY → TRANSFER → COMMIT

``step`` is total: an event of another epoch, of somebody who is not in the group, or of a round that is over gives
:class:`Ignored` with the reason. What must never happen here: a condemnation without a finding, a byte before its
``RefitOpened`` is recorded, a membership that holds somebody who was condemned, a refit that neither lands nor ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, assert_never

from elastic_refit.core.events import (
    Condemned,
    EpochOpened,
    RefitEnded,
    RefitLanded,
    RefitOpened,
    ShardCommitted,
    WeightsPartial,
)
from elastic_refit.core.evidence import MemberEvidence, Testimony
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
)
from elastic_refit.core.refit_turn import ATTEMPT, Turn, everybody
from elastic_refit.core.refit_verdict import judge, judge_digests
from elastic_refit.core.verdict import Finding
from elastic_refit.errors import NoSurvivingShards

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
        case _:
            assert_never(event)
    return turn.result()


def _request(state: RefitState, event: RefitRequested) -> tuple[RefitState, tuple[Command, ...]]:
    if state.running is not None:
        return state, (Ignored(f"refit v{state.running.version} is in progress"),)
    nothing = Round(Op.PROBE, state.next_token, frozenset())
    turn = _Protocol(state, Running(event.version, event.fleet, nothing))
    if event.fleet.present:
        turn.open_round(Op.PROBE, {member: PingOrder(state.epoch) for member in everybody(event.fleet)})
    else:
        turn.end(NoSurvivingShards.__name__, "no shard is left to receive weights")
    return turn.result()


class _Protocol(Turn):
    """The rules. Each method is one of them, and names what it must not let happen where that is not plain."""

    def round_done(self) -> None:
        match self.running.round.op:
            case Op.PROBE:
                self._probed(0.0)
            case Op.PREPARE:
                self._prepared()
            case Op.JOIN:
                self._joined()
            case Op.READY:
                self._ready()
            case Op.TRANSFER:
                self._transferred()
            case Op.COMMIT:
                self._committed()
            case Op.PING:
                self._weigh(0.0, final=False)
            case Op.FENCE:
                self._fenced()
            case Op.SETTLE:
                self._settled()
            case never:
                assert_never(never)

    # -- events

    def answered(self, event: Answered) -> None:
        if event.epoch != self.state.epoch:
            return self.ignore(f"{event.op} of epoch {event.epoch}, now {self.state.epoch}")
        if event.member not in self.members:
            return self.ignore(f"{event.member} is not in the group")
        if self.is_dead(event.member) and event.op is not Op.FENCE:
            return self.ignore(f"{event.member} is dead; its {event.op} answer came late")
        if isinstance(event.answer, Fault | Testimony) and event.op is not Op.FENCE:
            return self._failed(event.op, event.member, event.answer)
        self._learn(event.member, event.answer)
        self._resolve(event.op, event.member, event.answer)
        return None

    def _learn(self, member: Member, answer: Answer) -> None:
        match answer:
            case Pong():
                self.know(member, answered_ping=True, beacon=answer.beacon)
                if answer.processes:
                    self.change(processes={**self.running.processes, member: answer.processes})
            case Prepared():
                self.change(processes={**self.running.processes, member: answer.processes})
            case Sent() | Received():
                self.know(member, finished=True)
            case Settled():
                self.change(applied_through={**self.running.applied_through, member: answer.applied_through})
            case Committed() if isinstance(member, ShardId):
                self.record(ShardCommitted(member, self.state.epoch, answer.version))
            case _:
                pass

    def _resolve(self, op: Op, member: Member, answer: Answer | None) -> None:
        """The member's call of ``op`` is over; go on if it was the last of its round."""
        current = self.running.round
        if op in ATTEMPT:
            self.change(outstanding=self.running.outstanding - {member})
        if op is current.op and member in current.waiting:
            answers = {**current.answers, member: answer} if answer is not None else current.answers
            self.change(round=replace(current, waiting=current.waiting - {member}, answers=answers))
            if not self.running.round.waiting:
                self.round_done()
        elif current.op is Op.PING:
            self._weigh(0.0, final=False)
        else:
            self.ignore(f"late {op} of {member} in round {current.op}")

    def _failed(self, op: Op, member: Member, failure: Fault | Testimony) -> None:
        if isinstance(failure, Fault):
            self.know(member, fault=failure.sentence, fault_signature=failure.signature)
        else:
            self.know(member, testimony=failure)
        if self.running.round.op in ATTEMPT:
            self.change(outstanding=self.running.outstanding - {member})
            self._investigate()
        else:
            self._resolve(op, member, failure)

    def died(self, member: Member, why: str) -> None:
        if member not in self.members or self.is_dead(member):
            return self.ignore(f"the death of {member} is known, or none of this refit's")
        current = self.running.round
        self.know(member, died=why)
        self.change(outstanding=self.running.outstanding - {member})
        if current.op in ATTEMPT:
            if not isinstance(current.answers.get(member), Committed):
                self._investigate()
        elif current.op is not Op.FENCE:
            self._resolve(current.op, member, None)
        return None

    def timed_out(self, event: RoundTimedOut) -> None:
        current = self.running.round
        if event.token != current.token:
            return self.ignore(f"the timer of round {event.token} is over")
        if current.op in ATTEMPT:
            return self._investigate()
        if current.op in {Op.PROBE, Op.PING}:
            for member in current.waiting:
                self.know(member, answered_ping=False)
        match current.op:
            case Op.PROBE:
                self._probed(event.observer_late_s)
            case Op.PING:
                self._weigh(event.observer_late_s, final=True)
            case Op.FENCE:
                self._fenced()
            case _:
                self._settled()
        return None

    # -- before the refit

    def _probed(self, late_s: float) -> None:
        facts = self.running.evidence
        lost = [m for m in self.members if isinstance(m, TrainerId) and not _is_well(facts.get(m))]
        silent = {m for m in self.running.fleet.present if not _is_well(facts.get(m)) and not self.is_dead(m)}
        if silent and late_s > self.state.policy.round_s(Op.PROBE) / 2:
            silent = set()  # our own loop was late: who seemed silent may just not have been heard
        elif len(lost) == self.running.fleet.num_trainers and len(silent) == len(self.running.fleet.present):
            return self.end("CoordinatorLost", "nobody answered the probe before the refit: the coordinator is cut off")
        if lost:
            return self.end("TrainerLost", f"{describe(set(lost))} did not answer before refit v{self.running.version}")
        if silent:
            why = f"no answer to a ping within {self.state.policy.round_s(Op.PROBE):g} s before the refit"
            self._condemn(Finding(shard, 2, why) for shard in sorted(silent))
        return self._fence_or(self._reconcile)

    def _reconcile(self) -> None:
        left = [s for s in sorted(self.running.fleet.present) if s not in self.condemned and not self.is_dead(s)]
        if self._ends_for_want_of(len(left)):
            return
        desired = self._plan(left, self.state.epoch + 1)
        if should_rebuild(desired, self.state.built):
            self._open_epoch(desired)
        else:
            assert self.state.built is not None
            self.change(membership=self.state.built, evidence={})
            self._open_refit()

    def _plan(self, shards: Iterable[ShardId], epoch: int) -> Membership:
        fleet = self.running.fleet
        return plan_membership(fleet.num_trainers, fleet.widths, shards, epoch=epoch)

    def _open_epoch(self, group: Membership) -> None:
        self.state = replace(self.state, epoch=group.epoch, built=None)
        self.change(membership=group, rebuilt=True, evidence={}, applied_through={})
        self.record(EpochOpened(group.epoch, self.state.coordinator))
        order = PrepareOrder(group.epoch, self.state.coordinator)
        self.open_round(Op.PREPARE, dict.fromkeys(group.members, order))

    # -- the attempt

    def _prepared(self) -> None:
        group = self.group
        answers = self.running.round.answers
        addresses: list[str] = []
        for member in group.members:
            answer = answers[member]
            assert isinstance(answer, Prepared)
            addresses.extend(answer.addresses)
        if len(addresses) != group.world_size:
            return self.end("RendezvousFailed", f"{len(addresses)} listeners for {group.world_size} ranks")
        if self.running.in_incident:
            self.change(recoveries=self.running.recoveries + 1)
        order = JoinOrder(group.epoch, group, tuple(addresses))
        self.open_round(Op.JOIN, dict.fromkeys(group.members, order))
        return None

    def _joined(self) -> None:
        self.state = replace(self.state, built=self.group)
        self._open_refit()

    def _open_refit(self) -> None:
        run, group = self.running, self.group
        self.record(RefitOpened(group.epoch, run.version, group.shard_ids))
        order = ReadyOrder(group.epoch, run.version, run.start_bucket)
        self.open_round(Op.READY, dict.fromkeys(group.members, order))

    def _ready(self) -> None:
        run, group = self.running, self.group
        first = run.round.answers[TrainerId(0)]
        manifest = first.manifest if isinstance(first, Ready) else None
        if manifest is None:
            return self.end("TrainerLost", "trainer[0] gave no manifest")
        if run.start_bucket and manifest != run.manifest:
            return self.end("PlanMismatch", "trainer[0] changed its manifest between an attempt and its retry")
        if run.in_incident:
            self.change(resent_buckets=run.resent_buckets + manifest.num_buckets - run.start_bucket)
        self.change(manifest=manifest)
        order = TransferOrder(group.epoch, run.version, manifest, run.start_bucket)
        self.open_round(Op.TRANSFER, dict.fromkeys(group.members, order))
        return None

    def _transferred(self) -> None:
        run, group = self.running, self.group
        sent = run.round.answers[TrainerId(0)]
        assert isinstance(sent, Sent)
        received = {s: a.digests for s in group.shard_ids if isinstance(a := run.round.answers[s], Received)}
        wrong = judge_digests(sent.digests, received)
        if wrong is None:
            order = CommitOrder(group.epoch, run.version, sent.digests)
            return self.open_round(Op.COMMIT, dict.fromkeys(group.shard_ids, order))
        self.change(in_incident=True)
        self.state = replace(self.state, built=None)
        if wrong.culprit is not None:
            self._condemn([Finding(wrong.culprit, 1, wrong.why)])
        elif run.link_resends:
            return self.end("DigestMismatch", f"{wrong.why}, also after it was resent")
        else:
            self.change(link_resends=1)
        return self._fence_or(self._settle)

    def _committed(self) -> None:
        run, group = self.running, self.group
        self.record(RefitLanded(group.epoch, run.version))
        assert run.manifest is not None, "a transfer has a manifest"
        landed = Landed(run.version, group, run.manifest, run.rebuilt, run.recoveries, run.findings, run.resent_buckets)
        self.commands.append(Finish(landed))
        self.run = None

    # -- the incident

    def _investigate(self) -> None:
        """Ask everybody who may still live; what comes back of the attempt meanwhile is evidence too."""
        self.state = replace(self.state, built=None)
        self.change(in_incident=True)
        alive = [member for member in self.members if not self.is_dead(member)]
        self.open_round(Op.PING, {member: PingOrder(self.state.epoch) for member in alive})

    def _weigh(self, late_s: float, *, final: bool) -> None:
        """Give the verdict once the evidence is complete, or its time is up, or the dead speak for themselves."""
        run = self.running
        if run.round.waiting and not final:
            return
        verdict = judge(self.state.policy, run, self.group, late_s)
        complete = final or not run.outstanding
        if not complete and not verdict.is_only_deaths:
            return
        if verdict.ended is not None:
            self.change(findings=(*run.findings, *verdict.findings))
            self.end(verdict.ended.error, verdict.ended.sentence)
        else:
            self._condemn(verdict.findings)
            self._fence_or(self._settle)

    def _condemn(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.change(findings=(*self.running.findings, finding))
            if isinstance(finding.member, ShardId):
                self.record(Condemned(finding.member, str(finding.rule), finding.why))

    def _fence_or(self, go_on: Any) -> None:
        """Fence whoever is condemned and not yet fenced; if nobody is, ``go_on``."""
        run = self.running
        orders = {
            f.member: FenceOrder(self.state.epoch, run.processes.get(f.member, ()), f.why)
            for f in run.findings
            if f.member not in run.fenced
        }
        if orders:
            self.open_round(Op.FENCE, orders)
        else:
            go_on()

    def _fenced(self) -> None:
        self.change(fenced=self.condemned)
        if self.running.membership is None:
            self._reconcile()
        else:
            self._settle()

    def _settle(self) -> None:
        run = self.running
        shards = [member for member in self.survivors() if isinstance(member, ShardId)]
        if self._ends_for_want_of(len(shards)) or self._ends_for_want_of_budget():
            return
        from_zero = run.link_resends > 0 and not run.findings
        order = SettleOrder(self.state.epoch, self._reason(), roll_back=from_zero)
        asked = (member for member in self.survivors() if member not in run.applied_through)
        self.open_round(Op.SETTLE, dict.fromkeys(asked, order))

    def _settled(self) -> None:
        run = self.running
        if run.ending is not None:
            return self._wind_up(run.ending)
        lost = {m: _lost_in_settle(run.evidence.get(m)) for m in self.members if m not in self.condemned}
        for member in run.round.waiting:
            silent = Finding(
                member, 2, f"no answer to the abort order within {self.state.policy.round_s(Op.SETTLE):g} s"
            )
            lost[member] = lost[member] or silent
        newly = [finding for finding in lost.values() if finding is not None]
        trainer = next((f for f in newly if isinstance(f.member, TrainerId)), None)
        if trainer is not None:
            return self.end("TrainerLost", f"{trainer.member}: {trainer.why}")
        if newly:
            self._condemn(newly)
            return self._fence_or(self._settle)
        return self._recover()

    def _recover(self) -> None:
        run = self.running
        shards = [member for member in self.survivors() if isinstance(member, ShardId)]
        manifest = run.manifest
        for shard in shards:
            through = run.applied_through[shard]
            known = run.evidence.get(shard)
            if through >= 0 and not (known is not None and known.finished):
                self.record(WeightsPartial(shard, self.state.epoch, run.version, through))
        start = min(run.applied_through[shard] for shard in shards) + 1 if manifest is not None else 0
        self.change(start_bucket=start)
        self._open_epoch(self._plan(shards, self.state.epoch + 1))

    # -- the end

    def _ends_for_want_of(self, shards_left: int) -> bool:
        run, floor = self.running, self.state.policy.min_healthy
        because = "; ".join(f"{finding.member}: {finding.why}" for finding in run.findings)
        if shards_left == 0:
            self.end("NoSurvivingShards", f"no shard is left to receive v{run.version}" + _because(because))
        elif shards_left < floor:
            self.end("FleetExhausted", f"{shards_left} of min_healthy={floor} shards are left" + _because(because))
        return shards_left < max(floor, 1)

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

    def end(self, error: str, sentence: str) -> None:
        """Wind up: let every survivor leave its call and roll back, then finish with ``error``."""
        run = self.running
        evidence = tuple(run.evidence[m] for m in self.members if m in run.evidence)
        ended = Ended(error, sentence, run.findings, evidence)
        self.change(ending=ended)
        if run.membership is None:
            return self._wind_up(ended)
        order = SettleOrder(self.state.epoch, sentence, roll_back=True)
        return self.open_round(Op.SETTLE, dict.fromkeys(self.survivors(), order))

    def _wind_up(self, ended: Ended) -> None:
        run = self.running
        if run.membership is not None:
            self.record(RefitEnded(self.state.epoch, run.version, ended.error))
        self.commands.append(Finish(ended))
        self.state = replace(self.state, built=None)
        self.run = None

    def _reason(self) -> str:
        who = describe(set(self.condemned))
        return f"refit v{self.running.version} is aborted: {who or 'a link'} failed"


def _is_well(known: MemberEvidence | None) -> bool:
    return known is not None and known.died is None and known.fault is None and known.answered_ping is True


def _lost_in_settle(known: MemberEvidence | None) -> Finding | None:
    if known is None or (known.died is None and known.fault is None):
        return None
    return Finding(known.member, 1, known.died or known.fault or "")


def _because(findings: str) -> str:
    return f" ({findings})" if findings else ""
