"""A broadcast chain of two trainers and three shards over six buckets, as its ranks report it.

The beacons are those that real chains showed: rank 2 of 5 stopped at bucket 2, the ranks behind it waiting to receive
the next one, and the ranks before it done, or far ahead, because what they sent fits in the socket buffers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic_refit.core.attribution import AttributionView, attribute
from elastic_refit.core.deadlines import Deadlines
from elastic_refit.core.evidence import Beacon, MemberEvidence, Testimony
from elastic_refit.core.ids import Member, ShardId, TrainerId
from elastic_refit.core.verdict import Culprits, Verdict

EPOCH = 7
NUM_BUCKETS = 6
MEMBERS: tuple[Member, ...] = (TrainerId(0), TrainerId(1), ShardId(0), ShardId(1), ShardId(2))
CHAIN = tuple(range(len(MEMBERS)))
LIMITS = Deadlines(
    ping_s=2,
    stall_s=3,
    evidence_s=3,
    fence_s=2,
    order_s=0.5,
    abort_s=25,
    abort_grace_s=5,
    prepare_s=20,
    join_s=20,
    pause_s=30,
    pack_s=10,
    apply_s=11,
    finalize_s=15,
    hard_s=60,
    settle_s=12,
    ledger_s=10,
    coordinator_restart_s=20,
)

Chain = dict[int, MemberEvidence]
"""What is known of each rank."""


def view(**changes: Any) -> AttributionView:
    """The coordinator was on time, the links are known, and nobody was suspected."""
    plain = AttributionView(epoch=EPOCH, num_buckets=NUM_BUCKETS, deadlines=LIMITS, chain=CHAIN)
    return replace(plain, **changes)


def receiving(bucket: int, peer: int | None) -> Beacon:
    """In the collective, waiting for bytes of ``bucket`` from the rank before."""
    return Beacon(EPOCH, bucket, bucket - 1, bucket - 1, "recv", peer, "in_collective", 4.0)


def sending(bucket: int, peer: int | None) -> Beacon:
    """In the collective, waiting until the rank behind takes bytes of ``bucket``."""
    return Beacon(EPOCH, bucket, bucket - 1, bucket - 1, "send", peer, "in_collective", 4.0)


def applying(bucket: int, age_s: float) -> Beacon:
    """Out of the collective, inside the engine with ``bucket``."""
    return Beacon(EPOCH, bucket, bucket, bucket - 1, "engine", None, "applying", age_s)


def through(bucket: int, phase: str, age_s: float = 0.0, **changes: Any) -> Beacon:
    """Every bucket up to ``bucket`` is behind it; ``phase`` is what it does now, waiting for nobody."""
    return replace(Beacon(EPOCH, bucket, bucket, bucket, "none", None, phase, age_s), **changes)


def done() -> Beacon:
    return through(NUM_BUCKETS - 1, "done")


def chain(*beacons: Beacon | None, **facts: Any) -> Chain:
    """Everybody answered the ping, with its beacon."""
    return {
        rank: MemberEvidence(MEMBERS[rank], rank, beacon=beacon, **{"answered_ping": True, **facts})
        for rank, beacon in enumerate(beacons)
    }


def small_buckets(third: Beacon | None) -> Chain:
    """Buckets that fit in the socket buffers: both trainers have sent everything, whatever became of rank 2."""
    return chain(done(), done(), third, receiving(3, 2), receiving(3, 2 + 1))


def large_buckets(third: Beacon | None) -> Chain:
    """Buckets of several socket buffers: rank 0 is done, rank 1 blocked in bucket 5, those behind wait for 3."""
    return chain(done(), sending(5, 2), third, receiving(3, 2), receiving(3, 3))


def stalled_link() -> Chain:
    """Bytes between ranks 2 and 3 stop at bucket 2, and nobody does anything but wait."""
    return chain(done(), sending(5, 2), sending(2, 3), receiving(2, 2), receiving(2, 3))


def but(base: Chain, rank: int, **facts: Any) -> Chain:
    """The same chain with other facts about one rank."""
    return {**base, rank: replace(base[rank], **facts)}


def lost(peer: int | None) -> Testimony:
    return Testimony("peer_lost", peer, f"the connection to rank {peer} ended")


def aborted() -> Testimony:
    return Testimony("aborted", None, "no progress for 25 s")


def judge(base: Chain, seen: AttributionView | None = None) -> Verdict:
    return attribute(tuple(base.values()), seen or view())


def named(verdict: Verdict) -> dict[str, int]:
    """Who is condemned, and by which rule."""
    assert isinstance(verdict, Culprits), verdict.sentence
    return {str(finding.member): finding.rule for finding in verdict.findings}
