"""A link's end reaches the other end, also one that is blocked."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest

from elastic_refit.communicators.links import Link, LinkEnded

FREED_S = 10.0
"""Less than the minute that the system remembers a connection which ended in order."""

Ends = tuple[Link, Link]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The sending and the receiving end of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        sender = Link(socket.create_connection(door.getsockname()), 1, is_send=True)
        receiver = Link(door.accept()[0], 0, is_send=False)
    yield sender, receiver
    sender.close()
    receiver.close()


def test_a_sender_that_waits_for_room_is_free_once_a_receiver_was_shut_down_read_empty_and_closed(ends: Ends) -> None:
    sender, receiver = ends
    _fill(sender)
    receiver.shutdown()
    _read_to_the_end(receiver)
    receiver.close()
    assert _can_move(sender, FREED_S), "the sender was not told that nobody reads any more"
    with pytest.raises(LinkEnded):
        sender.send(bytes(1 << 20))


def test_what_was_sent_before_a_sender_closed_still_arrives(ends: Ends) -> None:
    sender, receiver = ends
    sender.send(b"all of it")
    sender.close()
    received = bytearray(9)
    receiver.recv(memoryview(received))
    assert received == b"all of it"


def _fill(sender: Link) -> None:
    """Send until the other end has no room, and has said so."""
    while _can_move(sender, 0.3):
        sender.send_some(memoryview(bytes(1 << 20)))


def _can_move(sender: Link, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(sender.sock, select.POLLOUT)
    return bool(poll.poll(timeout_s * 1000))


def _read_to_the_end(receiver: Link) -> None:
    into = memoryview(bytearray(1 << 20))
    with pytest.raises(LinkEnded):
        while True:
            receiver.recv(into)
