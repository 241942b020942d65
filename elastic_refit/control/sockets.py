"""ZeroMQ sockets as both sides of the channel need them, and the thread that owns them.

What must never happen here: a socket used by two threads, a message longer than ``MAX_MESSAGE_BYTES`` taken in.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from abc import ABC, abstractmethod
from math import ceil

import zmq

from elastic_refit.control.setup import ChannelAddress
from elastic_refit.control.wire import MAX_MESSAGE_BYTES

__all__ = ["SocketThread"]

logger = logging.getLogger(__name__)

_CURVE_BYTES = 33
"""What CURVE adds to a message: its name, a nonce, a flag and the authenticator (ZeroMQ RFC 26)."""
_HANDSHAKE_MS = 2_000
"""Then who says nothing, or was not let in, is cut off; an end of ours tries again."""
_RECONNECT_MS = 100
_SILENCE_S = 10
"""A connection to a node that has answered nothing for that long is given up and made anew.

The kernel looks (tcp(7)), not ZeroMQ's heartbeats: libzmq 4.3.5 aborts the process when a heartbeat is due on a
connection that ended while more was waiting than its queue holds, as after a freeze of the host.
"""
_PAUSE_S = 0.1


class SocketThread(ABC):
    """A daemon thread with a ZeroMQ context of its own; ``close`` ends it, whatever the other side does."""

    def __init__(self, name: str) -> None:
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._bell, zmq.POLLIN)
        self._is_closed = threading.Event()
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def close(self) -> None:
        """End the thread and free its sockets; returns when both are gone. Idempotent, from any thread but its own."""
        with self._closing:
            if self._is_closed.is_set():
                return
            self._is_closed.set()
            os.eventfd_write(self._bell, 1)
            if self._thread.ident is not None:
                self._thread.join()
            self._context.destroy(linger=0)
            os.close(self._bell)

    def _start(self) -> None:
        self._thread.start()

    def _socket(self, kind: int, address: ChannelAddress) -> zmq.Socket[bytes]:
        """A socket with everything set but its keys.

        All but the host's PULL conflate: their queue holds the last message only, so that no send ever waits, and
        nothing old is kept for who does not listen. A PULL that did would hear one of several senders.
        """
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.conflate = kind != zmq.PULL
        socket.linger = 0
        socket.maxmsgsize = MAX_MESSAGE_BYTES + _CURVE_BYTES
        socket.ipv6 = address.is_v6
        socket.handshake_ivl = _HANDSHAKE_MS
        socket.reconnect_ivl = _RECONNECT_MS
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = socket.tcp_keepalive_cnt = _SILENCE_S // 2
        socket.tcp_keepalive_intvl = 1
        socket.setsockopt(zmq.TCP_MAXRT, _SILENCE_S * 1000)
        return socket

    def _ring(self) -> None:
        """Wake the thread; of no effect once it is closed."""
        with self._closing, contextlib.suppress(BlockingIOError):
            if not self._is_closed.is_set():
                os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        while not self._is_closed.is_set():
            ready = dict(self._poller.poll(ceil(max(0.0, self._patience_s()) * 1000)))
            if self._bell in ready:
                os.eventfd_read(self._bell)
            try:
                self._turn()
            except Exception:  # one failed turn must not end the channel of a process that lives
                logger.exception("control_turn_failed")
                self._is_closed.wait(_PAUSE_S)

    @abstractmethod
    def _patience_s(self) -> float:
        """How long the thread has nothing to do by itself."""

    @abstractmethod
    def _turn(self) -> None:
        """Do what there is to do, without blocking."""
