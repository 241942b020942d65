"""The thread that answers the door: it admits peers that prove themselves and parks their links until they are wanted.

It owns the listeners and every connection that has proved nothing yet. Nothing that a stranger does or leaves undone
keeps a peer waiting: all of it is non-blocking, each handshake has a deadline and a size, there is a cap on how many
are open at once, and when it is reached the oldest goes.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic_refit.communicators import handshake
from elastic_refit.communicators.base import GroupSpec
from elastic_refit.communicators.handshake import HandshakeRefused, Hello, Refusal
from elastic_refit.communicators.links import Bell

__all__ = ["Limits", "Switchboard"]

logger = logging.getLogger(__name__)

_ACCEPT_PAUSE_S = 0.05
_REFUSALS_LOGGED = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """What one unproven connection may take, and how many there may be at once."""

    handshake_s: float = 5.0
    half_open: int = 64


@dataclass(slots=True)
class _HalfOpen:
    sock: socket.socket
    nonce: bytes
    deadline: float
    received: bytearray = field(default_factory=bytearray)


class Switchboard:
    """Admits the peers of one group; one daemon thread from ``start`` until ``stop``.

    ``on_arrival`` is called on that thread, without a lock held, each time a link was parked.
    """

    def __init__(self, group: GroupSpec, listeners: list[socket.socket], limits: Limits) -> None:
        self._group = group
        self._listeners = listeners
        self._limits = limits
        self._lock = threading.RLock()
        self._parked: dict[tuple[str, int], socket.socket] = {}
        self._parked_max = 8 + 4 * group.world_size
        self._half_open: dict[int, _HalfOpen] = {}
        self._bell = Bell()
        self._stopping = False
        self._refused = 0
        self._on_arrival: dict[str, Callable[[], None]] = {}
        self._thread = threading.Thread(target=self._run, name=f"switchboard-{group.epoch}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close the door. Any thread; the thread ends by itself, and waits for nobody meanwhile."""
        self._stopping = True
        self._bell.ring()

    def subscribe(self, channel: str, on_arrival: Callable[[], None]) -> None:
        with self._lock:
            self._on_arrival[channel] = on_arrival

    def unsubscribe(self, channel: str) -> None:
        """Forget a channel and whoever still waits on it."""
        with self._lock:
            self._on_arrival.pop(channel, None)
            for key in [key for key in self._parked if key[0] == channel]:
                self._parked.pop(key).close()

    def claim(self, channel: str, sender: int) -> socket.socket | None:
        """The link that ``sender`` opened on ``channel``, once; None if it has not yet."""
        with self._lock:
            return self._parked.pop((channel, sender), None)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ, self._bell.quiet)
            for listener in self._listeners:
                selector.register(listener, selectors.EVENT_READ, lambda door=listener: self._accept(selector, door))
            try:
                self._serve(selector)
            finally:
                self._close_everything()

    def _serve(self, selector: selectors.BaseSelector) -> None:
        while not self._stopping:
            for key, _ in selector.select(self._patience_s()):
                key.data()
            self._expire(selector)

    def _patience_s(self) -> float | None:
        deadlines = [peer.deadline for peer in self._half_open.values()]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _accept(self, selector: selectors.BaseSelector, door: socket.socket) -> None:
        try:
            sock, _ = door.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of file descriptors, as a rule: the door stays readable, so looking again at once would spin.
            logger.error("accept_failed", extra={"epoch": self._group.epoch, "error": str(error)})
            time.sleep(_ACCEPT_PAUSE_S)
            return
        sock.setblocking(False)
        if len(self._half_open) >= self._limits.half_open:
            oldest = next(iter(self._half_open.values()))
            self._refuse(selector, oldest, HandshakeRefused(Refusal.CROWDED, "the oldest of too many"))
        caller = _HalfOpen(sock, os.urandom(handshake.NONCE_BYTES), time.monotonic() + self._limits.handshake_s)
        self._half_open[sock.fileno()] = caller
        selector.register(sock, selectors.EVENT_READ, lambda: self._hear(selector, caller))
        _send(sock, handshake.encode_greeting(caller.nonce))

    def _hear(self, selector: selectors.BaseSelector, caller: _HalfOpen) -> None:
        if caller.sock.fileno() < 0:
            return  # evicted earlier in this round
        try:
            data = caller.sock.recv(handshake.hello_bytes_missing(caller.received))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._refuse(selector, caller, HandshakeRefused(Refusal.MALFORMED, "it hung up"))
            return
        caller.received += data
        if handshake.hello_bytes_missing(caller.received) == 0:
            self._judge(selector, caller)

    def _judge(self, selector: selectors.BaseSelector, caller: _HalfOpen) -> None:
        try:
            hello, nonce = handshake.verify_hello(self._group, bytes(caller.received), caller.nonce)
            self._make_room(hello)
        except HandshakeRefused as refused:
            self._refuse(selector, caller, refused)
            return
        self._forget(selector, caller)
        if not _send(caller.sock, handshake.seal_welcome(self._group, hello, caller.nonce, nonce)):
            caller.sock.close()
            return
        with self._lock:
            earlier = self._parked.pop((hello.channel, hello.sender), None)
            self._parked[hello.channel, hello.sender] = caller.sock
            announce = self._on_arrival.get(hello.channel)
        if earlier is not None:
            earlier.close()
        if announce is not None:
            announce()

    def _make_room(self, hello: Hello) -> None:
        with self._lock:
            if len(self._parked) >= self._parked_max:
                raise HandshakeRefused(Refusal.CROWDED, f"rank {hello.sender} on channel {hello.channel!r}")

    def _refuse(self, selector: selectors.BaseSelector, caller: _HalfOpen, refused: HandshakeRefused) -> None:
        self._forget(selector, caller)
        _send(caller.sock, handshake.encode_refusal(refused.refusal))
        caller.sock.close()
        self._refused += 1
        if self._refused <= _REFUSALS_LOGGED or self._refused % 1000 == 0:
            fields = {
                "epoch": self._group.epoch,
                "rank": self._group.rank,
                "refusal": refused.refusal.name.lower(),
                "claim": refused.claim,
                "refused_total": self._refused,
            }
            logger.warning("peer_refused", extra=fields)

    def _forget(self, selector: selectors.BaseSelector, caller: _HalfOpen) -> None:
        selector.unregister(caller.sock)
        del self._half_open[caller.sock.fileno()]

    def _expire(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        for caller in [caller for caller in self._half_open.values() if caller.deadline <= now]:
            self._refuse(selector, caller, HandshakeRefused(Refusal.LATE, "it stayed silent"))

    def _close_everything(self) -> None:
        for listener in self._listeners:
            listener.close()
        for caller in self._half_open.values():
            caller.sock.close()
        self._half_open.clear()
        with self._lock:
            self._stopping = True
            for sock in self._parked.values():
                sock.close()
            self._parked.clear()
        self._bell.close()


def _send(sock: socket.socket, data: bytes) -> bool:
    """A few bytes into an empty buffer: they fit, or the other end is gone."""
    try:
        return sock.send(data, socket.MSG_NOSIGNAL) == len(data)
    except OSError:
        return False
