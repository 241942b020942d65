"""Identities: their text is unambiguous and reads back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_refit.core.ids import Member, ProcessId, ShardId, TrainerId, parse_member

indices = st.integers(min_value=0, max_value=10**6)
members: st.SearchStrategy[Member] = st.one_of(st.builds(TrainerId, indices), st.builds(ShardId, indices, indices))


@given(members)
def test_the_text_of_a_member_reads_back_as_the_same_member(member: Member) -> None:
    assert parse_member(str(member)) == member


@given(members, members)
def test_two_members_share_a_text_only_if_they_are_equal(one: Member, other: Member) -> None:
    assert (str(one) == str(other)) == (one == other)


def test_a_later_incarnation_shows_in_the_text() -> None:
    assert [str(ShardId(2)), str(ShardId(2, 1)), str(TrainerId(0))] == ["shard[2]", "shard[2]#1", "trainer[0]"]


def test_a_replacement_is_somebody_else_than_the_one_it_replaces() -> None:
    assert ShardId(2, 1) != ShardId(2)
    assert len({ShardId(2), ShardId(2, 1), ShardId(2)}) == 2


def test_a_process_with_a_reused_pid_is_another_process() -> None:
    first = ProcessId(node="a", pid=7, start_ticks=100, process_group=7)
    assert first != ProcessId(node="a", pid=7, start_ticks=101, process_group=7)


@pytest.mark.parametrize(
    "text",
    ["", "shard", "shard[]", "shard[-1]", "shard[1", "shard1]", "shard[1]#", "shard[1]x2", "trainer[0]#1", "node[1]"],
)
def test_a_text_that_names_nobody_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(ValueError, match="names neither a trainer nor a shard"):
        parse_member(text)
