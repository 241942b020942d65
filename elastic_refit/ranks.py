"""A member of several ranks: what each is called, and how they answer as one.

The protocol knows members. A member says yes only if all its ranks do: it answers as the worst of them. What must never
happen here: an answer that is better than that of any rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from elastic_refit.core.evidence import Beacon, Testimony
from elastic_refit.core.ids import Member
from elastic_refit.core.membership import Membership
from elastic_refit.core.messages import Answer, Fault, Pong, Prepared, Received, Settled

__all__ = ["furthest_behind", "identities_in", "member_of", "rank_name", "worst_of"]

T = TypeVar("T")

_RANKS_DIFFER = -1
"""In place of a digest, which is never negative: the ranks of one member hold different bytes."""


def rank_name(member: Member, rank: int) -> str:
    """The name of the member's rank number ``rank``; the first one has the member's own."""
    return f"{member}/{rank}" if rank else str(member)


def identities_in(group: Membership) -> tuple[str, ...]:
    """Who each rank of the group is, by rank."""
    return tuple(rank_name(member, rank) for member in group.members for rank in range(len(group.ranks(member))))


def member_of(name: str) -> str:
    """The member's name in that of one of its ranks."""
    return name.partition("/")[0]


def worst_of(answers: Sequence[Answer], own: range = range(0)) -> Answer:
    """The member's answer to an order that each of its ranks has answered; ``own`` are its ranks in the epoch.

    A fault beats a testimony, and a testimony any success. A testimony about somebody else beats one about a sibling,
    whose own fault tells more.
    """
    for rank, answer in enumerate(answers):
        if isinstance(answer, Fault):
            sentence = answer.sentence if len(answers) == 1 else f"rank {rank}: {answer.sentence}"
            return Fault(answer.signature, sentence)
    testimonies = [answer for answer in answers if isinstance(answer, Testimony)]
    if testimonies:
        return min(testimonies, key=lambda each: (each.peer is None, each.peer in own))
    if (stray := _other_kind(answers)) is not None:
        return stray
    return _weakest(answers)


def furthest_behind(beacons: Sequence[Beacon]) -> Beacon:
    """The beacon of the rank that the others wait for; of equals the one that has been still for longest."""
    return min(beacons, key=lambda each: (each.epoch, each.entered, each.completed, each.applied, -each.tick_age_s))


def _other_kind(answers: Sequence[Answer]) -> Fault | None:
    kinds = sorted({type(answer).__name__ for answer in answers})
    if len(kinds) < 2:
        return None
    return Fault("RanksDiffer", f"its ranks gave answers of different kinds: {', '.join(kinds)}")


def _weakest(answers: Sequence[Answer]) -> Answer:
    """Of answers of one kind, none of them a failure."""
    match answers[0]:
        case Prepared():
            return _prepared([each for each in answers if isinstance(each, Prepared)])
        case Pong():
            return _pong([each for each in answers if isinstance(each, Pong)])
        case Received():
            return _received([each.digests for each in answers if isinstance(each, Received)])
        case Settled():
            return _settled([each for each in answers if isinstance(each, Settled)])
        case first if all(each == first for each in answers):
            return first
        case _:
            return Fault("RanksDiffer", f"its ranks gave different answers: {list(answers)}")


def _prepared(answers: Sequence[Prepared]) -> Prepared:
    addresses = tuple(address for each in answers for address in each.addresses)
    return Prepared(
        addresses, _united([each.versions for each in answers]), _united([each.processes for each in answers])
    )


def _pong(answers: Sequence[Pong]) -> Pong:
    return Pong(furthest_behind([each.beacon for each in answers]), _united([each.processes for each in answers]))


def _received(digests: Sequence[tuple[int, ...]]) -> Received:
    """Whose bytes are right is for who knows the sender's to say; where ranks differ, one of them has others."""
    if len({len(each) for each in digests}) > 1:
        return Received(min(digests, key=len))
    return Received(tuple(each[0] if len(set(each)) == 1 else _RANKS_DIFFER for each in zip(*digests, strict=True)))


def _settled(answers: Sequence[Settled]) -> Settled:
    versions = {each.serving_version for each in answers}
    return Settled(
        applied_through=min(each.applied_through for each in answers),
        released_s=max(each.released_s for each in answers),
        serving_version=answers[0].serving_version if len(versions) == 1 else None,
        is_beside=len(versions) == 1 and all(each.is_beside for each in answers),
        furthest=max(each.applied_through for each in answers),
    )


def _united(parts: Sequence[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(item for part in parts for item in part))
