"""The immutable containers."""

from __future__ import annotations

import random

import pytest

from elastic_refit.core.ledger_parts import BoundedLog, PersistentMap, Ranges, add_to_ranges


def test_a_map_holds_what_a_dict_holds_and_older_ones_stay() -> None:
    dice = random.Random(7)
    now: PersistentMap[int, int] = PersistentMap()
    model: dict[int, int] = {}
    older = []
    for step in range(2000):
        key = dice.randrange(300)
        if dice.random() < 0.3:
            now, model = now.without(key), {k: v for k, v in model.items() if k != key}
        else:
            now, model = now.with_item(key, step), {**model, key: step}
        older.append((now, model))
    for each, expected in older[::97]:
        assert dict(each.items()) == expected
        assert sorted(each.values()) == sorted(expected.values())
        assert len(each) == len(expected)
        assert [each.get(key) for key in range(300)] == [expected.get(key) for key in range(300)]


def test_maps_are_equal_by_what_they_hold_however_they_came_to_it() -> None:
    straight = PersistentMap([("a", 1), ("b", 2)])
    only_b: PersistentMap[str, int] = PersistentMap([("b", 2)])
    roundabout = only_b.with_item("c", 3).with_item("a", 1).without("c")
    assert straight == roundabout
    assert hash(straight) == hash(roundabout)
    assert straight != straight.with_item("a", 2)
    assert straight != {"a": 1, "b": 2}


def test_a_log_keeps_the_last_items_and_counts_all() -> None:
    log: BoundedLog[int] = BoundedLog(10)
    longest = 0
    for number in range(1000):
        log = log.append(number)
        kept = list(log)
        assert kept == list(range(number + 1 - len(kept), number + 1))
        assert min(10, number + 1) <= len(kept) <= 74
        longest = max(longest, len(kept))
    assert (log.total, longest) == (1000, 74)


@pytest.mark.parametrize(
    ("before", "number", "after"),
    [
        ((), 5, ((5, 5),)),
        (((0, 4),), 5, ((0, 5),)),
        (((6, 9),), 5, ((5, 9),)),
        (((0, 4), (6, 9)), 5, ((0, 9),)),
        (((0, 3), (7, 9)), 5, ((0, 3), (5, 5), (7, 9))),
        (((0, 4),), 4, None),
        (((0, 4),), 0, None),
        (((0, 4), (8, 8)), 8, None),
    ],
)
def test_ranges_grow_join_and_know_what_they_hold(before: Ranges, number: int, after: Ranges | None) -> None:
    assert add_to_ranges(before, number, limit=9) == after


def test_beyond_the_limit_the_oldest_gap_is_closed() -> None:
    assert add_to_ranges(((0, 1), (4, 5)), 20, limit=3) == ((0, 1), (4, 5), (20, 20))
    ranges = add_to_ranges(((0, 1), (4, 5), (8, 9)), 20, limit=3)
    assert ranges is not None
    assert ranges == ((0, 5), (8, 9), (20, 20))
    assert add_to_ranges(ranges, 2, limit=3) is None
