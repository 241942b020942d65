"""Where a rank stands in the chain of a broadcast."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from elastic_refit.communicators.chain import Place, find_place

hosts_and_root = st.lists(st.sampled_from(["", "a", "b"]), min_size=1, max_size=9).flatmap(
    lambda hosts: st.tuples(st.just(hosts), st.integers(0, len(hosts) - 1))
)


def chain(hosts: list[str], root: int) -> list[Place]:
    """The places in the order of the chain."""
    return [find_place((root + step) % len(hosts), root, hosts) for step in range(len(hosts))]


def test_ranks_of_one_host_form_one_run_from_the_root_on() -> None:
    places = [find_place(rank, 1, ["a"] * 4) for rank in range(4)]
    assert [place.source for place in places] == [3, None, 1, 2]
    assert [place.sink for place in places] == [None, 2, 3, 0]
    assert {(place.publisher, place.last) for place in places} == {(1, 0)}
    assert [place.is_reader for place in places] == [True, False, True, True]
    assert [place.has_readers for place in places] == [False, True, True, True]


def test_a_run_goes_over_the_end_of_the_rank_numbers_but_not_over_the_root() -> None:
    hosts = ["a", "a", "b", "a"]
    assert find_place(1, 3, hosts) == Place(1, source=0, sink=2, publisher=3, last=1)
    assert find_place(0, 1, hosts) == Place(0, source=3, sink=None, publisher=3, last=0)
    assert find_place(1, 1, hosts) == Place(1, source=None, sink=2)


@given(hosts_and_root)
def test_neighbours_agree_about_what_goes_between_them(case: tuple[list[str], int]) -> None:
    hosts, root = case
    places = chain(hosts, root)
    assert (places[0].source, places[-1].sink) == (None, None)
    for upper, lower in itertools.pairwise(places):
        assert (upper.sink, lower.source) == (lower.rank, upper.rank)
        assert upper.has_readers == lower.is_reader == (hosts[upper.rank] == hosts[lower.rank] != "")
        if upper.has_readers:
            assert (upper.publisher, upper.last) == (lower.publisher, lower.last)


@given(hosts_and_root)
def test_every_run_has_one_publisher_before_its_readers_and_one_last(case: tuple[list[str], int]) -> None:
    places = chain(*case)
    order = [place.rank for place in places]
    for place in places:
        if place.publisher is not None and place.last is not None:
            run = order[order.index(place.publisher) : order.index(place.last) + 1]
            assert place.rank in run
            assert [find_place(rank, case[1], case[0]).is_reader for rank in run] == [False] + [True] * (len(run) - 1)
            assert len(run) > 1
