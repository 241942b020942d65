"""How much memory a refit takes beside the weights, in real processes: trainers, whole and gathering, and receivers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch

from elastic_refit.bench.refit_ranks import Layout, RefitRanks, RefitSeat
from elastic_refit.communicators.base import Communicator
from elastic_refit.communicators.rank_processes import form_group
from elastic_refit.core.events import CommitMode
from elastic_refit.core.ids import Member, ShardId, TrainerId
from elastic_refit.core.manifest import TensorSpec
from elastic_refit.transports.base import HeldWeights, Packing, WeightSource
from elastic_refit.transports.packing import byte_view, tensor_specs

MB = 1 << 20
BUCKET, TENSOR = 3 * MB, 1 * MB
LAYOUT = Layout(size_bytes=48 * TENSOR, num_tensors=48, packing=Packing(BUCKET))
SLACK = 4 * MB
"""Pages of code, stacks and allocators that a first refit touches."""
TRAINERS = (TrainerId(0), TrainerId(1))
SHARDS = (ShardId(0), ShardId(1))


def values(name: str) -> torch.Tensor:
    dice = torch.Generator().manual_seed(int(name.removeprefix("w")))
    return torch.randn(TENSOR // 4, generator=dice)


class GatheredWeights(WeightSource):
    """This rank holds one half of every tensor; the other half comes from the other trainer when it is asked for."""

    def __init__(self, trainer: TrainerId, group: Communicator) -> None:
        self._group = group
        self._half = trainer.index
        self._halves = {f"w{n}": values(f"w{n}").chunk(2)[self._half].clone() for n in range(LAYOUT.num_tensors)}

    def specs(self) -> list[TensorSpec]:
        return tensor_specs((name, half.new_empty(1).expand(TENSOR // 4)) for name, half in self._halves.items())

    def materialize(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        return {name: self._gather(name) for name in names}

    def _gather(self, name: str) -> torch.Tensor:
        whole = torch.empty(TENSOR // 4)
        halves = whole.chunk(2)
        halves[self._half].copy_(self._halves[name])
        for root, half in enumerate(halves):
            self._group.broadcast(byte_view(half.view(torch.uint8)), root)
        return whole


class MemorySeat(RefitSeat):
    """A trainer that gathers if it has joined a group of trainers, and else one that holds everything."""

    def make_source(self, trainer: TrainerId, layout: Layout) -> WeightSource:
        if self._groups:
            return GatheredWeights(trainer, self._group)
        tensors = {name: values(name) for name in layout.tensors()}
        tensors["w7"] = torch.stack([tensors["w7"], tensors["w7"]], dim=1)[:, 0]  # not contiguous
        return HeldWeights(tensors)

    def forget(self) -> None:
        """Make this shard's weights other than any trainer's."""
        for tensor in self._receiver._targets.values():
            tensor.zero_()

    def differs(self) -> list[str]:
        """The tensors of this shard that are not the trainers'."""
        held = self._receiver._targets
        return [name for name, tensor in held.items() if not torch.equal(tensor, values(name))]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RefitRanks]:
    """Two trainers that gather and two shards, after a refit that touched everything once."""
    ranks = RefitRanks(LAYOUT, trainers=2, shards=2, seat=MemorySeat, chunk_bytes=64 << 10)
    try:
        form_group([ranks.processes[trainer] for trainer in TRAINERS])
        ranks.take_part(TRAINERS)
        ranks.refit(ranks.build(), 1)
        yield ranks
    finally:
        ranks.stop()


def peaks_of(ranks: RefitRanks, version: int, *, commit: CommitMode = "streamed") -> dict[Member, int]:
    group = ranks.build()
    ranks.each(group.members, lambda member: ("mark_memory", ()))
    ranks.refit(group, version, commit=commit)
    return ranks.each(group.members, lambda member: ("peak_extra_bytes", ()))


def assert_exact(ranks: RefitRanks, *shards: ShardId) -> None:
    assert ranks.each(shards, lambda member: ("differs", ())) == {shard: [] for shard in shards}


def test_gathering_trainers_never_hold_a_second_copy_and_a_streaming_receiver_holds_a_bucket(ranks: RefitRanks) -> None:
    ranks.take_part(TRAINERS)
    peaks = peaks_of(ranks, 2)
    assert peaks[TRAINERS[0]] <= 2 * BUCKET + (BUCKET + 2 * TENSOR) + SLACK, peaks
    assert peaks[TRAINERS[1]] <= 2 * BUCKET + (BUCKET + 2 * TENSOR) + SLACK, peaks
    assert max(peaks[shard] for shard in SHARDS) <= 2 * BUCKET + SLACK, peaks
    assert_exact(ranks, *SHARDS)


def test_gathering_trainers_are_in_step_again_when_a_refit_is_taken_up_after_a_loss(ranks: RefitRanks) -> None:
    group = ranks.build()
    ranks.each(SHARDS, lambda member: ("forget", ()))
    ranks.each(SHARDS[1:], lambda member: ("fail_at", ("bucket:9",)))
    manifest = ranks.ready(group, 3)
    ranks.transfer(group, 3, manifest, commit="streamed")
    settled = ranks.settle((*TRAINERS, SHARDS[0]), 3)
    start = settled[SHARDS[0]].applied_through + 1
    assert 0 < start < manifest.num_buckets, "it was not broken off in the middle"
    ranks.refit(ranks.build(without=SHARDS[1]), 3, start=start)
    assert_exact(ranks, SHARDS[0])
    ranks.each(SHARDS[1:], lambda member: ("fail_at", (None,)))
    ranks.settle(SHARDS[1:], 3, roll_back=True)


def test_a_trainer_that_holds_everything_takes_two_buckets_and_a_tensor_and_a_staged_receiver_one_copy(
    ranks: RefitRanks,
) -> None:
    ranks.each(TRAINERS, lambda member: ("close", ()))
    ranks.take_part(TRAINERS)
    ranks.each(SHARDS, lambda member: ("forget", ()))
    peaks = peaks_of(ranks, 4, commit="staged")
    assert peaks[TRAINERS[0]] <= 2 * BUCKET + TENSOR + SLACK, peaks
    staged = [peaks[shard] for shard in SHARDS]
    assert min(staged) > LAYOUT.size_bytes // 2, "nothing was kept beside the weights"
    assert max(staged) <= LAYOUT.size_bytes + 2 * BUCKET + SLACK, peaks
    assert_exact(ranks, *SHARDS)
