"""Open a link to a peer: connect, prove who we are, check who it is. On the calling thread, bounded, and abortable."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable

from elastic_refit.communicators import handshake
from elastic_refit.communicators.addresses import Address
from elastic_refit.communicators.base import GroupSpec
from elastic_refit.communicators.handshake import HandshakeRefused, Hello, Refusal
from elastic_refit.communicators.links import Bell

__all__ = ["DialTimeout", "NobodyListens", "dial"]

_REDIAL_S = 0.01


class NobodyListens(Exception):
    """The peer's listener is gone. It was there before its address was known, so the peer has gone too."""


class DialTimeout(Exception):
    """The peer did not finish the handshake in time."""


class _HungUp(Exception):
    """The peer dropped the connection and judged nothing: its door was crowded, or it is dying. Dial again."""


def dial(group: GroupSpec, hello: Hello, *, deadline: float, bell: Bell, check: Callable[[], None]) -> socket.socket:
    """A proven connection to ``hello.receiver``.

    ``check`` is called before each wait and whenever ``bell`` rings; it raises to break off.

    Raises:
        NobodyListens, DialTimeout, HandshakeRefused: see there.
    """
    address = Address.parse(group.addresses[hello.receiver])
    while True:
        sock, target = address.open_socket()
        attempt = _Attempt(sock, deadline, bell, check)
        try:
            attempt.connect(target)
            _prove(group, hello, attempt)
        except _HungUp:
            sock.close()
            attempt.pause(_REDIAL_S)
        except BaseException:
            sock.close()
            raise
        else:
            return sock


def _prove(group: GroupSpec, hello: Hello, attempt: _Attempt) -> None:
    nonce = os.urandom(handshake.NONCE_BYTES)
    listener_nonce = handshake.open_greeting(attempt.read(handshake.GREETING_BYTES))
    attempt.write(handshake.seal_hello(group, hello, listener_nonce, nonce))
    verdict = attempt.read(handshake.VERDICT_BYTES)
    try:
        handshake.open_verdict(group, verdict, hello, listener_nonce, nonce)
    except HandshakeRefused as refused:
        if refused.refusal in (Refusal.CROWDED, Refusal.LATE):
            raise _HungUp from refused
        raise


class _Attempt:
    """One connection attempt: non-blocking calls, each waited for until the deadline or the bell."""

    def __init__(self, sock: socket.socket, deadline: float, bell: Bell, check: Callable[[], None]) -> None:
        self._sock = sock
        self._deadline = deadline
        self._bell = bell
        self._check = check

    def connect(self, target: str | tuple[str, int]) -> None:
        code = self._sock.connect_ex(target)
        if code == errno.EINPROGRESS:
            self._wait(select.POLLOUT)
            code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == errno.EAGAIN:
            raise _HungUp  # a Unix listener whose queue is full
        if code:
            raise NobodyListens(os.strerror(code))

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            self._wait(select.POLLIN)
            try:
                more = self._sock.recv(size - len(data))
            except BlockingIOError:
                continue
            except OSError as error:
                raise _HungUp from error
            if not more:
                raise _HungUp
            data += more
        return data

    def write(self, data: bytes) -> None:
        """A few bytes into an empty buffer: they fit, or the other end is gone."""
        try:
            self._sock.send(data, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise _HungUp from error

    def pause(self, seconds: float) -> None:
        self._poll(select.poll(), min(seconds, self._remaining_s()))

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._sock, event)
        while not self._poll(poll, self._remaining_s()):
            pass

    def _poll(self, poll: select.poll, timeout_s: float) -> bool:
        """Whether the socket is ready; the bell only makes us look."""
        self._check()
        poll.register(self._bell, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(timeout_s * 1000)}
        if self._bell.fileno() in ready:
            self._bell.quiet()
        self._check()
        return self._sock.fileno() in ready

    def _remaining_s(self) -> float:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise DialTimeout
        return remaining
