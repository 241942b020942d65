"""Where faults on purpose take hold of a process' links: to stop what moves on them, or to alter what comes in.

A backend that is made without a tap asks nothing. What must never happen here: a hold that an abort does not end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from elastic_refit.communicators.base import GroupSpec

__all__ = ["Tap"]


class _Links(Protocol):
    def cut(self, peers: set[int]) -> int: ...


class Tap:
    """The links of the newest epoch that this process has joined. Any thread may use it."""

    def __init__(self) -> None:
        self.on_dialled: Callable[[], None] | None = None
        """Called each time this rank has opened a link of its own, on the thread that did."""
        self.is_relay = False
        """Pass on what was received and not what its sender holds, where several ranks read one memory."""
        self._is_altering = False
        self._group: GroupSpec | None = None
        self._links: list[_Links] = []

    def follow(self, group: GroupSpec, links: _Links) -> None:
        """These links are of ``group``; those of an earlier one are over."""
        if self._group is None or self._group.epoch != group.epoch:
            self._links = []
        self._group = group
        self._links.append(links)

    def dialled(self) -> None:
        if self.on_dialled is not None:
            self.on_dialled()

    def cut(self, member: str) -> int:
        """Let no byte move between this rank and ``member``, in either direction, until the links are shut down.

        Returns how many links there are now; those that are opened later are cut as well.
        """
        assert self._group is not None, "nothing was joined"
        names = enumerate(self._group.identities)
        peers = {rank for rank, name in names if name == member or name.startswith(f"{member}/")}
        return sum(links.cut(peers) for links in self._links)

    def alter_next(self) -> None:
        """Have the next bytes that come in altered before anybody sees them."""
        self._is_altering = True

    def pass_through(self, chunk: memoryview) -> None:
        """``chunk`` has come in, and was not passed on yet."""
        if self._is_altering:
            self._is_altering = False
            chunk[0] ^= 0xFF
