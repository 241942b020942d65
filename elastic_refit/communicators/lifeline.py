"""What one communicator holds open, and the three ways in which that ends: a failed call, an abort, a close.

Whoever ends it first shuts the links down, which frees the call in progress. They are closed by the thread of that
call when it leaves, or at once when there is none: never under somebody's feet.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from elastic_refit.communicators.exchange import Lane
from elastic_refit.communicators.links import Bell, Link, LinkEnded
from elastic_refit.errors import CommunicatorAborted, CommunicatorError, PeerLost

__all__ = ["Lifeline"]

T = TypeVar("T")


class Closable(Protocol):
    def close(self) -> None: ...


R = TypeVar("R", bound=Closable)


class Lifeline:
    """The links of one communicator. ``run``, ``adopt`` and ``find`` are for its thread; the rest is for any.

    The lock is reentrant because an abort may come from a signal handler on the thread that holds it.
    """

    def __init__(self, title: str) -> None:
        self.bell = Bell()
        self.reason: str | None = None
        self.released_s: float | None = None
        self._title = title
        self._lock = threading.RLock()
        self._links: dict[Lane, Link] = {}
        self._cut: set[int] = set()
        self._kept: list[Closable] = []
        self._busy = False
        self._retired = False
        self._closed = False
        self._failure: CommunicatorError | None = None
        self._aborted_at = 0.0

    def check(self) -> None:
        """Return if the communicator can be used.

        Raises:
            CommunicatorAborted, CommunicatorError: why it cannot.
        """
        if self.reason is not None:
            raise CommunicatorAborted(f"{self._title} was aborted: {self.reason}", reason=self.reason)
        if self._retired or self._closed:
            raise CommunicatorError(f"{self._title} was closed")
        if self._failure is not None:
            raise type(self._failure)(self._failure.message, **self._failure.fields)

    def run(self, call: Callable[[], T]) -> T:
        """Make one call. If it fails for whatever reason, the links are in an unknown state and are given up."""
        self._enter()
        try:
            result = call()
            self.check()  # links that were shut down still deliver what they held: success may be a partial buffer
            return result
        except LinkEnded as ended:
            self.check()
            self._failure = PeerLost(f"{self._title} lost rank {ended.peer}: {ended}", peer=ended.peer)
            raise self._failure from ended
        except CommunicatorError as error:
            self._failure = error
            raise
        except BaseException as error:
            self._failure = CommunicatorError(
                f"{self._title} was left by {type(error).__name__} in the middle of a call"
            )
            raise
        finally:
            self._leave()

    def adopt(self, lane: Lane, sock: socket.socket) -> Link:
        """Hold a proven connection from here on."""
        link = Link(sock, lane.peer, is_send=lane.is_send)
        link.is_cut = lane.peer in self._cut
        with self._lock:
            self._links[lane] = link
            if self.reason is not None or self._closed:
                link.shutdown()
        return link

    def find(self, lane: Lane) -> Link | None:
        return self._links.get(lane)

    def links(self) -> tuple[Link, ...]:
        """Those held, of whichever lanes."""
        return tuple(self._links.values())

    def cut(self, peers: set[int]) -> int:
        """Let nothing move on links with ``peers`` any more, as if the network between had gone; returns how many."""
        with self._lock:
            self._cut |= peers
            links = [link for link in self._links.values() if link.peer in peers]
            for link in links:
                link.is_cut = True
        return len(links)

    def keep(self, resource: R) -> R:
        """Have ``resource`` closed with the links."""
        with self._lock:
            self._kept.append(resource)
        return resource

    def discard(self, resource: Closable) -> None:
        """Close ``resource`` now."""
        with self._lock:
            self._kept.remove(resource)
        resource.close()

    def abort(self, reason: str) -> bool:
        """Whether this was the first, and before any close."""
        with self._lock:
            if self.reason is not None or self._retired or self._closed:
                return False
            self.reason, self._aborted_at = reason, time.monotonic()
            self._break_off()
            return True

    def retire(self) -> bool:
        """Refuse every call from here on, but hold the links until ``close``: peers do not see us go yet.

        False if a call is in progress, or it has ended already.
        """
        with self._lock:
            if self._busy or self._failure is not None or self.reason is not None or self._retired or self._closed:
                return False
            self._retired = True
            return True

    @property
    def is_retired(self) -> bool:
        return self._retired

    def close(self) -> bool:
        """Whether this was the first."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            self._break_off()
            return True

    def _break_off(self) -> None:
        if not self._busy:
            self._let_go()
            return
        for link in self._links.values():
            link.shutdown()
        self.bell.ring()

    def _let_go(self) -> None:
        if self.reason is not None and self.released_s is None:
            self.released_s = time.monotonic() - self._aborted_at
        for resource in (*self._links.values(), *self._kept):
            resource.close()
        self._links.clear()
        self._kept.clear()
        self.bell.close()

    def _enter(self) -> None:
        with self._lock:
            self.check()
            if self._busy:
                raise CommunicatorError(f"{self._title} is used by two threads at once")
            self._busy = True

    def _leave(self) -> None:
        with self._lock:
            self._busy = False
            if self.reason is not None or self._closed or self._failure is not None:
                self._let_go()
