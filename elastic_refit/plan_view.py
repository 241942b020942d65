"""What losing shards would do to the ranks, as data and as a table: the ``plan`` command without its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from elastic_refit.core.ids import ShardId
from elastic_refit.core.membership import Membership, plan_membership

__all__ = ["describe_plan", "draw_plan", "plan_loss"]


def plan_loss(trainers: int, widths: Sequence[int], absent: Iterable[int]) -> tuple[Membership, Membership]:
    """The membership with every shard, and the one without the ``absent`` indices.

    Raises:
        ValueError: as :func:`plan_membership`, or an absent index is no shard.
        NoSurvivingShards: every shard is absent.
    """
    lost = set(absent)
    strangers = sorted(index for index in lost if not 0 <= index < len(widths))
    if strangers:
        raise ValueError(f"absent shard {strangers[0]} is none of the {len(widths)} shards that have a width")
    everyone = [ShardId(index) for index in range(len(widths))]
    before = plan_membership(trainers, widths, everyone, epoch=0)
    after = plan_membership(trainers, widths, (shard for shard in everyone if shard.index not in lost), epoch=1)
    return before, after


def describe_plan(before: Membership, after: Membership) -> dict[str, Any]:
    """Plain data: ``{before: {world_size, offsets}, after: {…}}``; ``offsets`` by shard index, as JSON keys them."""
    return {"before": _describe(before), "after": _describe(after)}


def draw_plan(before: Membership, after: Membership) -> str:
    """A table for people: one line for each block of ranks, where it was and where it is."""
    trainers = range(len(before.trainers))
    rows = [("", "before", "after"), ("trainers", _span(trainers), _span(range(len(after.trainers))))]
    for slot in before.shards:
        stays = after.contains(slot.id)
        rows.append((str(slot.id), _span(before.ranks(slot.id)), _span(after.ranks(slot.id)) if stays else "absent"))
    rows.append(("world size", str(before.world_size), str(after.world_size)))
    wide = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{name:{wide[0]}}  {old:{wide[1]}}  {new}".rstrip() for name, old, new in rows)


def _describe(membership: Membership) -> dict[str, Any]:
    offsets = {str(index): offset for index, offset in membership.offsets.items()}
    return {"world_size": membership.world_size, "offsets": offsets}


def _span(ranks: range) -> str:
    return str(ranks.start) if len(ranks) == 1 else f"{ranks.start}-{ranks.stop - 1}"
