"""Who is in a refit group, and at which ranks: trainers at ``[0, T)``, then the surviving shards in index order.

What must never happen here: a hole or an overlap between two blocks of ranks. Neither errors later; it misaligns every
parameter in silence. So a :class:`Membership` that has one cannot be constructed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_refit.core.ids import Member, ShardId, TrainerId
from elastic_refit.errors import NoSurvivingShards

__all__ = ["Membership", "ShardSlot", "plan_membership", "should_rebuild"]


@dataclass(frozen=True, slots=True)
class ShardSlot:
    """Shard ``id`` holds ranks ``[offset, offset + width)``."""

    id: ShardId
    offset: int
    width: int


@dataclass(frozen=True, slots=True)
class Membership:
    """One refit group. ``epoch`` counts the groups that were built; ranks mean nothing outside it.

    Raises:
        ValueError: the blocks are not contiguous, not in index order, or there is no trainer or no shard.
    """

    epoch: int
    trainers: tuple[TrainerId, ...]
    shards: tuple[ShardSlot, ...]

    def __post_init__(self) -> None:
        if not self.trainers or not self.shards:
            raise ValueError("a membership has at least one trainer and one shard")
        if any(trainer.index != rank for rank, trainer in enumerate(self.trainers)):
            raise ValueError(f"trainers hold the ranks of their indices, in order; got {self.trainers}")
        last_index, free = -1, len(self.trainers)
        for slot in self.shards:
            if slot.id.index <= last_index or slot.offset != free or slot.width < 1:
                raise ValueError(
                    f"{slot.id} at rank {slot.offset}, width {slot.width}, does not follow rank {free - 1}"
                )
            last_index, free = slot.id.index, free + slot.width

    @property
    def world_size(self) -> int:
        last = self.shards[-1]
        return last.offset + last.width

    @property
    def members(self) -> tuple[Member, ...]:
        """Everybody, in rank order: trainers, then shards."""
        return (*self.trainers, *self.shard_ids)

    @property
    def shard_ids(self) -> tuple[ShardId, ...]:
        return tuple(slot.id for slot in self.shards)

    @property
    def offsets(self) -> dict[int, int]:
        """First rank of each shard, by shard index."""
        return {slot.id.index: slot.offset for slot in self.shards}

    def contains(self, member: Member) -> bool:
        return self._span(member) is not None

    def ranks(self, member: Member) -> range:
        """The contiguous ranks of ``member``.

        Raises:
            KeyError: ``member`` (this incarnation of it) is not in the group.
        """
        span = self._span(member)
        if span is None:
            raise KeyError(f"{member} is not in epoch {self.epoch}")
        return span

    def rank_of(self, member: Member) -> int:
        """The first rank of ``member``; KeyError as in :meth:`ranks`."""
        return self.ranks(member).start

    def member_at(self, rank: int) -> Member:
        """Who holds ``rank``.

        Raises:
            KeyError: the group has no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise KeyError(f"epoch {self.epoch} has ranks 0 to {self.world_size - 1}, not {rank}")
        if rank < len(self.trainers):
            return self.trainers[rank]
        return self.shards[bisect_right(self.shards, rank, key=lambda slot: slot.offset) - 1].id

    def to_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "trainers": len(self.trainers),
            "shards": [[slot.id.index, slot.id.incarnation, slot.offset, slot.width] for slot in self.shards],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Membership:
        """The inverse of :meth:`to_dict`; ValueError as in the constructor."""
        return cls(
            epoch=data["epoch"],
            trainers=_trainers(data["trainers"]),
            shards=tuple(
                ShardSlot(ShardId(index, incarnation), offset, width)
                for index, incarnation, offset, width in data["shards"]
            ),
        )

    def _span(self, member: Member) -> range | None:
        if isinstance(member, TrainerId):
            return range(member.index, member.index + 1) if 0 <= member.index < len(self.trainers) else None
        at = bisect_left(self.shards, member.index, key=lambda slot: slot.id.index)
        if at == len(self.shards) or self.shards[at].id != member:
            return None
        slot = self.shards[at]
        return range(slot.offset, slot.offset + slot.width)


def plan_membership(
    trainers: int, widths: Sequence[int], surviving: Iterable[ShardId], *, epoch: int = 0
) -> Membership:
    """Pack ``trainers`` trainer ranks and the ``surviving`` shards into one group without holes.

    ``widths[i]`` is the number of ranks of shard index ``i``. The order of ``surviving`` does not matter and
    duplicates collapse.

    Raises:
        ValueError: no trainer, a width below 1, an index without a width, or two incarnations of one index.
        NoSurvivingShards: ``surviving`` is empty.
    """
    if trainers < 1:
        raise ValueError(f"a refit has at least one trainer, not {trainers}")
    narrow = next((index for index, width in enumerate(widths) if width < 1), None)
    if narrow is not None:
        raise ValueError(f"shard[{narrow}] has width {widths[narrow]}; a shard has at least one rank")
    seats: dict[int, ShardId] = {}
    for shard in surviving:
        seated = seats.setdefault(shard.index, shard)
        if seated != shard:
            raise ValueError(f"{seated} and {shard} are two incarnations of one shard; only one can be a member")
        if not 0 <= shard.index < len(widths):
            raise ValueError(f"{shard} is none of the {len(widths)} shards that have a width")
    slots: list[ShardSlot] = []
    free = trainers
    for index in sorted(seats):
        slots.append(ShardSlot(seats[index], free, widths[index]))
        free += widths[index]
    if not slots:
        raise NoSurvivingShards(f"none of {len(widths)} shards is left to receive weights", num_shards=len(widths))
    return Membership(epoch, _trainers(trainers), tuple(slots))


def should_rebuild(desired: Membership, built: Membership | None, *, force: bool = False) -> bool:
    """Whether the group that is built cannot serve as ``desired``.

    Compares who is in it, incarnations and widths included, as sets and never by epoch: "a shard is absent" is not
    "something changed". ``force`` rebuilds anyway, as after an abort.
    """
    return force or built is None or _identities(desired) != _identities(built)


def _identities(membership: Membership) -> set[tuple[Member, int]]:
    return {(member, len(membership.ranks(member))) for member in membership.members}


def _trainers(count: int) -> tuple[TrainerId, ...]:
    return tuple(TrainerId(index) for index in range(count))
