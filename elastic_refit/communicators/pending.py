"""A rank that listens and has not joined: the same for every communicator that is built on a ring.

What must never happen here: a join that neither an abort nor its deadline ends.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from elastic_refit.communicators.addresses import Address
from elastic_refit.communicators.base import Communicator, GroupSpec, PendingCommunicator
from elastic_refit.communicators.handshake import check_group
from elastic_refit.communicators.ring import RingCommunicator
from elastic_refit.communicators.switchboard import Limits, Switchboard
from elastic_refit.communicators.tap import Tap
from elastic_refit.communicators.wiring import Wiring
from elastic_refit.errors import CommunicatorAborted, CommunicatorError

__all__ = ["RingPending"]


class RingPending(PendingCommunicator):
    """``make(wiring, ranks)`` gives the communicator of the whole group, not formed yet."""

    def __init__(
        self,
        address: Address,
        listeners: list[socket.socket],
        *,
        make: Callable[[Wiring, tuple[int, ...]], RingCommunicator[Any]],
        limits: Limits,
        tap: Tap | None = None,
    ) -> None:
        self.address = str(address)
        self._listeners = listeners
        self._make = make
        self._limits = limits
        self._tap = tap
        self._lock = threading.RLock()
        self._reason: str | None = None
        self._made: RingCommunicator[Any] | None = None
        self._closed = False

    def join(self, group: GroupSpec, *, timeout_s: float) -> Communicator:
        check_group(group, self.address)
        deadline = time.monotonic() + timeout_s
        communicator = self._take_over(group, timeout_s)
        try:
            communicator.form(deadline)
        except BaseException:
            communicator.close()
            raise
        return communicator

    def _take_over(self, group: GroupSpec, timeout_s: float) -> RingCommunicator[Any]:
        with self._lock:
            if self._reason is not None:
                raise CommunicatorAborted(f"aborted before joining: {self._reason}", reason=self._reason)
            if self._closed or self._made is not None:
                raise CommunicatorError("a pending communicator joins once, and not after it was closed")
            switchboard = Switchboard(group, self._listeners, self._limits)
            wiring = Wiring(group, switchboard, patience_s=timeout_s, tap=self._tap)
            self._made = self._make(wiring, tuple(range(group.world_size)))
            switchboard.start()
            return self._made

    def abort(self, reason: str) -> None:
        with self._lock:
            made = self._made
            if made is None and self._reason is None:
                self._reason = reason
                self._stop_listening()
        if made is not None:
            made.abort(reason)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._made is None:
                self._stop_listening()

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()
