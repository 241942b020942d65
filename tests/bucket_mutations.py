"""One bucket is damaged on its way, in every manner and at every place, and the digests have to catch it.

A mutation is a refit of two trainers and three shards in which a bucket is corrupted, dropped, duplicated or exchanged
with its neighbour: in the sender after it was digested, on one link (so that everybody behind it has the damage), or in
one rank alone. :func:`outcome` carries it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from elastic_refit.communicators.base import CommunicatorBackend
from elastic_refit.core.events import CommitMode
from elastic_refit.core.ids import Member, ShardId
from elastic_refit.core.manifest import build_manifest
from elastic_refit.core.messages import Answer, Committed, Received
from elastic_refit.core.refit_verdict import judge_digests
from elastic_refit.transports.base import Packing, RankContext
from elastic_refit.transports.broadcast import BroadcastTransport
from elastic_refit.transports.packing import fresh_buffer, pack_bucket
from tests.refit_group import BUCKET_BYTES, Group, Weights, digests_sent

__all__ = ["DIGESTS", "KINDS", "NUM_BUCKETS", "PLACES", "Damage", "Lab", "Mutation", "mutations"]

NUM_TRAINERS, NUM_SHARDS = 2, 3
WORLD = NUM_TRAINERS + NUM_SHARDS
NUM_BUCKETS = build_manifest(Weights(0).specs(), BUCKET_BYTES).num_buckets
DIGESTS = ("xxh3", "sum64")
COMMITS: tuple[CommitMode, ...] = ("streamed", "staged")

Damage = Callable[[int, int, Sequence[torch.Tensor]], torch.Tensor]
"""``damage(bucket, at, sent)``: what arrives in place of ``bucket`` if the damage is at bucket ``at``."""


def _corrupt(bucket: int, at: int, sent: Sequence[torch.Tensor]) -> torch.Tensor:
    changed = sent[bucket].clone()
    changed[len(changed) // 3] ^= 128 if bucket == at else 0
    return changed


def _drop(bucket: int, at: int, sent: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.zeros_like(sent[bucket]) if bucket == at else sent[bucket]


def _duplicate(bucket: int, at: int, sent: Sequence[torch.Tensor]) -> torch.Tensor:
    return sent[bucket - 1] if bucket == at else sent[bucket]


def _reorder(bucket: int, at: int, sent: Sequence[torch.Tensor]) -> torch.Tensor:
    other = {at: at - 1, (at - 1) % len(sent): at}
    return sent[other.get(bucket, bucket)]


KINDS: dict[str, Damage] = {"corrupt": _corrupt, "drop": _drop, "duplicate": _duplicate, "reorder": _reorder}
PLACES: dict[str, frozenset[int]] = {
    "in the sender": frozenset({0}),
    **{f"on the link to rank {first}": frozenset(range(first, WORLD)) for first in range(1, WORLD)},
    **{f"in rank {rank} alone": frozenset({rank}) for rank in range(NUM_TRAINERS, WORLD)},
}
"""The ranks at which the bucket is damaged. What the sender damages, everybody gets."""


@dataclass(frozen=True, slots=True)
class Mutation:
    kind: str
    place: str
    bucket: int
    commit: CommitMode
    digest: str

    def __str__(self) -> str:
        return f"{self.kind} bucket {self.bucket} {self.place}, {self.commit}, {self.digest}"

    @property
    def damaged(self) -> tuple[int, ...]:
        """The shards that get other bytes than were digested, by index."""
        ranks = range(WORLD) if 0 in PLACES[self.place] else PLACES[self.place]
        return tuple(rank - NUM_TRAINERS for rank in ranks if rank >= NUM_TRAINERS)


def mutations() -> Iterator[Mutation]:
    """All of them."""
    for commit, digest, kind, place in product(COMMITS, DIGESTS, KINDS, PLACES):
        yield from (Mutation(kind, place, bucket, commit, digest) for bucket in range(NUM_BUCKETS))


class Lab:
    """A group whose transports damage what they are told to."""

    def __init__(self, commit: CommitMode) -> None:
        self._version = 0
        self._mutation: Mutation | None = None
        self._sent: list[torch.Tensor] = []
        self._group = Group(NUM_SHARDS, trainers=NUM_TRAINERS, commit=commit, transport=self._transport)

    def close(self) -> None:
        self._group.close()

    def outcome(self, mutation: Mutation | None, *, digest: str = "xxh3") -> str | None:
        """What was not caught in a refit with ``mutation``; None if all was. Without one nothing may be caught."""
        group, self._version, self._mutation = self._group, self._version + 1, mutation
        group.weights = weights = Weights(self._version)
        group.packing = Packing(BUCKET_BYTES, digest if mutation is None else mutation.digest)
        self._sent = _packed(weights)
        answers, _ = group.transfer(group.build(self._version, range(NUM_SHARDS)), self._version)
        problem = self._problem(answers, () if mutation is None else mutation.damaged)
        for shard in group.engines:
            group.settle(shard, self._version, self._version, roll_back=True)
        return problem

    def _problem(self, answers: Mapping[Member, Answer], damaged: tuple[int, ...]) -> str | None:
        group, version, sent = self._group, self._version, digests_sent(answers)
        received = {s: answer.digests for s in group.engines if isinstance(answer := answers[s], Received)}
        wrong = judge_digests(sent, received)
        committed = {
            s.index for s in group.engines if group.commit(s.index, version, version, sent) == Committed(version)
        }
        serving = {s.index for s in group.engines if group.members[s].serving_version == version}
        named = ShardId(damaged[0]) if len(damaged) == 1 else None
        if committed != set(range(NUM_SHARDS)) - set(damaged) or serving != committed:
            return f"shards {damaged} were damaged, {sorted(committed)} committed, {sorted(serving)} serve"
        if (wrong is None) != (not damaged) or (wrong is not None and wrong.culprit != named):
            return f"the coordinator says {wrong}"
        if not all(map(group.holds_all, committed)):
            return "a shard that committed holds other bytes than the trainer"
        return None

    def _transport(self, backend: CommunicatorBackend) -> BroadcastTransport:
        return _Damaging(backend, self)

    def damage(self, rank: int, bucket: int, buffer: torch.Tensor) -> None:
        mutation = self._mutation
        if mutation is not None and rank in PLACES[mutation.place]:
            wrong = KINDS[mutation.kind](bucket, mutation.bucket, self._sent)
            size = min(len(wrong), len(buffer))
            buffer[:size].copy_(wrong[:size])


class _Damaging(BroadcastTransport):
    def __init__(self, backend: CommunicatorBackend, lab: Lab) -> None:
        super().__init__(backend)
        self._lab = lab

    def _broadcast(self, context: RankContext, bucket: int, buffer: torch.Tensor) -> None:
        rank = self._group().rank
        if rank == 0:
            self._lab.damage(rank, bucket, buffer)
        super()._broadcast(context, bucket, buffer)
        if rank > 0:
            self._lab.damage(rank, bucket, buffer)


def _packed(weights: Weights) -> list[torch.Tensor]:
    manifest = build_manifest(weights.specs(), BUCKET_BYTES)
    buffers = [fresh_buffer(bucket) for bucket in manifest.buckets]
    for bucket, buffer in zip(manifest.buckets, buffers, strict=True):
        pack_bucket(bucket, manifest, tensors=weights.tensors, out=buffer)
    return buffers
