"""Who is who: identities that outlive one membership.

A rank is a position in one epoch and never an identity. A shard index is a seat; an incarnation counts the processes
that have sat in it. Only ``(index, incarnation)`` names somebody.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Member", "ProcessId", "ShardId", "TrainerId", "parse_member"]


@dataclass(frozen=True, slots=True, order=True)
class TrainerId:
    """One process of the training job; rank ``index`` of every refit group."""

    index: int

    def __str__(self) -> str:
        return f"trainer[{self.index}]"


@dataclass(frozen=True, slots=True, order=True)
class ShardId:
    """One process set that holds, or held, shard seat ``index``."""

    index: int
    incarnation: int = 0

    def __str__(self) -> str:
        return f"shard[{self.index}]" if self.incarnation == 0 else f"shard[{self.index}]#{self.incarnation}"


Member = TrainerId | ShardId
"""A participant of a refit: the unit that is called, that answers, and that can be named by a verdict."""


def parse_member(text: str) -> Member:
    """The inverse of ``str(member)``.

    Raises:
        ValueError: ``text`` is neither ``trainer[i]``, ``shard[i]`` nor ``shard[i]#k``.
    """
    kind, bracket, rest = text.partition("[")
    index, closing, incarnation = rest.partition("]")
    if bracket and closing and index.isdecimal():
        if kind == "trainer" and not incarnation:
            return TrainerId(int(index))
        if kind == "shard" and not incarnation:
            return ShardId(int(index))
        if kind == "shard" and incarnation[:1] == "#" and incarnation[1:].isdecimal():
            return ShardId(int(index), int(incarnation[1:]))
    raise ValueError(f"{text!r} names neither a trainer nor a shard")


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process, named so that a reused pid cannot be mistaken for it.

    ``start_ticks`` is field 22 of ``/proc/<pid>/stat`` (clock ticks since boot, proc(5)).
    """

    node: str
    pid: int
    start_ticks: int
    process_group: int
