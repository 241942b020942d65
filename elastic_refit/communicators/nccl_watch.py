"""Looking after work that NCCL has accepted, until it is done or never will be."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from elastic_refit.communicators.lifeline import Lifeline
from elastic_refit.communicators.links import Link, LinkEnded, first_hung_up
from elastic_refit.communicators.nccl_library import Handle

__all__ = ["Late", "watch_until"]

_FIRST_LOOK_S, _POLL_S, _LAST_LOOK_S = 20e-6, 1e-3, 4e-3
"""Between two looks: the first time, from where on the system's poll can wait as briefly, and at most."""


class Late(Exception):
    """The deadline came first."""


def watch_until(
    is_met: Callable[[], bool],
    *,
    handle: Handle,
    life: Lifeline,
    peers: Sequence[Link],
    deadline: float = math.inf,
    corroborate_s: float = 0.0,
) -> None:
    """Return when ``is_met()``, and nobody has aborted: NCCL calls an aborted operation done.

    An abort and the loss of a peer are noticed at once, whatever the length of the pauses. When a peer has gone, those
    before it in ``peers`` have ``corroborate_s`` to show that they have gone too: a death reaches its peers one after
    the other, and the first of them to leave for it looks like another death.

    Raises:
        LinkEnded: one of ``peers`` has gone; of several, the first.
        CommunicatorAborted, NcclFailure, Claimed, ContextLost: why it never will be.
        Late: it was not by the deadline.
    """
    pause_s = _FIRST_LOOK_S
    while not is_met():
        handle.is_ready()
        if time.monotonic() >= deadline:
            raise Late
        if pause_s < _POLL_S:
            time.sleep(pause_s)
        if lost := first_hung_up(peers, life.bell, 0.0 if pause_s < _POLL_S else pause_s):
            before = peers[: peers.index(lost)]
            first = first_hung_up(before, life.bell, corroborate_s) if before else None
            raise LinkEnded((first or lost).peer, "hung up")
        life.check()
        pause_s = min(2 * pause_s, _LAST_LOOK_S)
    life.check()
