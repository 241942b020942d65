"""When a shard's engine gets what came, in both commits, and what a refit that breaks off leaves behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from elastic_refit.core.ids import ShardId, TrainerId
from elastic_refit.core.messages import Committed, Fault, Settled
from elastic_refit.transports.base import HeldWeights
from tests.refit_group import BUCKET_BYTES, FailingWeights, Group, Weights, digests_sent

S0 = ShardId(0)


@pytest.fixture(params=["streamed", "staged"])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    """Two shards that serve version 1."""
    group = Group(shards=2, commit=request.param)
    group.weights = Weights(1)
    group.refit(1, epoch=1, shards=[0, 1])
    yield group
    group.close()


def break_off(group: Group, *, roll_back: bool, weights: FailingWeights | None = None) -> dict[int, Settled]:
    """Version 2 begins in epoch 2 and breaks off; what the shards answer to the abort order."""
    group.weights = weights or FailingWeights(2, group)
    answers, _ = group.transfer(group.build(2, [0, 1]), 2)
    assert isinstance(answers[TrainerId(0)], Fault)
    group.settle(TrainerId(0), 2, version=2)
    settled = {shard: group.settle(ShardId(shard), 2, version=2, roll_back=roll_back) for shard in (0, 1)}
    assert all(answer.applied_through >= 1 for answer in settled.values()), "nothing had come"
    return settled


def test_an_engine_is_touched_by_each_bucket_or_only_once_every_digest_was_equal(group: Group) -> None:
    group.weights, engine = Weights(2), group.engines[S0]
    engine.calls.clear()
    answers, _ = group.transfer(group.build(2, [0, 1]), 2)
    assert engine.calls == ([] if group.commit_mode == "staged" else ["begin"])
    assert group.members[S0].serving_version == (1 if group.commit_mode == "staged" else None)
    assert group.holds_all(0) == (group.commit_mode == "streamed")
    assert group.commit(0, 2, 2, digests_sent(answers)) == Committed(2)
    assert group.holds_all(0)
    assert engine.calls == ["begin", "finish 2"]


def test_a_refit_that_is_over_leaves_a_staged_shard_serving_its_old_version_and_a_streamed_one_none(
    group: Group,
) -> None:
    held = {name: tensor.clone() for name, tensor in group.engines[S0].held.items()}
    settled = break_off(group, roll_back=True)
    is_staged = group.commit_mode == "staged"
    is_as_before = all(torch.equal(group.engines[S0].held[name], tensor) for name, tensor in held.items())
    assert is_as_before == is_staged
    assert group.members[S0].serving_version == (1 if is_staged else None)
    assert {answer.is_beside for answer in settled.values()} == {is_staged}
    assert {answer.serving_version for answer in settled.values()} == {1 if is_staged else None}
    assert ("rollback" in group.engines[S0].calls) != is_staged
    group.weights = Weights(3)
    group.refit(3, epoch=3, shards=[0, 1])
    assert group.holds_all(0)


def test_a_shard_that_got_no_tensor_whole_still_serves_what_it_had(group: Group) -> None:
    weights = FailingWeights(2, group)
    ends_in_bucket_3 = torch.ones(BUCKET_BYTES * 7 // 8)  # and so does w5, where the trainer breaks
    HeldWeights.__init__(weights, {"w0": ends_in_bucket_3, "w5": torch.ones(7)})
    settled = break_off(group, roll_back=True, weights=weights)
    assert {answer.serving_version for answer in settled.values()} == {1}
    assert {answer.is_beside for answer in settled.values()} == {True}
    assert group.members[S0].serving_version == 1
    assert group.engines[S0].calls == ["begin", "finish 1"], "the engine was touched"
    group.weights = Weights(3)
    group.refit(3, epoch=3, shards=[0, 1])
    assert group.holds_all(0)


def test_a_retry_goes_on_with_what_was_kept_and_feeds_each_tensor_once(group: Group) -> None:
    settled = break_off(group, roll_back=False)
    start = min(answer.applied_through for answer in settled.values()) + 1
    group.refit(2, epoch=3, shards=[0, 1], start=start)
    for shard in (0, 1):
        assert group.holds_all(shard)
        assert sorted(group.engines[ShardId(shard)].fed) == sorted(spec.name for spec in group.weights.specs())
        assert group.members[ShardId(shard)].serving_version == 2


def test_wrong_digests_are_refused_and_a_staged_shard_serves_its_old_version_on(group: Group) -> None:
    group.weights = Weights(2)
    answers, _ = group.transfer(group.build(2, [0, 1]), 2)
    digests = digests_sent(answers)
    group.engines[S0].calls.clear()
    assert isinstance(group.commit(0, 2, 2, (*digests[:-1], digests[-1] ^ 1)), Fault)
    assert group.members[S0].serving_version == (1 if group.commit_mode == "staged" else None)
    assert group.engines[S0].calls == []


def test_a_staged_shard_whose_swap_breaks_serves_nothing() -> None:
    group = Group(shards=1, commit="staged")
    group.refit(1, epoch=1, shards=[0])
    group.weights = Weights(2)
    answers, _ = group.transfer(group.build(2, [0]), 2)

    def break_in_the_middle(fed: int) -> None:
        if fed > 2:
            raise RuntimeError("no room")

    group.engines[S0].on_feed = break_in_the_middle
    assert isinstance(group.commit(0, 2, 2, digests_sent(answers)), Fault)
    settled = group.settle(S0, 2, version=2, roll_back=True)
    assert settled.serving_version is None
    assert not settled.is_beside
    assert group.engines[S0].calls[-1] == "rollback"
    group.close()
