"""The ``tcp`` communicator: own sockets, so that an abort is real.

A group is a ring of one-directional links, opened at ``join``: rank ``r`` dials ``r + 1``. Links between other pairs
are opened at their first message, by the sender; the other end's switchboard answers, whatever its own thread is
doing. So a group of a thousand ranks costs each of them two links.

What must never happen here: a listener on an interface that nobody asked for; a file descriptor closed while another
thread may use it; a wait that neither an abort nor a deadline ends.
"""

from __future__ import annotations

import socket
import threading
import time

from elastic_refit.communicators.addresses import Address, bind_listeners
from elastic_refit.communicators.base import Communicator, GroupSpec, PendingCommunicator
from elastic_refit.communicators.handshake import check_group
from elastic_refit.communicators.switchboard import Limits, Switchboard
from elastic_refit.communicators.tcp_group import TcpCommunicator
from elastic_refit.communicators.wiring import Wiring
from elastic_refit.errors import CommunicatorAborted, CommunicatorError

__all__ = ["Limits", "TcpBackend"]

_CHUNK_BYTES = 1 << 20


class TcpBackend:
    """Makes ``tcp`` communicators.

    Peers on this host use a Unix socket, unless ``use_unix`` is off; others reach ``host``, by default the loopback
    address and so nobody. ``chunk_bytes`` is what a rank holds before it passes it on: larger costs fewer calls,
    smaller fills a long chain sooner.
    """

    name = "tcp"

    def __init__(
        self,
        host: str | None = None,
        *,
        chunk_bytes: int = _CHUNK_BYTES,
        use_unix: bool = True,
        limits: Limits | None = None,
    ) -> None:
        if chunk_bytes <= 0:
            raise ValueError(f"chunk_bytes must be positive, not {chunk_bytes}")
        self._host = host
        self._chunk_bytes = chunk_bytes
        self._use_unix = use_unix
        self._limits = limits or Limits()

    def bind(self) -> PendingCommunicator:
        address, listeners = bind_listeners(self._host, use_unix=self._use_unix)
        return _TcpPending(address, listeners, chunk_bytes=self._chunk_bytes, limits=self._limits)


class _TcpPending(PendingCommunicator):
    def __init__(self, address: Address, listeners: list[socket.socket], *, chunk_bytes: int, limits: Limits) -> None:
        self.address = str(address)
        self._listeners = listeners
        self._chunk_bytes = chunk_bytes
        self._limits = limits
        self._lock = threading.RLock()
        self._reason: str | None = None
        self._made: TcpCommunicator | None = None
        self._closed = False

    def join(self, group: GroupSpec, *, timeout_s: float) -> Communicator:
        check_group(group, self.address)
        deadline = time.monotonic() + timeout_s
        communicator = self._take_over(group, timeout_s)
        try:
            communicator.form_ring(deadline)
        except BaseException:
            communicator.close()
            raise
        return communicator

    def _take_over(self, group: GroupSpec, timeout_s: float) -> TcpCommunicator:
        with self._lock:
            if self._reason is not None:
                raise CommunicatorAborted(f"aborted before joining: {self._reason}", reason=self._reason)
            if self._closed or self._made is not None:
                raise CommunicatorError("a pending communicator joins once, and not after it was closed")
            switchboard = Switchboard(group, self._listeners, self._limits)
            wiring = Wiring(group, switchboard, patience_s=timeout_s)
            ranks = tuple(range(group.world_size))
            self._made = TcpCommunicator(wiring, ranks, chunk_bytes=self._chunk_bytes)
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
