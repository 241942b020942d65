"""Membership: the worked cases in ``tests/membership_vectors.json``, and what no case of them shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_refit import errors
from elastic_refit.core.ids import ShardId, TrainerId
from elastic_refit.core.membership import Membership, ShardSlot, plan_membership, should_rebuild

VECTORS = json.loads((Path(__file__).parents[2] / "membership_vectors.json").read_text())
ERRORS: dict[str, type[Exception]] = {"NoSurvivingShards": errors.NoSurvivingShards, "ValueError": ValueError}


def _plan(case: dict[str, Any]) -> Membership:
    return plan_membership(case["trainers"], case["widths"], [ShardId(index) for index in case["surviving"]])


def _group(*shards: ShardId, trainers: int = 2, width: int = 1, epoch: int = 0) -> Membership:
    widths = [width] * (max(shard.index for shard in shards) + 1)
    return plan_membership(trainers, widths, shards, epoch=epoch)


@pytest.mark.parametrize("case", VECTORS["plans"], ids=lambda case: case["name"])
def test_a_worked_plan_has_these_offsets_and_no_hole(case: dict[str, Any]) -> None:
    membership = _plan(case)
    assert membership.offsets == {int(index): offset for index, offset in case["offsets"].items()}
    assert membership.world_size == case["world_size"]
    held = [rank for member in membership.members for rank in membership.ranks(member)]
    assert held == list(range(case["world_size"]))
    assert [membership.member_at(rank) for rank in held] == [m for m in membership.members for _ in membership.ranks(m)]


@pytest.mark.parametrize("case", VECTORS["rejected"], ids=lambda case: case["name"])
def test_a_plan_that_cannot_be_made_is_refused_by_name(case: dict[str, Any]) -> None:
    with pytest.raises(ERRORS[case["error"]]) as refused:
        _plan(case)
    assert refused.type is ERRORS[case["error"]]


def test_a_width_below_one_is_refused_even_if_its_shard_does_not_survive() -> None:
    with pytest.raises(ValueError, match=r"shard\[1\] has width 0"):
        plan_membership(1, [1, 0], [ShardId(0)])


def test_two_incarnations_of_one_shard_are_not_two_members() -> None:
    with pytest.raises(ValueError, match="two incarnations"):
        plan_membership(2, [1, 1], [ShardId(1, 0), ShardId(1, 1)])


def test_members_come_in_rank_order_and_only_the_planned_incarnation_is_one() -> None:
    membership = plan_membership(2, [1, 3], [ShardId(1, 4), ShardId(0)], epoch=7)
    assert membership.epoch == 7
    assert membership.members == (TrainerId(0), TrainerId(1), ShardId(0), ShardId(1, 4))
    assert membership.shard_ids == (ShardId(0), ShardId(1, 4))
    assert membership.ranks(ShardId(1, 4)) == range(3, 6)
    assert membership.rank_of(TrainerId(1)) == 1
    assert [membership.contains(m) for m in (ShardId(1, 4), ShardId(1), ShardId(9), TrainerId(1), TrainerId(2))] == [
        True,
        False,
        False,
        True,
        False,
    ]


def test_who_is_not_in_the_group_has_no_ranks_and_a_rank_beyond_it_no_holder() -> None:
    membership = _group(ShardId(0))
    with pytest.raises(KeyError, match=r"shard\[0\]#1 is not in epoch 0"):
        membership.ranks(ShardId(0, 1))
    for rank in (-1, 3):
        with pytest.raises(KeyError, match="ranks 0 to 2"):
            membership.member_at(rank)


def test_a_membership_survives_its_plain_form() -> None:
    membership = plan_membership(3, [2, 1, 4], [ShardId(0), ShardId(2, 5)], epoch=11)
    assert Membership.from_dict(json.loads(json.dumps(membership.to_dict()))) == membership


@pytest.mark.parametrize(
    "shards",
    [
        (),
        (ShardSlot(ShardId(0), 3, 1),),
        (ShardSlot(ShardId(0), 2, 1), ShardSlot(ShardId(1), 4, 1)),
        (ShardSlot(ShardId(0), 2, 2), ShardSlot(ShardId(1), 3, 1)),
        (ShardSlot(ShardId(1), 2, 1), ShardSlot(ShardId(0), 3, 1)),
        (ShardSlot(ShardId(0), 2, 1), ShardSlot(ShardId(0, 1), 3, 1)),
        (ShardSlot(ShardId(0), 2, 0),),
    ],
    ids=["nobody", "hole first", "hole", "overlap", "order", "one seat twice", "no rank"],
)
def test_a_membership_with_a_hole_cannot_exist(shards: tuple[ShardSlot, ...]) -> None:
    with pytest.raises(ValueError, match=r"does not follow|at least one trainer and one shard"):
        Membership(0, (TrainerId(0), TrainerId(1)), shards)


@pytest.mark.parametrize("trainers", [(), (TrainerId(1),), (TrainerId(0), TrainerId(0))])
def test_trainers_hold_the_ranks_of_their_indices(trainers: tuple[TrainerId, ...]) -> None:
    with pytest.raises(ValueError, match=r"at least one trainer|trainers hold the ranks"):
        Membership(0, trainers, (ShardSlot(ShardId(0), len(trainers), 1),))


def test_the_same_people_need_no_rebuild_in_a_later_epoch() -> None:
    assert not should_rebuild(_group(ShardId(0), epoch=5), _group(ShardId(0), epoch=4))


def test_something_absent_is_not_something_changed() -> None:
    without_zero = _group(ShardId(1), ShardId(2))
    assert not should_rebuild(_group(ShardId(1), ShardId(2), epoch=1), without_zero)


@pytest.mark.parametrize(
    "desired",
    [
        _group(ShardId(0)),
        _group(ShardId(0), ShardId(1), ShardId(2)),
        _group(ShardId(0), ShardId(1, 1)),
        _group(ShardId(0), ShardId(1), width=2),
        _group(ShardId(0), ShardId(1), trainers=3),
    ],
    ids=["one left", "one came", "same seat, new incarnation", "another width", "another trainer"],
)
def test_a_changed_identity_needs_a_rebuild(desired: Membership) -> None:
    assert should_rebuild(desired, _group(ShardId(0), ShardId(1)))


def test_the_first_group_is_built_and_force_builds_again() -> None:
    group = _group(ShardId(0))
    assert should_rebuild(group, None)
    assert should_rebuild(group, group, force=True)
    assert not should_rebuild(group, group)
