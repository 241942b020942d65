"""A joined ``tcp`` group, or a part of one: the calls that move bytes over its links."""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic_refit.communicators.base import Progress
from elastic_refit.communicators.chain import Chain
from elastic_refit.communicators.exchange import Lane, Transfer
from elastic_refit.communicators.ring import RingCommunicator
from elastic_refit.communicators.wiring import Wiring

__all__ = ["TcpCommunicator"]


class TcpCommunicator(RingCommunicator[Transfer]):
    """Broadcasts down a chain in rank order; messages over links of their own, opened at the first one."""

    def __init__(
        self, wiring: Wiring, ranks: tuple[int, ...], *, chunk_bytes: int, parent: TcpCommunicator | None = None
    ) -> None:
        super().__init__(wiring, ranks, chunk_bytes=chunk_bytes, parent=parent)
        self._chain = Chain(wiring, ranks, chunk_bytes=chunk_bytes, watch=self._watch)

    def _part(self, wiring: Wiring, ranks: tuple[int, ...]) -> TcpCommunicator:
        return TcpCommunicator(wiring, ranks, chunk_bytes=self._chunk_bytes, parent=self)

    def _broadcasting(self, buffer: memoryview, root: int, progress: Progress | None) -> Callable[[], None]:
        data = _flat(buffer, is_written=root != self.rank)
        return lambda: self._chain.broadcast(data, root, progress)

    def _message(self, lane: Lane, peer: int, buffer: memoryview, progress: Progress | None) -> Transfer:
        sender = self.rank if lane.is_send else peer
        return Transfer(lane, sender, _flat(buffer, is_written=not lane.is_send), self._chunk_bytes, progress)

    def _exchange(self, messages: list[Transfer]) -> None:
        to_dial = dict.fromkeys(message.lane for message in messages if message.lane.is_send)
        self._wiring.open(to_dial, time.monotonic() + self._wiring.patience_s)
        self._move(messages)


def _flat(buffer: memoryview, *, is_written: bool) -> memoryview:
    """The same memory as bytes.

    Raises:
        ValueError: it is not contiguous, or read-only where it would be written.
    """
    view = memoryview(buffer)
    if not view.c_contiguous or (is_written and view.readonly):
        raise ValueError("a buffer must be contiguous, and writable where it receives")
    return view.cast("B") if view.nbytes else memoryview(b"")
