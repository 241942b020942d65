"""A joined group, or a part of one, as a ring of links: what every communicator that is built on them shares.

Each rank holds a link to the next rank and one from the previous. Over them it learns that a neighbour has gone, and
what every rank chose when the group is split. What moves the bytes is the subclass's.

What must never happen here: a call that ends well after an abort.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Self, TypeVar

from elastic_refit.communicators.base import Communicator, Progress
from elastic_refit.communicators.exchange import Lane, Transfer, exchange
from elastic_refit.communicators.links import Link
from elastic_refit.communicators.splitting import gather, members_of, pack_choice, unpack_choice
from elastic_refit.communicators.wiring import Wiring
from elastic_refit.core.evidence import WaitingOn
from elastic_refit.errors import PeerLost

__all__ = ["RingCommunicator"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
Message = TypeVar("Message")
"""What ``send`` and ``recv`` leave for ``_exchange``."""
_NOTHING: tuple[WaitingOn, int | None] = ("none", None)


class RingCommunicator(Communicator, Generic[Message]):
    """``ranks[r]`` is the epoch's rank of rank ``r`` here: all of them in the group itself, some in a part of it."""

    def __init__(
        self, wiring: Wiring, ranks: tuple[int, ...], *, chunk_bytes: int, parent: RingCommunicator[Message] | None
    ) -> None:
        self.rank = ranks.index(wiring.group.rank)
        self.world_size = len(ranks)
        self.epoch = wiring.group.epoch
        self._wiring = wiring
        self._life = wiring.life
        self._ranks = ranks
        self._chunk_bytes = chunk_bytes
        self._parent = parent
        self._children: tuple[Self, ...] = ()
        self._children_lock = threading.RLock()
        self._to_next = Lane(ranks[(self.rank + 1) % self.world_size], is_send=True)
        self._from_previous = Lane(ranks[self.rank - 1], is_send=False)
        self._num_splits = 0
        self._posted: list[Message] | None = None
        self._waiting_on = _NOTHING

    def form(self, deadline: float) -> None:
        """Come together with the other ranks; raises as ``join`` does."""
        self._run(lambda: self._form(deadline))

    def _form(self, deadline: float) -> None:
        self._open_ring(deadline, guards=())

    def _open_ring(self, deadline: float, guards: Sequence[Link]) -> None:
        """Open the link to the next rank and await the one from the previous."""
        if self.world_size > 1:
            self._wiring.open((self._to_next, self._from_previous), deadline, guards=guards)

    @abstractmethod
    def _broadcasting(self, buffer: memoryview, root: int, progress: Progress | None) -> Callable[[], None]:
        """What makes one broadcast.

        Raises:
            ValueError: the buffer cannot be used so.
        """

    @abstractmethod
    def _message(self, lane: Lane, peer: int, buffer: memoryview, progress: Progress | None) -> Message:
        """One ``send`` or ``recv`` to be made; ``peer`` is a rank here.

        Raises:
            ValueError: the buffer cannot be used so.
        """

    @abstractmethod
    def _exchange(self, messages: list[Message]) -> None:
        """Issue the messages together; return when all are through."""

    @abstractmethod
    def _part(self, wiring: Wiring, ranks: tuple[int, ...]) -> Self:
        """A communicator for a part of this group; its ring is not open yet."""

    def broadcast(self, buffer: memoryview, root: int, *, progress: Progress | None = None) -> None:
        if not 0 <= root < self.world_size:
            raise ValueError(f"root {root} is not one of {self.world_size} ranks")
        if self._posted is not None:
            raise ValueError("a group is for send and recv; issue the broadcast on its own")
        self._run(self._broadcasting(buffer, root, progress))

    def send(self, buffer: memoryview, peer: int, *, progress: Progress | None = None) -> None:
        self._post(self._message(Lane(self._peer(peer), is_send=True), peer, buffer, progress))

    def recv(self, buffer: memoryview, peer: int, *, progress: Progress | None = None) -> None:
        self._post(self._message(Lane(self._peer(peer), is_send=False), peer, buffer, progress))

    @contextmanager
    def group(self) -> Iterator[None]:
        if self._posted is not None:
            raise ValueError("groups do not nest")
        posted: list[Message] = []
        self._posted = posted
        try:
            yield
        finally:
            self._posted = None
        self._run(lambda: self._exchange(posted))

    def _post(self, message: Message) -> None:
        self._life.check()
        if self._posted is not None:
            self._posted.append(message)
        else:
            self._run(lambda: self._exchange([message]))

    def split(self, color: int | None, key: int) -> Communicator | None:
        return self._run(lambda: self._split(color, key))

    def _split(self, color: int | None, key: int) -> Self | None:
        self._num_splits += 1
        choices = [unpack_choice(raw) for raw in self._gather(pack_choice((color, key)))]
        if color is None:
            return None
        ranks = tuple(self._ranks[rank] for rank in members_of(color, choices))
        wiring = self._wiring.branch(f"{self._num_splits}:{color}")
        child = self._part(wiring, ranks)
        with self._children_lock:
            self._children += (child,)
        try:
            self._life.check()  # an abort that came before the child was listed has not reached it
            child._run(lambda: child._open_ring(time.monotonic() + wiring.patience_s, self._neighbours()))
        except BaseException:
            child._end(is_faulty=True)
            raise
        return child

    def _gather(self, own: bytes, deadline: float = math.inf) -> list[bytes]:
        """What every rank gave, by rank; as many bytes from each.

        Raises:
            ExchangeLate: some had not come by the deadline.
        """

        def pass_along(out: memoryview, into: memoryview) -> None:
            previous = (self.rank - 1) % self.world_size
            messages = [
                Transfer(self._to_next, self.rank, out, self._chunk_bytes, None),
                Transfer(self._from_previous, previous, into, self._chunk_bytes, None),
            ]
            self._move(messages, deadline)

        return gather(own, rank=self.rank, world_size=self.world_size, pass_along=pass_along)

    def _move(self, transfers: list[Transfer], deadline: float = math.inf) -> None:
        """Move messages over links that are open, or that the peer opens."""
        exchange(transfers, find_link=self._wiring.find, bell=self._life.bell, watch=self._watch, deadline=deadline)

    def _neighbours(self) -> list[Link]:
        """The links from the previous rank and to the next."""
        if self.world_size == 1:
            return []
        return [self._link(self._from_previous), self._link(self._to_next)]

    def _link(self, lane: Lane) -> Link:
        link = self._wiring.find(lane)
        assert link is not None, "it was opened"
        return link

    def _watch(self, lane: Lane) -> None:
        self._waiting_on = ("send" if lane.is_send else "recv", lane.peer)

    def wait(self) -> None:
        self._life.check()

    def abort(self, reason: str) -> None:
        self._mark_aborted(reason)

    def _mark_aborted(self, reason: str) -> None:
        if not self._life.abort(reason):
            return
        for child in self._children:
            child._mark_aborted(reason)
        self._wiring.hang_up()
        fields = {"epoch": self.epoch, "rank": self._wiring.group.rank, "reason": reason}
        logger.warning("communicator_aborted", extra=fields)

    def close(self) -> None:
        self._end(is_faulty=False)

    def _end(self, *, is_faulty: bool) -> None:
        if not self._life.close():
            return
        for child in self._children:
            child._end(is_faulty=is_faulty)
        self._wiring.hang_up()
        if self._parent is not None:
            self._parent._disown(self)

    def _disown(self, child: RingCommunicator[Message]) -> None:
        with self._children_lock:
            self._children = tuple(other for other in self._children if other is not child)

    @property
    def aborted(self) -> str | None:
        return self._life.reason

    @property
    def released_s(self) -> float | None:
        return longest([self._life.released_s, *(child.released_s for child in self._children)])

    @property
    def waiting_on(self) -> tuple[WaitingOn, int | None]:
        for child in self._children:
            if child.waiting_on != _NOTHING:
                return child.waiting_on
        return self._waiting_on

    def _run(self, call: Callable[[], T]) -> T:
        try:
            result = self._life.run(call)
        except PeerLost:
            raise  # what the call waited for is kept: it is what this rank can say of the edge
        except BaseException:
            self._waiting_on = _NOTHING
            raise
        self._waiting_on = _NOTHING
        return result

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < self.world_size or rank == self.rank:
            raise ValueError(f"rank {rank} is no peer of rank {self.rank} in a group of {self.world_size}")
        return self._ranks[rank]


def longest(times: list[float | None]) -> float | None:
    """The greatest of them once all are known."""
    known = [seconds for seconds in times if seconds is not None]
    return max(known) if len(known) == len(times) else None
