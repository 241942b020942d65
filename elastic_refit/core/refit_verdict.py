"""From the evidence of a failed attempt to what the protocol does about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from elastic_refit.core.attribution import AttributionView, attribute
from elastic_refit.core.ids import ShardId
from elastic_refit.core.membership import Membership
from elastic_refit.core.refit_state import Ended, RefitPolicy, Running
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

__all__ = ["Judgement", "WrongDigests", "judge", "judge_digests"]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whom the protocol condemns, or how it ends. ``is_only_deaths``: deaths need no further corroboration."""

    findings: tuple[Finding, ...]
    ended: Ended | None
    is_only_deaths: bool


def judge(policy: RefitPolicy, run: Running, group: Membership, observer_late_s: float) -> Judgement:
    """Ask for the verdict on the failed attempt, and say what it means for the refit."""
    evidence = tuple(run.evidence[member] for member in group.members if member in run.evidence)
    view = AttributionView(
        epoch=group.epoch,
        num_buckets=None if run.manifest is None else run.manifest.num_buckets,
        deadlines=policy.deadlines,
        suspects=run.fleet.suspects,
        chain=tuple(range(group.world_size)) if policy.has_links else None,
        observer_late_s=observer_late_s,
    )
    verdict = attribute(evidence, view)
    only_deaths = bool(verdict.findings) and all(_is_death(run, finding) for finding in verdict.findings)
    error = _error_of(verdict)
    ended = None if error is None else Ended(error, verdict.sentence, verdict.findings, evidence)
    return Judgement(verdict.findings, ended, only_deaths)


def _is_death(run: Running, finding: Finding) -> bool:
    return run.evidence[finding.member].died is not None


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
    wrong = {shard: _differing(sent, digests) for shard, digests in received.items() if tuple(digests) != tuple(sent)}
    if not wrong:
        return None
    first, buckets = next(iter(wrong.items()))
    what = f"bucket {buckets[0]}" if buckets else f"{len(received[first])} of {len(sent)} buckets"
    if len(wrong) == 1:
        return WrongDigests(first, f"it alone holds other bytes than were sent: {what}")
    return WrongDigests(None, f"{len(wrong)} shards hold other bytes than were sent, {first} first: {what}")


def _differing(sent: Sequence[int], digests: Sequence[int]) -> list[int]:
    return [bucket for bucket, pair in enumerate(zip(sent, digests, strict=False)) if pair[0] != pair[1]]
