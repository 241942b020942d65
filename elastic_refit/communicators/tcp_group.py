"""A joined ``tcp`` group, or a part of one: the calls that move bytes.

What must never happen here: a call that ends well after an abort.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from elastic_refit.communicators.base import Communicator, Progress
from elastic_refit.communicators.chain import Chain
from elastic_refit.communicators.exchange import Lane, Transfer, exchange
from elastic_refit.communicators.splitting import gather_choices, members_of
from elastic_refit.communicators.wiring import Wiring
from elastic_refit.core.evidence import WaitingOn

__all__ = ["TcpCommunicator"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
_NOTHING: tuple[WaitingOn, int | None] = ("none", None)


class TcpCommunicator(Communicator):
    """``ranks[r]`` is the epoch's rank of rank ``r`` here: all of them in the group itself, some in a part of it."""

    def __init__(
        self, wiring: Wiring, ranks: tuple[int, ...], *, chunk_bytes: int, parent: TcpCommunicator | None = None
    ) -> None:
        self.rank = ranks.index(wiring.group.rank)
        self.world_size = len(ranks)
        self.epoch = wiring.group.epoch
        self._wiring = wiring
        self._life = wiring.life
        self._ranks = ranks
        self._chunk_bytes = chunk_bytes
        self._parent = parent
        self._children: tuple[TcpCommunicator, ...] = ()
        self._to_next = Lane(ranks[(self.rank + 1) % self.world_size], is_send=True)
        self._from_previous = Lane(ranks[self.rank - 1], is_send=False)
        self._chain = Chain(wiring, ranks, chunk_bytes=chunk_bytes, watch=self._watch)
        self._num_splits = 0
        self._posted: list[Transfer] | None = None
        self._waiting_on = _NOTHING

    def form_ring(self, deadline: float) -> None:
        """Open the link to the next rank and await the one from the previous; raises as ``join`` does."""
        if self.world_size > 1:
            self._run(lambda: self._wiring.open((self._to_next, self._from_previous), deadline))

    def broadcast(self, buffer: memoryview, root: int, *, progress: Progress | None = None) -> None:
        if not 0 <= root < self.world_size:
            raise ValueError(f"root {root} is not one of {self.world_size} ranks")
        if self._posted is not None:
            raise ValueError("a group is for send and recv; issue the broadcast on its own")
        data = _flat(buffer, is_written=root != self.rank)
        self._run(lambda: self._chain.broadcast(data, root, progress))

    def send(self, buffer: memoryview, peer: int, *, progress: Progress | None = None) -> None:
        lane = Lane(self._peer(peer), is_send=True)
        self._post(Transfer(lane, self.rank, _flat(buffer, is_written=False), self._chunk_bytes, progress))

    def recv(self, buffer: memoryview, peer: int, *, progress: Progress | None = None) -> None:
        lane = Lane(self._peer(peer), is_send=False)
        self._post(Transfer(lane, peer, _flat(buffer, is_written=True), self._chunk_bytes, progress))

    @contextmanager
    def group(self) -> Iterator[None]:
        if self._posted is not None:
            raise ValueError("groups do not nest")
        posted: list[Transfer] = []
        self._posted = posted
        try:
            yield
        finally:
            self._posted = None
        self._run(lambda: self._exchange(posted))

    def _post(self, transfer: Transfer) -> None:
        self._life.check()
        if self._posted is not None:
            self._posted.append(transfer)
        else:
            self._run(lambda: self._exchange([transfer]))

    def _exchange(self, transfers: list[Transfer]) -> None:
        to_dial = dict.fromkeys(transfer.lane for transfer in transfers if transfer.lane.is_send)
        self._wiring.open(to_dial, time.monotonic() + self._wiring.patience_s)
        exchange(transfers, find_link=self._wiring.find, bell=self._life.bell, watch=self._watch)

    def _watch(self, lane: Lane) -> None:
        self._waiting_on = ("send" if lane.is_send else "recv", lane.peer)

    def split(self, color: int | None, key: int) -> Communicator | None:
        return self._run(lambda: self._split(color, key))

    def _split(self, color: int | None, key: int) -> TcpCommunicator | None:
        self._num_splits += 1
        choices = gather_choices((color, key), rank=self.rank, world_size=self.world_size, pass_along=self._pass_along)
        if color is None:
            return None
        ranks = tuple(self._ranks[rank] for rank in members_of(color, choices))
        wiring = self._wiring.branch(f"{self._num_splits}:{color}")
        child = TcpCommunicator(wiring, ranks, chunk_bytes=self._chunk_bytes, parent=self)
        self._children += (child,)
        try:
            self._life.check()  # an abort that came before the child was listed has not reached it
            child.form_ring(time.monotonic() + wiring.patience_s)
        except BaseException:
            child.close()
            raise
        return child

    def _pass_along(self, out: memoryview, into: memoryview) -> None:
        previous = (self.rank - 1) % self.world_size
        self._exchange(
            [
                Transfer(self._to_next, self.rank, out, self._chunk_bytes, None),
                Transfer(self._from_previous, previous, into, self._chunk_bytes, None),
            ]
        )

    def wait(self) -> None:
        self._life.check()

    def abort(self, reason: str) -> None:
        if not self._life.abort(reason):
            return
        for child in self._children:
            child.abort(reason)
        self._wiring.hang_up()
        fields = {"epoch": self.epoch, "rank": self._wiring.group.rank, "reason": reason}
        logger.warning("communicator_aborted", extra=fields)

    def close(self) -> None:
        if not self._life.close():
            return
        for child in self._children:
            child.close()
        self._wiring.hang_up()
        if self._parent is not None:
            self._parent.disown(self)

    def disown(self, child: TcpCommunicator) -> None:
        self._children = tuple(other for other in self._children if other is not child)

    @property
    def aborted(self) -> str | None:
        return self._life.reason

    @property
    def released_s(self) -> float | None:
        times = [self._life.released_s, *(child.released_s for child in self._children)]
        known = [seconds for seconds in times if seconds is not None]
        return max(known) if len(known) == len(times) else None

    @property
    def waiting_on(self) -> tuple[WaitingOn, int | None]:
        for child in self._children:
            if child.waiting_on != _NOTHING:
                return child.waiting_on
        return self._waiting_on

    def _run(self, call: Callable[[], T]) -> T:
        try:
            return self._life.run(call)
        finally:
            self._waiting_on = _NOTHING

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < self.world_size or rank == self.rank:
            raise ValueError(f"rank {rank} is no peer of rank {self.rank} in a group of {self.world_size}")
        return self._ranks[rank]


def _flat(buffer: memoryview, *, is_written: bool) -> memoryview:
    """The same memory as bytes.

    Raises:
        ValueError: it is not contiguous, or read-only where it would be written.
    """
    view = memoryview(buffer)
    if not view.c_contiguous or (is_written and view.readonly):
        raise ValueError("a buffer must be contiguous, and writable where it receives")
    return view.cast("B") if view.nbytes else memoryview(b"")
