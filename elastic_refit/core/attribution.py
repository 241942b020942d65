"""Who caused a failed refit, by evidence: five rules, evaluated for every rank.

A pure function of what was observed and of what the ledger believed when the refit opened. Its order is fixed: rules 1
to 3 name all whom they can; only if they name nobody is a lone suspect at the one stalled link named by rule 4; else
nobody is.

What must never happen here: a rank named for what a victim said of it, for being slower than its neighbours within its
own limits, for waiting, or for silence that the observer's own lateness explains. Every rank of a broken chain reports
an error, and the one to blame often reports last or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from elastic_refit.core.deadlines import Deadlines
from elastic_refit.core.evidence import Beacon, MemberEvidence
from elastic_refit.core.ids import Member, ShardId, TrainerId
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

__all__ = ["ON_TIME_SHARE", "AttributionView", "attribute"]

ON_TIME_SHARE = 0.25
"""Share of ``ping_s`` by which the observer may be late and still call a missing answer silence."""

_PHASE_LIMITS = {
    "preparing": ("prepare_s",),
    "pausing": ("pause_s",),
    "packing": ("pack_s",),
    "applying": ("apply_s",),
    "finalizing": ("finalize_s",),
    "aborted": ("pack_s", "apply_s", "finalize_s"),
}
"""By phase, the limits of the work that it may be. In any other phase nothing takes long: ``stall_s`` is the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributionView:
    """What the verdict may know besides the evidence."""

    epoch: int
    """Of the failed attempt; beacons of another one count for nothing."""
    num_buckets: int | None
    """None: nobody has seen the manifest yet, so no byte has moved."""
    deadlines: Deadlines
    suspects: frozenset[ShardId] = frozenset()
    """Suspected when the refit opened. A hang makes suspects of its own; those are not here."""
    chain: tuple[int, ...] | None = None
    """Ranks in the order in which bytes travel, the root first; None where no link is known (NCCL)."""
    observer_late_s: float = 0.0
    """The most by which the observer's own loop was late while it gathered the evidence."""


def attribute(evidence: Sequence[MemberEvidence], view: AttributionView) -> Verdict:
    """The verdict on one failed attempt. The order of ``evidence`` does not matter."""
    case = _Case(tuple(sorted(evidence, key=lambda each: each.rank)), view)
    findings = _findings(case)
    return (
        _ends_the_run(case, findings)
        or (Culprits(findings) if findings else None)
        or _isolation(case)
        or _not_yet(case)
        or _stalled_link(case)
    )


@dataclass(frozen=True)
class _Case:
    """The evidence in rank order, and what follows from it at once."""

    ranks: tuple[MemberEvidence, ...]
    view: AttributionView

    @cached_property
    def by_rank(self) -> Mapping[int, MemberEvidence]:
        """Who speaks for a rank."""
        return {rank: each for each in self.ranks for rank in range(each.rank, each.rank + each.width)}

    @cached_property
    def chain(self) -> tuple[int, ...]:
        """The known ranks in the order in which bytes travel, each member that speaks for several of them once."""
        order = self.view.chain or ()
        return tuple(dict.fromkeys(self.by_rank[rank].rank for rank in order if rank in self.by_rank))

    @cached_property
    def cursors(self) -> Mapping[int, Beacon]:
        """The progress of every rank of which it is known."""
        known = {each.rank: _progress(each, self.view) for each in self.ranks}
        return {rank: beacon for rank, beacon in known.items() if beacon is not None}

    @cached_property
    def frontier(self) -> int:
        """The lowest bucket that is not completed by all whose progress is known; the commit if there is none."""
        lowest = min((beacon.completed for beacon in self.cursors.values()), default=-2)
        return lowest + 1 if self.view.num_buckets is None else min(lowest + 1, self.view.num_buckets)

    @cached_property
    def silent(self) -> frozenset[int]:
        """Ranks that were asked and gave no sign of life."""
        return frozenset(
            each.rank
            for each in self.ranks
            if each.answered_ping is False and not each.answered_abort and not self._beats(each)
        )

    @cached_property
    def heard(self) -> frozenset[int]:
        """Ranks that gave a sign of life: an answer, a fresh beacon, or, if nobody asked, an error of their own."""
        return frozenset(
            each.rank
            for each in self.ranks
            if each.died is None and each.rank not in self.silent and (_spoke(each) or self._beats(each))
        )

    def _beats(self, each: MemberEvidence) -> bool:
        return each.beacon_age_s is not None and each.beacon_age_s <= self.view.deadlines.ping_s

    @cached_property
    def is_observer_late(self) -> bool:
        return self.view.observer_late_s > ON_TIME_SHARE * self.view.deadlines.ping_s

    @cached_property
    def answered_abort(self) -> frozenset[int]:
        return frozenset(each.rank for each in self.ranks if each.answered_abort)

    def share(self, ranks: frozenset[int]) -> str:
        return f"{sum(self.by_rank[rank].width for rank in ranks)} of {len(self.by_rank)} ranks"


def _progress(each: MemberEvidence, view: AttributionView) -> Beacon | None:
    """The cursors of a rank, of this epoch only; one that finished has moved all bytes, whatever its beacon said."""
    beacon = each.beacon if each.beacon is not None and each.beacon.epoch == view.epoch else None
    if not each.finished or view.num_buckets is None:
        return beacon
    end = view.num_buckets if isinstance(each.member, TrainerId) else view.num_buckets - 1
    beacon = beacon or Beacon(view.epoch, phase="done", applied=end)
    return replace(beacon, entered=max(beacon.entered, end), completed=max(beacon.completed, end))


def _spoke(each: MemberEvidence) -> bool:
    return bool(each.answered_ping or each.answered_abort or each.testimony or each.fault)


def _findings(case: _Case) -> tuple[Finding, ...]:
    """Whom rules 1 to 3 name; a member once, by the first rule that does: the dead are silent and behind as well."""
    named: dict[Member, Finding] = {}
    rules: tuple[Callable[[_Case, MemberEvidence], str | None], ...] = (_own_fault, _silence, _lag)
    for number, rule in enumerate(rules, start=1):
        for each in case.ranks:
            why = rule(case, each)
            if why is not None:
                named.setdefault(each.member, Finding(each.member, number, why))
    in_rank_order = dict.fromkeys(each.member for each in case.ranks)
    return tuple(named[member] for member in in_rank_order if member in named)


# -- Rule 1: own fault. What others say of a rank is not in it, whatever they lost.


def _own_fault(case: _Case, each: MemberEvidence) -> str | None:
    if each.died is not None:
        return f"died at rank {each.rank}: {each.died}"
    if each.fault is not None:
        return f"raised at rank {each.rank}: {each.fault}"
    if each.context_lost is not None and isinstance(each.member, ShardId):
        return f"lost its device context at rank {each.rank}: {each.context_lost}"
    return None


# -- Rule 2: silent.


def _silence(case: _Case, each: MemberEvidence) -> str | None:
    """Counts only if the observer was on time and somebody else answered the same question."""
    limits = case.view.deadlines
    if case.is_observer_late:
        return None
    if each.rank in case.silent and case.heard:
        others = case.share(case.heard)
        return f"is silent: rank {each.rank} did not answer a ping within {limits.ping_s:g} s and {others} were heard"
    if each.answered_abort is False and case.answered_abort:
        others = case.share(case.answered_abort)
        return f"did not answer the abort order at rank {each.rank} within {limits.settle_s:g} s and {others} did"
    return None


# -- Rule 3: behind the frontier.


def _lag(case: _Case, each: MemberEvidence) -> str | None:
    overdue_s = _overdue_s(case, each)
    if overdue_s is None or overdue_s < 0:
        return None
    beacon = case.cursors[each.rank]
    return (
        f"is behind: rank {each.rank} made no progress in {beacon.phase} for {beacon.tick_age_s:g} s, "
        f"{overdue_s:g} s over its limit, waits on no peer, and holds up bucket {case.frontier}"
    )


def _overdue_s(case: _Case, each: MemberEvidence) -> float | None:
    """By how much a rank has overstayed work of its own that others wait for; None if it owes nobody anything."""
    beacon = case.cursors.get(each.rank)
    if beacon is None or each.testimony is not None or each.rank in case.silent:
        return None
    if beacon.phase == "done" or _waits_on_peer(case, beacon) or not _is_behind(case, each.member, beacon):
        return None
    limits = _PHASE_LIMITS.get(beacon.phase, ("stall_s",))
    return beacon.tick_age_s - max(float(getattr(case.view.deadlines, limit)) for limit in limits)


def _is_behind(case: _Case, member: Member, beacon: Beacon) -> bool:
    """Before the frontier while others have come to it; or, once all bytes are in, a shard that has not committed.

    Before the first bucket the others come to a barrier: they are done with what they were asked, and wait.
    """
    f = case.frontier
    others = case.cursors.values()
    if f == case.view.num_buckets and isinstance(member, ShardId) and beacon.applied < f:
        return True
    is_awaited = any(other.entered >= f or (f <= 0 and other.phase == "done") for other in others)
    return beacon.entered < f and is_awaited


def _waits_on_peer(case: _Case, beacon: Beacon) -> bool:
    """A trainer that gathers waits for the other trainers, if there are any."""
    if beacon.waiting_on == "source":
        return sum(isinstance(each.member, TrainerId) for each in case.ranks) > 1
    return beacon.waiting_on in ("recv", "send")


# -- What ends the run whoever is named.

_Named = tuple[Finding, ...]


def _ends_the_run(case: _Case, findings: _Named) -> ContextLost | TrainerFault | RefitRejected | None:
    for each in case.ranks:
        if each.context_lost is not None and isinstance(each.member, TrainerId):
            return ContextLost(findings, each.member, each.context_lost)
    if any(isinstance(finding.member, TrainerId) for finding in findings):
        return TrainerFault(findings)
    return _rejection(case, findings)


def _rejection(case: _Case, findings: _Named) -> RefitRejected | None:
    """Several shards raised the same at the same bucket, and every other shard has not come to it or cannot say."""
    raised = [each for each in case.ranks if each.fault is not None and isinstance(each.member, ShardId)]
    refusers = {each.member for each in raised}
    signatures = {each.fault_signature or each.fault for each in raised}
    buckets = {case.cursors[each.rank].applied + 1 for each in raised if each.rank in case.cursors}
    if len(refusers) < 2 or len(signatures) > 1 or len(buckets) != 1:
        return None
    (bucket,) = buckets
    others = [each for each in case.ranks if isinstance(each.member, ShardId) and each.member not in refusers]
    if any(_may_have_applied(case, each, bucket) for each in others):
        return None
    named = tuple(finding for finding in findings if finding.member in refusers)
    return RefitRejected(named, bucket, str(raised[0].fault))


def _may_have_applied(case: _Case, each: MemberEvidence, bucket: int) -> bool:
    cursor = case.cursors.get(each.rank)
    return each.rank in case.heard if cursor is None else cursor.applied >= bucket


# -- Nobody is named.


def _isolation(case: _Case) -> CoordinatorIsolated | None:
    alive = [each for each in case.ranks if each.died is None]
    if case.is_observer_late or not alive or not all(each.rank in case.silent for each in alive):
        return None
    return CoordinatorIsolated(tuple(dict.fromkeys(each.member for each in alive)))


def _not_yet(case: _Case) -> Unattributed | None:
    """Somebody may still be named: asking again tells more than a guess now."""
    if case.is_observer_late and case.silent:
        late_s = case.view.observer_late_s
        return Unattributed(
            f"{case.share(case.silent)} looked silent, but the observer itself was {late_s:g} s late",
            decidable_in_s=0.0,
        )
    working = {each.rank: overdue_s for each in case.ranks if (overdue_s := _overdue_s(case, each)) is not None}
    if not working or any(each.testimony for each in case.ranks):
        return None
    rank, overdue_s = max(working.items(), key=lambda item: item[1])
    phase = case.cursors[rank].phase
    return Unattributed(
        f"rank {rank} ({case.by_rank[rank].member}) is in {phase} and within its limit for another {-overdue_s:g} s",
        decidable_in_s=-overdue_s,
    )


def _stalled_link(case: _Case) -> Culprits | LinkFault | Unattributed:
    """Rule 4, and rule 5 where it names nobody."""
    edges = _broken_edges(case) or _waiting_edges(case)
    suspect = _sole_suspect(case, edges)
    if suspect is not None:
        return Culprits((suspect,))
    if len(edges) == 1:
        (edge, shown_by), *_ = edges.items()
        return LinkFault(edge, _members(case, edge), case.frontier, shown_by)
    found = ", ".join(f"{up}-{down}" for up, down in sorted(edges)) or "none"
    return Unattributed(
        f"no rank died or raised, {case.share(case.heard)} were heard, none is behind bucket {case.frontier} by its "
        f"own doing, and links that look stalled are: {found}"
    )


_Edges = Mapping[tuple[int, int], str]
"""From rank, to rank, and what shows it."""


def _broken_edges(case: _Case) -> _Edges:
    """Links that somebody lost, without those that broke only because their other end had lost something itself."""
    position = {rank: at for at, rank in enumerate(case.chain)}
    edges = {}
    for each in case.ranks:
        lost = case.by_rank.get(each.testimony.peer) if each.testimony and each.testimony.peer is not None else None
        if (
            lost is None
            or lost is each
            or (lost.testimony is not None and not _is_about(case, lost.testimony.peer, each.rank))
        ):
            continue
        up, down = sorted((each.rank, lost.rank), key=lambda rank: position.get(rank, rank))
        edges[up, down] = f"rank {each.rank} lost rank {lost.rank}, which is not dead"
    return edges


def _waiting_edges(case: _Case) -> _Edges:
    """Links of the chain where the receiver waits for the frontier and the sender has it, or waits to send it."""
    edges = {}
    for up, down in pairwise(case.chain):
        sender, receiver = case.cursors.get(up), case.cursors.get(down)
        if sender is None or receiver is None or not _waits(case, receiver, "recv", up):
            continue
        has_it = sender.completed >= case.frontier or _waits(case, sender, "send", down)
        if receiver.completed < case.frontier and has_it:
            edges[up, down] = f"rank {down} waits to receive what rank {up} has, and both are alive"
    return edges


def _waits(case: _Case, beacon: Beacon, direction: str, peer: int) -> bool:
    """A beacon that names no peer means the neighbour."""
    is_with = beacon.waiting_peer is None or _is_about(case, beacon.waiting_peer, peer)
    return beacon.waiting_on == direction and is_with


def _is_about(case: _Case, named: int | None, rank: int) -> bool:
    """Whether the rank that was ``named`` is one that the evidence of ``rank`` speaks for."""
    return named is not None and case.by_rank.get(named) is case.by_rank[rank]


def _sole_suspect(case: _Case, edges: _Edges) -> Finding | None:
    """Rule 4: the one shard at the stalled link that was suspected before the refit opened, unless it finished."""
    if len(edges) == 1:
        (up, down), *_ = edges
        near, where = {up, down}, f"at the stalled link from rank {up} to rank {down}"
    elif not edges and case.view.chain is None:
        near = {rank for rank, beacon in case.cursors.items() if beacon.completed < case.frontier}
        where = f"among the ranks that have not completed bucket {case.frontier}"
    else:
        return None
    suspects = {case.by_rank[rank].member for rank in near} & case.view.suspects
    if len(suspects) != 1:
        return None
    (suspect,) = suspects
    if all(each.finished for each in case.ranks if each.member == suspect):
        return None
    return Finding(suspect, 4, f"was suspected before the refit opened, and is the only such shard {where}")


def _members(case: _Case, edge: tuple[int, int]) -> tuple[Member, Member]:
    up, down = edge
    return case.by_rank[up].member, case.by_rank[down].member
