"""Point-to-point transfers issued together: each moves when its peer is ready, and none waits for another.

Messages to one peer, and messages from one peer, keep their order. The loop runs on the calling thread and blocks in
one ``poll`` over every link that has work and the bell, so an abort, a new link and a lost peer all wake it.
"""

from __future__ import annotations

import math
import select
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from elastic_refit.communicators.base import Progress
from elastic_refit.communicators.frames import HEADER_BYTES, Frame, FrameKind, check_frame, encode_frame
from elastic_refit.communicators.links import Bell, Link

__all__ = ["ExchangeLate", "Lane", "Transfer", "exchange"]


class ExchangeLate(Exception):
    """The deadline came before the messages were through; ``peers`` are those that this rank still waited for."""

    def __init__(self, peers: tuple[int, ...]) -> None:
        super().__init__(f"waiting for {peers}")
        self.peers = peers


@dataclass(frozen=True, slots=True)
class Lane:
    """One direction between this rank and ``peer``."""

    peer: int
    is_send: bool


@dataclass(slots=True)
class Transfer:
    """One message on its way through ``lane``; ``sender`` is this rank's number for whoever sends it."""

    lane: Lane
    sender: int
    data: memoryview
    chunk_bytes: int
    progress: Progress | None
    _expected: Frame = field(init=False)
    _header: memoryview | None = None
    _header_done: int = 0
    _done: int = 0

    def advance(self, link: Link) -> bool:
        """Move one chunk at most, without blocking; whether the message is through."""
        if self._header is None:
            self._begin(link)
        return self._advance_header(link) and self._advance_data(link)

    def _begin(self, link: Link) -> None:
        self._expected = Frame(FrameKind.MESSAGE, self.sender, link.messages, len(self.data))
        link.messages += 1
        self._header = memoryview(encode_frame(self._expected) if self.lane.is_send else bytearray(HEADER_BYTES))

    def _advance_header(self, link: Link) -> bool:
        assert self._header is not None
        if self._header_done < HEADER_BYTES:
            self._header_done += self._move(link, self._header[self._header_done :])
            if self._header_done == HEADER_BYTES and not self.lane.is_send:
                check_frame(self._header, self._expected, link.peer)
        return self._header_done == HEADER_BYTES

    def _advance_data(self, link: Link) -> bool:
        if self._done < len(self.data):
            moved = self._move(link, self.data[self._done : self._done + self.chunk_bytes])
            self._done += moved
            if moved and self.progress is not None:
                self.progress(self._done, len(self.data))
        return self._done == len(self.data)

    def _move(self, link: Link, part: memoryview) -> int:
        return link.send_some(part) if self.lane.is_send else link.recv_some(part)


def exchange(
    transfers: Iterable[Transfer],
    *,
    find_link: Callable[[Lane], Link | None],
    bell: Bell,
    watch: Callable[[Lane], None],
    deadline: float = math.inf,
) -> None:
    """Move every transfer to its end.

    ``find_link`` gives the link of a lane, or None until the peer has opened it, and raises to break off; it is asked
    again whenever the bell rings. ``watch`` is told which lane this rank is about to wait for.

    Raises:
        LinkEnded: a peer's connection ended.
        CommunicatorError: a peer sent another message than the one expected.
        ExchangeLate: it was not done by the deadline.
    """
    queues: dict[Lane, deque[Transfer]] = {}
    for transfer in transfers:
        queues.setdefault(transfer.lane, deque()).append(transfer)
    while queues:
        links = {lane: link for lane in queues if (link := find_link(lane)) is not None}
        watch(next(iter(queues)))
        if (remaining_s := deadline - time.monotonic()) <= 0:
            raise ExchangeLate(tuple(dict.fromkeys(lane.peer for lane in queues)))
        for lane in _ready(links, bell, remaining_s):
            if queues[lane][0].advance(links[lane]):
                queues[lane].popleft()
        queues = {lane: queue for lane, queue in queues.items() if queue}


def _ready(links: dict[Lane, Link], bell: Bell, timeout_s: float) -> list[Lane]:
    """Block until a link can move, the bell rings or the time is over."""
    poll = select.poll()
    poll.register(bell, select.POLLIN)
    lanes = {}
    for lane, link in links.items():
        poll.register(link.sock, link.awaits(select.POLLOUT if lane.is_send else select.POLLIN))
        lanes[link.sock.fileno()] = lane
    ready = [fd for fd, _ in poll.poll(None if math.isinf(timeout_s) else timeout_s * 1000)]
    if bell.fileno() in ready:
        bell.quiet()
    return [lanes[fd] for fd in ready if fd in lanes]
