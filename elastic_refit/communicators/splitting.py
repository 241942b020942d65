"""Who goes into which part when a group is split: what every rank says, and what each concludes from it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

__all__ = ["Choice", "gather_choices", "members_of"]

_CHOICE = struct.Struct("!?qq")

Choice = tuple[int | None, int]
"""``(color, key)`` of one rank; color None takes no part."""


def gather_choices(
    own: Choice, *, rank: int, world_size: int, pass_along: Callable[[memoryview, memoryview], None]
) -> list[Choice]:
    """Every rank's choice, by rank. ``pass_along(out, into)`` sends to the next rank and receives from the previous."""
    color, key = own
    try:
        out = bytearray(_CHOICE.pack(color is not None, color or 0, key))
    except struct.error as error:
        raise ValueError(f"color {color} and key {key} must fit into 64 bits") from error
    choices = [own] * world_size
    for step in range(1, world_size):
        into = bytearray(_CHOICE.size)
        pass_along(memoryview(out), memoryview(into))
        has_color, other_color, other_key = _CHOICE.unpack(into)
        choices[(rank - step) % world_size] = (other_color if has_color else None, other_key)
        out = into
    return choices


def members_of(color: int, choices: Sequence[Choice]) -> list[int]:
    """The ranks that chose ``color``, in the order of ``(key, rank)``."""
    return sorted((rank for rank, choice in enumerate(choices) if choice[0] == color), key=lambda r: (choices[r][1], r))
