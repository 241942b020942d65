"""Whatever the model, the buckets and the group, and wherever it breaks: who commits holds the trainer's bytes."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st

from elastic_refit.core.events import CommitMode
from elastic_refit.core.ids import Member, ShardId
from elastic_refit.core.manifest import ALIGNMENT_BYTES
from elastic_refit.core.messages import Committed, Fault, Received
from elastic_refit.transports.base import HeldWeights, Packing
from tests.property.test_packing_properties import DTYPES
from tests.refit_group import Group, digests_sent

MAX_BUCKETS = 24


@dataclass(frozen=True, slots=True)
class Case:
    """A model and its buckets, a group, and where one of its shards is lost."""

    seed: int
    num_tensors: int
    num_buckets: int
    num_trainers: int
    num_shards: int
    victim: int
    lost_at: float
    commit: CommitMode
    digest: str


cases = st.builds(
    Case,
    seed=st.integers(0, 2**32 - 1),
    num_tensors=st.integers(2, 200),
    num_buckets=st.integers(1, MAX_BUCKETS),
    num_trainers=st.integers(1, 2),
    num_shards=st.integers(2, 4),
    victim=st.integers(0, 3),
    lost_at=st.floats(0, 1, exclude_max=True),
    commit=st.sampled_from(["streamed", "staged"]),
    digest=st.sampled_from(["xxh3", "sum64"]),
)


class RandomModel(HeldWeights):
    """Random bytes as tensors of every dtype: strided, transposed, expanded, empty, scalar, tied to each other."""

    def __init__(self, case: Case) -> None:
        dice = random.Random(case.seed)
        noise = torch.Generator().manual_seed(case.seed)
        super().__init__({"first": torch.arange(8, dtype=torch.uint8)})
        for number in range(1, case.num_tensors):
            is_tied = dice.random() < 0.1
            tensor = dice.choice(list(self.tensors.values())) if is_tied else _tensor(dice, noise)
            self.tensors[f"layer.{number}"] = tensor


def _tensor(dice: random.Random, noise: torch.Generator) -> torch.Tensor:
    dtype = dice.choice(DTYPES)
    shape = [dice.choice([0, 1, 2, 3, 5, 7]) for _ in range(dice.randrange(4))]
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=noise)
    tensor = (raw % 2 if dtype is torch.bool else raw).view(dtype).view(shape)
    if 0 in shape or not shape:
        return tensor
    views = [tensor, tensor.transpose(0, -1), tensor[::2], tensor[:1].expand(3, *shape[1:])]
    return dice.choice(views)


def bucket_bytes(model: RandomModel, num_buckets: int) -> int:
    """So that the model is about ``num_buckets`` buckets, whatever its size."""
    total = sum(-(-spec.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for spec in model.specs())
    return max(1, -(-total // num_buckets // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES


@given(cases)
@settings(max_examples=40, phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink])
def test_whoever_is_left_commits_the_trainers_bytes_wherever_a_shard_was_lost(case: Case) -> None:
    model = RandomModel(case)
    group = Group(case.num_shards, trainers=case.num_trainers, commit=case.commit)
    group.weights = model
    group.packing = Packing(bucket_bytes(model, case.num_buckets), case.digest)
    victim = ShardId(case.victim % case.num_shards)
    left = [shard.index for shard in group.engines if shard != victim]
    try:
        start = lose(group, victim, case.lost_at)
        event(
            f"{case.commit}, resumed at bucket {min(start, 1)} or later" if start else f"{case.commit}, from the start"
        )
        answers, manifest = group.transfer(group.build(2, left), 1, start)
        digests = digests_sent(answers)
        assert len(digests) == manifest.num_buckets
        for shard in left:
            assert answers[ShardId(shard)] == Received(digests)
            assert group.commit(shard, 2, 1, digests) == Committed(1)
        for shard in left:  # after all is done: nothing that an engine was given may have been written to since
            assert group.holds_all(shard)
            assert sorted(group.engines[ShardId(shard)].fed) == sorted(model.tensors)
    finally:
        group.close()


def lose(group: Group, victim: ShardId, lost_at: float) -> int:
    """Version 1 is pushed in epoch 1 and breaks off as ``victim`` dies; where the retry has to begin."""
    membership = group.build(1, [shard.index for shard in group.engines])
    fatal = f"bucket:{int(lost_at * group.num_buckets)}"

    def die(member: Member, phase: str) -> None:
        if (member, phase) == (victim, fatal):
            raise RuntimeError("the process is gone")

    group.on_reach = die
    answers, _ = group.transfer(membership, 1)
    assert isinstance(answers[victim], Fault)
    group.on_reach = lambda member, phase: None
    survivors = [member for member in membership.members if member != victim]
    settled = {member: group.settle(member, 1) for member in survivors}
    return 1 + min(settled[shard].applied_through for shard in group.engines if shard != victim)
