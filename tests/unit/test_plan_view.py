"""The ``plan`` command's data and table."""

from __future__ import annotations

import pytest

from elastic_refit.errors import NoSurvivingShards
from elastic_refit.plan_view import describe_plan, draw_plan, plan_loss


def test_the_data_of_a_plan_is_world_sizes_and_first_ranks_by_shard() -> None:
    assert describe_plan(*plan_loss(2, [1, 1, 1], [0])) == {
        "before": {"world_size": 5, "offsets": {"0": 2, "1": 3, "2": 4}},
        "after": {"world_size": 4, "offsets": {"1": 2, "2": 3}},
    }


def test_the_table_shows_who_moves_and_who_leaves() -> None:
    assert draw_plan(*plan_loss(2, [1, 2, 1], [0])).splitlines() == [
        "            before  after",
        "trainers    0-1     0-1",
        "shard[0]    2       absent",
        "shard[1]    3-4     2-3",
        "shard[2]    5       4",
        "world size  6       5",
    ]


def test_an_absent_shard_that_does_not_exist_is_refused() -> None:
    for absent in (3, -1):
        with pytest.raises(ValueError, match=f"absent shard {absent} is none of the 3"):
            plan_loss(2, [1, 1, 1], [0, absent])


def test_a_fleet_of_absent_shards_cannot_be_planned() -> None:
    with pytest.raises(NoSurvivingShards, match="none of 2 shards"):
        plan_loss(2, [1, 1], [0, 1])
