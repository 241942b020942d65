"""The ``tcp`` communicator: own sockets, so that an abort is real.

A group is a ring of one-directional links, opened at ``join``: rank ``r`` dials ``r + 1``. Links between other pairs
are opened at their first message, by the sender; the other end's switchboard answers, whatever its own thread is
doing. So a group of a thousand ranks costs each of them two links.

What must never happen here: a listener on an interface that nobody asked for; a file descriptor closed while another
thread may use it; a wait that neither an abort nor a deadline ends.
"""

from __future__ import annotations

from elastic_refit.communicators.addresses import bind_listeners
from elastic_refit.communicators.base import PendingCommunicator
from elastic_refit.communicators.pending import RingPending
from elastic_refit.communicators.switchboard import Limits
from elastic_refit.communicators.tap import Tap
from elastic_refit.communicators.tcp_group import TcpCommunicator
from elastic_refit.communicators.wiring import Wiring

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
        tap: Tap | None = None,
    ) -> None:
        if chunk_bytes <= 0:
            raise ValueError(f"chunk_bytes must be positive, not {chunk_bytes}")
        self._host = host
        self._chunk_bytes = chunk_bytes
        self._use_unix = use_unix
        self._limits = limits or Limits()
        self._tap = tap

    def bind(self) -> PendingCommunicator:
        address, listeners = bind_listeners(self._host, use_unix=self._use_unix)
        return RingPending(address, listeners, make=self._make, limits=self._limits, tap=self._tap)

    def _make(self, wiring: Wiring, ranks: tuple[int, ...]) -> TcpCommunicator:
        return TcpCommunicator(wiring, ranks, chunk_bytes=self._chunk_bytes)
