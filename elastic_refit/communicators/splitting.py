"""Who goes into which part when a group is split: what every rank says, and what each concludes from it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

__all__ = ["Choice", "gather", "members_of", "pack_choice", "unpack_choice"]

_CHOICE = struct.Struct("!?qq")

Choice = tuple[int | None, int]
"""``(color, key)`` of one rank; color None takes no part."""


def gather(
    own: bytes, *, rank: int, world_size: int, pass_along: Callable[[memoryview, memoryview], None]
) -> list[bytes]:
    """What every rank gave, by rank; ``pass_along(out, into)`` sends to the next and receives from the previous."""
    given = [own] * world_size
    out = bytearray(own)
    for step in range(1, world_size):
        into = bytearray(len(own))
        pass_along(memoryview(out), memoryview(into))
        given[(rank - step) % world_size] = bytes(into)
        out = into
    return given


def pack_choice(choice: Choice) -> bytes:
    """The inverse of ``unpack_choice``.

    Raises:
        ValueError: color or key does not fit.
    """
    color, key = choice
    try:
        return _CHOICE.pack(color is not None, color or 0, key)
    except struct.error as error:
        raise ValueError(f"color {color} and key {key} must fit into 64 bits") from error


def unpack_choice(raw: bytes) -> Choice:
    has_color, color, key = _CHOICE.unpack(raw)
    return (color if has_color else None, key)


def members_of(color: int, choices: Sequence[Choice]) -> list[int]:
    """The ranks that chose ``color``, in the order of ``(key, rank)``."""
    return sorted((rank for rank, choice in enumerate(choices) if choice[0] == color), key=lambda r: (choices[r][1], r))
