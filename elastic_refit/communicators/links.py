"""One-directional connections between two ranks, and the bell that wakes a thread that polls.

A link is created after its handshake, used by one thread, and broken by any: ``shutdown`` frees whoever is blocked in
it. Its file descriptor is closed only by the thread that uses it, or when nobody does; else the number could already
belong to another file when a call that was about to use it gets there.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import struct
import threading
from collections.abc import Iterable, Sequence

__all__ = ["Bell", "Link", "LinkEnded", "first_hung_up"]

_UNIX_BUFFER_BYTES = 4 << 20
"""Asked for; the system caps it. Larger buffers let a neighbour run ahead. TCP sizes its own better than we could."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger of socket(7)
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))


class LinkEnded(Exception):
    """The connection to ``peer`` is over: by its death, its close, or our own shutdown. The caller knows which."""

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(why)
        self.peer = peer


class Link:
    """A proven connection to ``peer``, used in one direction. Calls block unless their name says otherwise.

    The close of one that receives resets a TCP connection, so that whoever is blocked in a send to us is free at once.
    An orderly end would not do: after ``shutdown`` the system announces no more room in our buffer, and a peer that
    waits for room is not told that the socket has gone either, for the minute that the system remembers it.
    """

    __slots__ = ("is_cut", "messages", "peer", "sock")

    def __init__(self, sock: socket.socket, peer: int, *, is_send: bool) -> None:
        self.sock = sock
        self.peer = peer
        self.messages = 0
        """Messages begun on this link; both ends count alike."""
        self.is_cut = False
        """Nothing moves until the link is shut down or its peer has gone: a fault on purpose."""
        sock.setblocking(True)
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            if not is_send:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)

    def send(self, data: memoryview | bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._send(rest, 0) :]

    def wait_readable(self, guards: Iterable[Link]) -> None:
        """Block until there is something to receive, or the peer of a guard, a link that only sends, has gone."""
        poll = select.poll()
        poll.register(self.sock, self.awaits(select.POLLIN))
        by_fd = {guard.sock.fileno(): guard for guard in guards}
        for fd in by_fd:
            poll.register(fd, select.POLLRDHUP)
        ready = [fd for fd, _ in poll.poll()]
        if self.sock.fileno() not in ready:
            raise LinkEnded(by_fd[ready[0]].peer, "hung up")

    def recv(self, into: memoryview) -> None:
        rest = into
        while rest:
            rest = rest[self._recv(rest, socket.MSG_WAITALL) :]

    def send_with_file(self, data: bytes, fd: int) -> None:
        """Send a few bytes, and a duplicate of ``fd`` with the first of them. Unix sockets only."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))]
        self._is_held(0)
        try:
            sent = self.sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise LinkEnded(self.peer, str(error)) from error
        self.send(memoryview(data)[sent:])

    def recv_with_file(self, into: memoryview) -> int | None:
        """Fill ``into``; the descriptor that came with it, which the caller then owns, or None."""
        self._is_held(0)
        room = socket.CMSG_LEN(struct.calcsize("i"))  # for one: the system closes what more a peer may send
        try:
            size, ancillary, *_ = self.sock.recvmsg_into([into], room, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise LinkEnded(self.peer, str(error)) from error
        if size == 0:
            raise LinkEnded(self.peer, "end of stream")
        fd = next((struct.unpack("i", data)[0] for _, kind, data in ancillary if kind == socket.SCM_RIGHTS), None)
        try:
            self.recv(into[size:])
        except LinkEnded:
            if fd is not None:
                os.close(fd)
            raise
        return fd

    def send_some(self, data: memoryview) -> int:
        """Send what fits without blocking; 0 if nothing does."""
        return self._send(data, socket.MSG_DONTWAIT)

    def recv_some(self, into: memoryview) -> int:
        """Receive what is there without blocking; 0 if nothing is."""
        return self._recv(into, socket.MSG_DONTWAIT)

    def awaits(self, events: int) -> int:
        """What to poll this link for, to move something; where nothing moves, only its end."""
        return 0 if self.is_cut else events

    def shutdown(self) -> None:
        """Free whoever is blocked in this link, and tell the peer. Any thread."""
        with contextlib.suppress(OSError):  # the peer was faster
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()

    def _is_held(self, flags: int) -> bool:
        """Whether nothing may move now; who may block does so until something may."""
        if not self.is_cut:
            return False
        poll = select.poll()
        poll.register(self.sock, 0)
        return not poll.poll(0 if flags & socket.MSG_DONTWAIT else None)

    def _send(self, data: memoryview, flags: int) -> int:
        if self._is_held(flags):
            return 0
        try:
            return self.sock.send(data, flags | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LinkEnded(self.peer, str(error)) from error

    def _recv(self, into: memoryview, flags: int) -> int:
        if self._is_held(flags):
            return 0
        try:
            size = self.sock.recv_into(into, 0, flags)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LinkEnded(self.peer, str(error)) from error
        if size == 0:
            raise LinkEnded(self.peer, "end of stream")
        return size


class Bell:
    """Wakes one thread out of a poll. Any thread may ring, also after it was closed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._listening, self._ringing = socket.socketpair()
        self._listening.setblocking(False)
        self._ringing.setblocking(False)
        self._closed = False

    def fileno(self) -> int:
        return self._listening.fileno()

    def ring(self) -> None:
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):  # it has rung often enough
                    self._ringing.send(b"\0")

    def quiet(self) -> None:
        """Forget earlier rings; look at what they announced after this, not before."""
        try:
            while self._listening.recv(4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """By the thread that polls, or when none does."""
        with self._lock:
            self._closed = True
            self._listening.close()
            self._ringing.close()


def first_hung_up(links: Sequence[Link], bell: Bell, timeout_s: float) -> Link | None:
    """The first of ``links`` whose peer has gone; None when the bell rings or the time is over before."""
    poll = select.poll()
    poll.register(bell, select.POLLIN)
    for link in links:
        poll.register(link.sock, select.POLLRDHUP)
    ready = {fd for fd, _ in poll.poll(None if math.isinf(timeout_s) else timeout_s * 1000)}
    if bell.fileno() in ready:
        bell.quiet()
    return next((link for link in links if link.sock.fileno() in ready), None)
