"""From what is known to what the protocol does about it: of one answer, of a round, of a failed attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from elastic_refit.core.attribution import ON_TIME_SHARE, AttributionView, attribute
from elastic_refit.core.evidence import MemberEvidence, Testimony
from elastic_refit.core.ids import Member, ShardId, TrainerId
from elastic_refit.core.manifest import differing_buckets
from elastic_refit.core.membership import Membership
from elastic_refit.core.messages import (
    Answer,
    Committed,
    Done,
    Fenced,
    Op,
    Pong,
    Prepared,
    Ready,
    Received,
    Sent,
    Settled,
    describe,
)
from elastic_refit.core.refit_state import RefitPolicy, Running
from elastic_refit.core.verdict import (
    ContextLost,
    CoordinatorIsolated,
    Culprits,
    Finding,
    LinkFault,
    RefitRejected,
    TrainerFault,
    Unattributed,
    Verdict,
)

__all__ = [
    "Judgement",
    "WrongDigests",
    "judge",
    "judge_digests",
    "judge_probe",
    "judge_settle",
    "misfit",
    "mixture",
    "told_by_look",
]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whom the protocol condemns, and the error that ends the refit, if one does.

    ``findings`` are shards. ``named`` are not condemned, and belong into the error: trainers, and shards that refused
    the weights. ``again_in_s``: asking again after that may tell more, and the rest is only what follows if it may not
    be asked again. ``is_only_deaths``: what is named is dead, which nothing still to come can change.
    """

    findings: tuple[Finding, ...] = ()
    error: str | None = None
    sentence: str = ""
    named: tuple[Finding, ...] = ()
    again_in_s: float | None = None
    is_only_deaths: bool = False


# -- a failed attempt


def judge(policy: RefitPolicy, run: Running, group: Membership, observer_late_s: float) -> Judgement:
    """Ask for the verdict on the failed attempt, and say what it means for the refit."""
    view = AttributionView(
        epoch=group.epoch,
        num_buckets=None if run.manifest is None else run.manifest.num_buckets,
        deadlines=policy.deadlines,
        suspects=run.fleet.suspects,
        chain=tuple(range(group.world_size)) if policy.has_links else None,
        observer_late_s=observer_late_s,
    )
    verdict = attribute([run.evidence[member] for member in group.members if member in run.evidence], view)
    condemned = () if isinstance(verdict, RefitRejected) else _shards(verdict.findings)
    return Judgement(
        condemned,
        _error_of(verdict),
        verdict.sentence,
        named=tuple(finding for finding in verdict.findings if finding not in condemned),
        again_in_s=verdict.decidable_in_s if isinstance(verdict, Unattributed) else None,
        is_only_deaths=bool(verdict.findings) and all(_is_dead(run, each.member) for each in verdict.findings),
    )


def _shards(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    return tuple(finding for finding in findings if isinstance(finding.member, ShardId))


def _is_dead(run: Running, member: Member) -> bool:
    known = run.evidence.get(member)
    return known is not None and known.died is not None


def _error_of(verdict: Verdict) -> str | None:
    """The error that ends the refit; None where it can go on without the culprits."""
    match verdict:
        case Culprits():
            return None
        case TrainerFault():
            return "TrainerLost"
        case RefitRejected():
            return "RefitRejected"
        case ContextLost():
            return "ContextLost"
        case CoordinatorIsolated():
            return "CoordinatorLost"
        case LinkFault() | Unattributed():
            return "UnattributedHang"
        case never:
            assert_never(never)


def told_by_look(run: Running, judgement: Judgement) -> Judgement | None:
    """What a look at the round that ``run`` calls stalled may act on; None if the attempt goes on.

    It is broken off only for somebody that holds it up: whoever has done what the round asks of it may be silent, or
    dead. While nobody has to move (a look for silence), nobody is named for standing still.
    """
    waiting = run.stalled.waiting if run.stalled is not None else frozenset[Member]()

    def counts(finding: Finding) -> bool:
        return finding.rule <= 2 or (finding.member in waiting and not run.is_for_silence)

    findings, named = (tuple(filter(counts, each)) for each in (judgement.findings, judgement.named))
    if not any(finding.member in waiting for finding in (*findings, *named)):
        return None
    return replace(judgement, findings=findings, named=named, error=judgement.error if named else None)


# -- the rounds that ask for a sign of life


def judge_probe(policy: RefitPolicy, run: Running, members: Sequence[Member], late_s: float) -> Judgement:
    """Who cannot take part, before a byte moves. A shard that is known dead just stays away."""
    asked = [member for member in members if isinstance(member, TrainerId) or not _is_dead(run, member)]
    question = f"a ping within {policy.round_s(Op.PROBE):g} s before the refit"
    return _judge_round(policy, run, asked, late_s, question)


def judge_settle(policy: RefitPolicy, run: Running, members: Sequence[Member], late_s: float) -> Judgement:
    """Who else was lost by the time that every survivor should have left its call."""
    question = f"the abort order within {policy.round_s(Op.SETTLE):g} s"
    judgement = _judge_round(policy, run, members, late_s, question)
    if judgement.again_in_s is None or judgement.error is not None:
        return judgement
    silent = describe(run.round.waiting)
    why = f"nobody is condemned: {silent} did not answer {question}, but the observer itself was {late_s:g} s late"
    return Judgement(error="UnattributedHang", sentence=why, again_in_s=judgement.again_in_s)


def _judge_round(
    policy: RefitPolicy, run: Running, members: Sequence[Member], late_s: float, question: str
) -> Judgement:
    """Own faults, and silence where the observer was on time and somebody else was heard."""
    alive = [member for member in members if not _is_dead(run, member)]
    silent = [member for member in alive if member in run.round.waiting]
    is_late = late_s > ON_TIME_SHARE * policy.deadlines.ping_s
    if silent == alive and silent and not is_late:
        why = f"the coordinator is cut off: none of {describe(set(silent))} answered {question}"
        return Judgement(error="CoordinatorLost", sentence=f"{why}; nobody is condemned")
    named = [own for member in members if (own := _own_fault(run.evidence.get(member))) is not None]
    if not is_late:
        named += [Finding(member, 2, f"no answer to {question}") for member in silent]
    trainers = tuple(finding for finding in named if isinstance(finding.member, TrainerId))
    if trainers:
        sentence = f"the run cannot go on: {'; '.join(map(str, trainers))}"
        return Judgement(_shards(named), "TrainerLost", sentence, named=trainers)
    return Judgement(_shards(named), again_in_s=0.0 if silent and is_late else None)


def _own_fault(known: MemberEvidence | None) -> Finding | None:
    if known is None or (known.died is None and known.fault is None):
        return None
    why = f"died: {known.died}" if known.died is not None else f"raised: {known.fault}"
    return Finding(known.member, 1, why)


def mixture(run: Running, answer: Settled) -> int | None:
    """Through which bucket a shard has taken in a version that it does not hold whole; None if it holds one whole.

    One that has every bucket and only has to commit is whole too, unless it is told to roll back; one that kept them
    beside its weights has mixed nothing.
    """
    through = answer.mixed_through
    if run.manifest is None or through is None:
        return None
    last = run.manifest.num_buckets - 1
    is_over = run.rolls_back or run.ending is not None
    return min(through, last) if answer.applied_through < last or is_over else None


# -- one answer

_FITTING: Mapping[Op, tuple[type[Answer], type[Answer]]] = {
    Op.PROBE: (Pong, Pong),
    Op.PREPARE: (Prepared, Prepared),
    Op.JOIN: (Done, Done),
    Op.READY: (Ready, Done),
    Op.TRANSFER: (Sent, Received),
    Op.COMMIT: (Committed, Committed),
    Op.PING: (Pong, Pong),
    Op.FENCE: (Fenced, Fenced),
    Op.SETTLE: (Settled, Settled),
}
"""What a trainer and what a shard answers when all is well. In an attempt, a testimony is an answer as well."""


def misfit(run: Running, op: Op, member: Member, answer: Answer) -> str | None:
    """Why ``answer`` is none to ``op``: an error of who gave it, like any other that it raises."""
    if isinstance(answer, Testimony) and op in (Op.PREPARE, Op.JOIN, Op.READY, Op.TRANSFER, Op.COMMIT):
        return None
    expected = _FITTING[op][isinstance(member, ShardId)]
    if not isinstance(answer, expected):
        return f"answered {op} with {type(answer).__name__} instead of {expected.__name__}"
    match answer:
        case Prepared():
            return _wrong_addresses(run, member, answer)
        case Committed() if answer.version != run.version:
            return f"committed v{answer.version} instead of v{run.version}"
        case Ready() if member == TrainerId(0) and answer.manifest is None:
            return "gave no manifest"
        case Sent() if member == TrainerId(0) and run.manifest is not None:
            given, needed = len(answer.digests), run.manifest.num_buckets
            return None if given == needed else f"gave {given} digests for {needed} buckets"
        case _:
            return None


def _wrong_addresses(run: Running, member: Member, answer: Prepared) -> str | None:
    assert run.membership is not None, "a round of the attempt needs a membership"
    given, width = len(answer.addresses), len(run.membership.ranks(member))
    return None if given == width else f"bound {given} listeners for {width} ranks"


# -- digests


@dataclass(frozen=True, slots=True)
class WrongDigests:
    """Some shards hold other bytes than were sent. ``culprit`` is the only one, or None where a link is the suspect."""

    culprit: ShardId | None
    why: str


def judge_digests(sent: Sequence[int], received: Mapping[ShardId, Sequence[int]]) -> WrongDigests | None:
    """Compare every shard's digests with the sender's; ``received`` is in rank order.

    One shard that differs alone is named. Several are the mark of a link: bytes altered on the way in are passed on, so
    that everybody from there on differs, and the first of them marks the hop.
    """
    wrong = {
        shard: differing_buckets(sent, digests) for shard, digests in received.items() if tuple(digests) != tuple(sent)
    }
    if not wrong:
        return None
    first, buckets = next(iter(wrong.items()))
    what = f"bucket {buckets[0]}" if buckets else f"{len(received[first])} of {len(sent)} buckets"
    if len(wrong) == 1:
        return WrongDigests(first, f"it alone holds other bytes than were sent: {what}")
    return WrongDigests(None, f"{len(wrong)} shards hold other bytes than were sent, {first} first: {what}")
