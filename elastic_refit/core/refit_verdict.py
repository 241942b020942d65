"""From the evidence of a failed attempt to what the protocol does about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_refit.core.ids import ShardId, TrainerId
from elastic_refit.core.membership import Membership
from elastic_refit.core.refit_state import Ended, Finding, RefitPolicy, Running

__all__ = ["Judgement", "WrongDigests", "judge", "judge_digests"]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whom the protocol condemns, or how it ends. ``is_only_deaths``: deaths need no further corroboration."""

    findings: tuple[Finding, ...] = ()
    ended: Ended | None = None
    is_only_deaths: bool = False


def judge(policy: RefitPolicy, run: Running, group: Membership, observer_late_s: float) -> Judgement:
    findings = []
    for member in group.members:
        known = run.evidence.get(member)
        if known is None:
            continue
        if known.died:
            findings.append(Finding(member, 1, known.died))
        elif known.fault:
            findings.append(Finding(member, 1, known.fault))
        elif known.answered_ping is False:
            findings.append(Finding(member, 2, "silent"))
    trainer = [f for f in findings if isinstance(f.member, TrainerId)]
    if trainer:
        return Judgement((), Ended("TrainerLost", f"{trainer[0].member}: {trainer[0].why}"), True)
    if not findings:
        return Judgement((), Ended("UnattributedHang", "nobody is named"), False)
    return Judgement(tuple(findings), None, all(run.evidence[f.member].died for f in findings))


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
