"""The chain of a broadcast: where a rank stands in it, and how chunks come in and go out there.

Between hosts a chunk's bytes travel over the link. Consecutive ranks of one host share a window instead: the first of
them, the publisher, writes each chunk into it, and what travels along the chain is a token that says which chunk is
there. Each rank copies the chunk out before it passes the token on, so the token that the last one returns to the
publisher means that everybody has it and the slot is free.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from elastic_refit.communicators.addresses import Address
from elastic_refit.communicators.base import Progress
from elastic_refit.communicators.exchange import Lane
from elastic_refit.communicators.frames import HEADER_BYTES, Frame, FrameKind, check_frame, encode_frame
from elastic_refit.communicators.links import Link
from elastic_refit.communicators.ports import Bytes, Inlet, Outlet, Publisher, Reader, Relay, Tokens, Wire
from elastic_refit.communicators.window import Window
from elastic_refit.communicators.wiring import Wiring
from elastic_refit.errors import CommunicatorError

__all__ = ["Chain", "Place", "find_place"]


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's neighbours in the chain, as ranks of the communicator.

    ``publisher`` and ``last`` are the ends of the run of ranks of one host that it belongs to; None if it is alone.
    """

    rank: int
    source: int | None
    sink: int | None
    publisher: int | None = None
    last: int | None = None

    @property
    def is_reader(self) -> bool:
        """It takes chunks out of a window."""
        return self.publisher is not None and self.publisher != self.rank

    @property
    def has_readers(self) -> bool:
        """The next rank takes chunks out of the same window."""
        return self.last is not None and self.last != self.rank


def find_place(rank: int, root: int, hosts: Sequence[str]) -> Place:
    """``hosts[r]`` names the host of rank ``r``; an empty name is shared with nobody."""
    size = len(hosts)
    first = final = position = (rank - root) % size
    source = (rank - 1) % size if position > 0 else None
    sink = (rank + 1) % size if position < size - 1 else None
    if hosts[rank]:
        while first > 0 and hosts[(root + first - 1) % size] == hosts[rank]:
            first -= 1
        while final < size - 1 and hosts[(root + final + 1) % size] == hosts[rank]:
            final += 1
    if first == final:
        return Place(rank, source, sink)
    return Place(rank, source, sink, publisher=(root + first) % size, last=(root + final) % size)


class Chain:
    """The broadcasts of one communicator, for its thread. ``watch`` is told what it is about to wait for."""

    def __init__(
        self, wiring: Wiring, ranks: tuple[int, ...], *, chunk_bytes: int, watch: Callable[[Lane], None]
    ) -> None:
        addresses = [Address.parse(wiring.group.addresses[rank]) for rank in ranks]
        self._hosts = [address.host if address.unix else "" for address in addresses]
        self._rank = ranks.index(wiring.group.rank)
        self._ranks = ranks
        self._wiring = wiring
        self._chunk_bytes = chunk_bytes
        self._watch = watch
        self._count = 0
        self._published: Window | None = None
        self._mapped: Window | None = None

    def broadcast(self, data: memoryview, root: int, progress: Progress | None) -> None:
        """What fits into one chunk travels as bytes on every link: a window would cost more than it saves."""
        hosts = self._hosts if len(data) > self._chunk_bytes else [""] * len(self._hosts)
        place = find_place(self._rank, root, hosts)
        self._count += 1
        frame = Frame(FrameKind.BROADCAST, root, self._count, len(data))
        inlet, outlets = self._open(place, frame)
        tap = self._wiring.tap
        for index, start in enumerate(range(0, len(data), self._chunk_bytes)):
            chunk = data[start : start + self._chunk_bytes]
            if inlet is not None:
                inlet.take(index, chunk)
                _report(progress, start + len(chunk), len(data))
                if tap is not None:
                    tap.pass_through(chunk)
            for outlet in outlets:
                outlet.give(index, chunk)
            if inlet is None:
                _report(progress, start + len(chunk), len(data))
        for outlet in outlets:
            outlet.finish()

    def _open(self, place: Place, frame: Frame) -> tuple[Inlet | None, list[Outlet]]:
        """Take the header from the source, pass it on to the sink, and find out what carries the chunks."""
        onward = None if place.sink is None else self._wire(place.sink, is_send=True)
        back = None
        if place.is_reader and not place.has_readers and place.publisher is not None:
            back = self._wire(place.publisher, is_send=True)
        guards = tuple(wire.link for wire in (back, onward) if wire is not None)
        inlet = None
        if place.source is not None:
            inlet = self._open_inlet(place, frame, self._wire(place.source, is_send=False, guards=guards))
        outlets: list[Outlet] = [] if back is None else [Tokens(back)]
        if onward is not None:
            outlets.append(self._open_outlet(place, frame, onward))
        return inlet, outlets

    def _open_inlet(self, place: Place, frame: Frame, wire: Wire) -> Inlet:
        header = memoryview(bytearray(HEADER_BYTES))
        if not place.is_reader:
            wire.receive(header)
            check_frame(header, frame, wire.lane.peer)
            return Bytes(wire)
        fd = wire.receive_with_file(header)
        try:
            check_frame(header, replace(frame, kind=FrameKind.WINDOW), wire.lane.peer)
            window = self._map(fd, wire.lane.peer)
        finally:
            if fd is not None:
                os.close(fd)
        return Reader(Tokens(wire), window)

    def _open_outlet(self, place: Place, frame: Frame, wire: Wire) -> Outlet:
        if not place.has_readers:
            wire.send(encode_frame(frame))
            return Bytes(wire)
        is_relay = place.is_reader and self._wiring.tap is not None and self._wiring.tap.is_relay
        window = self._mapped if place.is_reader and not is_relay else self._own_window()
        assert window is not None, "a reader has mapped its window by now"
        wire.send_with_file(encode_frame(replace(frame, kind=FrameKind.WINDOW)), window.fd)
        if place.is_reader:
            return Relay(Tokens(wire), window) if is_relay else Tokens(wire)
        last = place.last
        assert last is not None, "there are readers"

        def wait_for_last(is_owing: bool) -> Wire:
            return self._wire(last, is_send=False, guards=(wire.link,) if is_owing else ())

        return Publisher(Tokens(wire), window, wait_for_last)

    def _wire(self, rank: int, *, is_send: bool, guards: tuple[Link, ...] = ()) -> Wire:
        """Ring links are there since the join; the one from the last reader to its publisher may have to be opened."""
        lane = Lane(self._ranks[rank], is_send=is_send)
        self._watch(lane)
        deadline = time.monotonic() + self._wiring.patience_s if is_send else math.inf
        self._wiring.open([lane], deadline, guards=guards)
        link = self._wiring.find(lane)
        assert link is not None, "it was opened"
        return Wire(lane, link, self._watch, guards)

    def _own_window(self) -> Window:
        if self._published is None:
            self._published = self._wiring.life.keep(Window.create(self._chunk_bytes))
        return self._published

    def _map(self, fd: int | None, peer: int) -> Window:
        """The publisher's window, by any descriptor of it; one that was mapped before is used again."""
        if fd is None:
            raise CommunicatorError(f"rank {peer} published no window", peer=peer)
        if self._mapped is None or not self._mapped.is_file(fd):
            window = Window.map(fd, self._chunk_bytes)
            if self._mapped is not None:
                self._wiring.life.discard(self._mapped)
            self._mapped = self._wiring.life.keep(window)
        return self._mapped


def _report(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)
