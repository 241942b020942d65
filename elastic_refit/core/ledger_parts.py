"""The immutable containers that the ledger is made of.

A ledger of 10,000 shards changes one of them per event, so every change must share what it does not touch. The standard
library has no persistent map; this one hashes into small dicts, 128 of them or as many as it is told, and copies one
per change, which costs about a microsecond at 10,000 entries and keeps every older value whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

__all__ = ["BoundedLog", "PersistentMap", "Ranges", "add_to_ranges"]

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

_NUM_BUCKETS = 128
_RECENT = 64

Ranges = tuple[tuple[int, int], ...]
"""Disjoint inclusive ranges of numbers, in order, with a gap between every two."""


class PersistentMap(Generic[K, V]):
    """A map that never changes; ``with_item`` and ``without`` give another one. Iterates in no useful order."""

    __slots__ = ("_buckets",)

    def __init__(self, items: Iterable[tuple[K, V]] = (), *, num_buckets: int = _NUM_BUCKETS) -> None:
        self._buckets: list[dict[K, V]] = [{} for _ in range(num_buckets)]
        for key, value in items:
            self._buckets[hash(key) % num_buckets][key] = value

    def get(self, key: K) -> V | None:
        buckets = self._buckets
        return buckets[hash(key) % len(buckets)].get(key)

    def with_item(self, key: K, value: V) -> PersistentMap[K, V]:
        buckets = self._buckets.copy()
        at = hash(key) % len(buckets)
        buckets[at] = {**buckets[at], key: value}
        return _map_of(buckets)

    def without(self, key: K) -> PersistentMap[K, V]:
        buckets = self._buckets.copy()
        at = hash(key) % len(buckets)
        buckets[at] = {k: v for k, v in buckets[at].items() if k != key}
        return _map_of(buckets)

    def items(self) -> Iterator[tuple[K, V]]:
        return (item for bucket in self._buckets for item in bucket.items())

    def values(self) -> Iterator[V]:
        return (value for bucket in self._buckets if bucket for value in bucket.values())

    def __len__(self) -> int:
        return sum(map(len, self._buckets))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PersistentMap) and self._buckets == other._buckets

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Callable[..., PersistentMap[K, V]], tuple[tuple[tuple[K, V], ...], int]]:
        """Hashes of strings differ between processes, so the buckets are made again where it arrives."""
        return _remade, (tuple(self.items()), len(self._buckets))


def _map_of(buckets: list[dict[K, V]]) -> PersistentMap[K, V]:
    made: PersistentMap[K, V] = PersistentMap.__new__(PersistentMap)
    made._buckets = buckets
    return made


def _remade(items: tuple[tuple[K, V], ...], num_buckets: int) -> PersistentMap[K, V]:
    return PersistentMap(items, num_buckets=num_buckets)


class BoundedLog(Generic[T]):
    """The last ``limit`` items or a few more, oldest first, and how many there ever were. It never changes."""

    __slots__ = ("limit", "older", "recent", "total")

    def __init__(self, limit: int, total: int = 0, older: tuple[T, ...] = (), recent: tuple[T, ...] = ()) -> None:
        self.limit = limit
        self.total = total
        self.older = older
        self.recent = recent

    def append(self, item: T) -> BoundedLog[T]:
        if len(self.recent) < _RECENT:
            return BoundedLog(self.limit, self.total + 1, self.older, (*self.recent, item))
        kept = (self.older + self.recent)[-self.limit :] if self.limit else ()
        return BoundedLog(self.limit, self.total + 1, kept, (item,))

    def __iter__(self) -> Iterator[T]:
        yield from self.older
        yield from self.recent

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BoundedLog) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._parts())

    def _parts(self) -> tuple[int, int, tuple[T, ...], tuple[T, ...]]:
        return self.limit, self.total, self.older, self.recent


def add_to_ranges(ranges: Ranges, number: int, *, limit: int) -> Ranges | None:
    """``ranges`` with ``number`` in it, or None when it already was.

    Beyond ``limit`` ranges the oldest gap is closed: the numbers in it count as seen.
    """
    if ranges and number == ranges[-1][1] + 1:  # what a writer that loses nothing sends
        return (*ranges[:-1], (ranges[-1][0], number))
    at = bisect_right(ranges, number, key=_start)
    before = ranges[at - 1] if at else None
    after = ranges[at] if at < len(ranges) else None
    if before and number <= before[1]:
        return None
    low = before[0] if before and before[1] == number - 1 else number
    high = after[1] if after and after[0] == number + 1 else number
    first = at - 1 if low != number else at
    last = at + 1 if high != number else at
    grown = (*ranges[:first], (low, high), *ranges[last:])
    return grown if len(grown) <= limit else ((grown[0][0], grown[1][1]), *grown[2:])


def _start(interval: tuple[int, int]) -> int:
    return interval[0]
