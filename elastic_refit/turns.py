"""Whose refit is next: one at a time, and of those that wait only the newest version.

What must never happen here: two refits at once, or a caller that waits for a version which nobody will push any more.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from elastic_refit.errors import Superseded

__all__ = ["Turns"]


@dataclass(slots=True)
class _Waiting:
    version: int
    superseded_by: int | None = None


class Turns:
    """Any thread may use it. At most one caller is inside and one waits; of two that would wait, one has to go."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_taken = False
        self._next: _Waiting | None = None

    @contextmanager
    def turn(self, version: int) -> Iterator[None]:
        """Wait until nobody else is inside, at most for the one who is, and stay inside for the body.

        Raises:
            Superseded: somebody waits with a newer version, or came while this one waited with one as new.
        """
        with self._changed:
            self._wait(_Waiting(version))
        try:
            yield
        finally:
            with self._changed:
                self._is_taken = False
                self._changed.notify_all()

    def _wait(self, mine: _Waiting) -> None:
        other = self._next
        if other is not None and other.version > mine.version:
            raise _superseded(mine.version, other.version)
        if other is not None:
            other.superseded_by = mine.version
            self._changed.notify_all()
        self._next = mine
        self._changed.wait_for(lambda: mine.superseded_by is not None or not self._is_taken)
        if mine.superseded_by is not None:
            raise _superseded(mine.version, mine.superseded_by)
        self._next, self._is_taken = None, True


def _superseded(version: int, by: int) -> Superseded:
    return Superseded(f"refit v{version} had not begun when v{by} was asked for", version=version, by=by)
