"""How the chunks of one broadcast come into a rank and go out of it: as bytes, or through a window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from elastic_refit.communicators.exchange import Lane
from elastic_refit.communicators.links import Link
from elastic_refit.communicators.window import SLOTS, Window
from elastic_refit.errors import CommunicatorError

__all__ = ["Bytes", "Inlet", "Outlet", "Publisher", "Reader", "Relay", "Tokens", "Wire"]


@dataclass(frozen=True, slots=True)
class Wire:
    """A link in use. ``watch`` is told before it is waited for.

    ``guards`` are links by which this rank has yet to pass something on: while it waits to receive, the loss of one of
    their peers ends the wait too. Else nobody upstream would learn of a death behind a rank that has fallen silent.
    """

    lane: Lane
    link: Link
    watch: Callable[[Lane], None]
    guards: tuple[Link, ...] = ()

    def receive(self, into: memoryview) -> None:
        self._wait()
        self.link.recv(into)

    def receive_with_file(self, into: memoryview) -> int | None:
        self._wait()
        return self.link.recv_with_file(into)

    def send(self, data: memoryview | bytes) -> None:
        self.watch(self.lane)
        self.link.send(data)

    def send_with_file(self, data: bytes, fd: int) -> None:
        self.watch(self.lane)
        self.link.send_with_file(data, fd)

    def _wait(self) -> None:
        self.watch(self.lane)
        if self.guards:
            self.link.wait_readable(self.guards)


class Inlet(Protocol):
    def take(self, index: int, into: memoryview) -> None:
        """Fill ``into`` with chunk ``index``."""


class Outlet(Protocol):
    def give(self, index: int, chunk: memoryview) -> None:
        """Pass chunk ``index`` on."""

    def finish(self) -> None:
        """Return when nobody needs this rank any more."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Chunks as they are."""

    wire: Wire

    def take(self, index: int, into: memoryview) -> None:
        self.wire.receive(into)

    def give(self, index: int, chunk: memoryview) -> None:
        self.wire.send(chunk)

    def finish(self) -> None:
        """What was sent arrives."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """One byte per chunk: it lies in the window, and whoever sends this has copied it."""

    wire: Wire

    def expect(self, index: int) -> None:
        token = bytearray(1)
        self.wire.receive(memoryview(token))
        if token[0] != index & 0xFF:
            peer = self.wire.lane.peer
            raise CommunicatorError(f"out of step with rank {peer}: token {token[0]} for chunk {index}", peer=peer)

    def give(self, index: int, chunk: memoryview) -> None:
        self.wire.send(bytes([index & 0xFF]))

    def finish(self) -> None:
        """What was sent arrives."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Chunks out of somebody else's window."""

    tokens: Tokens
    window: Window

    def take(self, index: int, into: memoryview) -> None:
        self.tokens.expect(index)
        self.window.read(index, into)


@dataclass(frozen=True, slots=True)
class Relay:
    """Chunks into a window of this reader's own: those behind it read there what it has, not what the publisher has.

    A slot is free by then: the chunk that comes now was published after the last reader had returned that slot's token.
    """

    tokens: Tokens
    window: Window

    def give(self, index: int, chunk: memoryview) -> None:
        self.window.write(index, chunk)
        self.tokens.give(index, chunk)

    def finish(self) -> None:
        """What was sent arrives."""


class Publisher:
    """Chunks into the own window, each slot again only after its token has come back from the last reader.

    ``wait_for_last`` gives the wire from that reader; it is first called when a token is needed. Its argument says
    whether the next rank is still owed chunks.
    """

    def __init__(self, tokens: Tokens, window: Window, wait_for_last: Callable[[bool], Wire]) -> None:
        self._tokens = tokens
        self._window = window
        self._wait_for_last = wait_for_last
        self._given = 0
        self._returned = 0

    def give(self, index: int, chunk: memoryview) -> None:
        if self._given - self._returned == SLOTS:
            self._expect_return(is_owing=True)
        self._window.write(index, chunk)
        self._tokens.give(index, chunk)
        self._given += 1

    def finish(self) -> None:
        while self._returned < self._given:
            self._expect_return(is_owing=False)

    def _expect_return(self, *, is_owing: bool) -> None:
        Tokens(self._wait_for_last(is_owing)).expect(self._returned)
        self._returned += 1
