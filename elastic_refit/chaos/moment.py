"""What a refit says of itself where it can be struck."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Moment"]


def _nothing() -> None:
    """There is no progress to tell of."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The refit of ``version`` has come to ``phase`` in this process, in ``epoch`` (-1: in none).

    Besides the phases of :data:`PHASES` there are ``pausing`` and ``applying:K``: bucket K was received whole and
    passed on, and its bytes are in ``buffer``. ``tick`` says that there was progress.
    """

    version: int
    phase: str
    epoch: int = -1
    tick: Callable[[], None] = _nothing
    buffer: memoryview | None = None
