"""From the evidence of a failed attempt to what the protocol does about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_refit.core.ids import ShardId

__all__ = ["WrongDigests", "judge_digests"]


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
