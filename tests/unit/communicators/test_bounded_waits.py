"""Waits for peers end: by a deadline, by the bell, or by the peer that hangs up."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator

import pytest

from elastic_refit.communicators.addresses import bind_listeners
from elastic_refit.communicators.exchange import ExchangeLate, Lane, Transfer, exchange
from elastic_refit.communicators.lifeline import Lifeline
from elastic_refit.communicators.links import Bell, Link, LinkEnded, first_hung_up
from elastic_refit.communicators.rank_processes import make_specs
from elastic_refit.communicators.switchboard import Limits, Switchboard
from elastic_refit.communicators.wiring import Wiring
from elastic_refit.errors import CommunicatorError

LONG_S = 60.0


class Pair:
    """A link to rank 1, and the socket that rank 1 holds."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.link = Link(ours, 1, is_send=False)

    def close(self) -> None:
        self.link.close()
        self.theirs.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture
def bell() -> Iterator[Bell]:
    bell = Bell()
    yield bell
    bell.close()


def test_an_exchange_with_a_silent_peer_ends_with_its_deadline_and_names_it(pair: Pair, bell: Bell) -> None:
    lane = Lane(1, is_send=False)
    transfer = Transfer(lane, 1, memoryview(bytearray(3)), 1024, None)
    with pytest.raises(ExchangeLate) as late:
        exchange(
            [transfer],
            find_link=lambda _: pair.link,
            bell=bell,
            watch=lambda _: None,
            deadline=time.monotonic() + 0.01,
        )
    assert late.value.peers == (1,)


def test_a_peer_that_sent_something_has_not_hung_up_until_it_has(pair: Pair, bell: Bell) -> None:
    pair.theirs.send(b"still here")
    assert first_hung_up([pair.link], bell, 0.0) is None
    pair.theirs.close()
    assert first_hung_up([pair.link], bell, math.inf) is pair.link


def test_of_several_peers_that_hung_up_the_first_is_named(pair: Pair, bell: Bell) -> None:
    other = Pair()
    for each in (other, pair):
        each.theirs.close()
    assert first_hung_up([pair.link, other.link], bell, LONG_S) is pair.link
    assert first_hung_up([other.link, pair.link], bell, LONG_S) is other.link
    other.close()


def test_the_bell_ends_the_wait_for_a_peer_that_hangs_up(pair: Pair, bell: Bell) -> None:
    bell.ring()
    assert first_hung_up([pair.link], bell, math.inf) is None


def test_a_link_that_will_not_be_opened_is_waited_for_until_a_guard_hangs_up(pair: Pair) -> None:
    address, listeners = bind_listeners(None)
    group = make_specs([str(address)] * 2)[0]
    switchboard = Switchboard(group, listeners, Limits())
    switchboard.start()
    wiring = Wiring(group, switchboard, patience_s=LONG_S)
    pair.theirs.close()
    with pytest.raises(LinkEnded) as ended:
        wiring.open([Lane(1, is_send=False)], math.inf, guards=[pair.link])
    assert ended.value.peer == 1
    wiring.life.close()
    wiring.hang_up()


def test_who_retires_refuses_calls_and_aborts_but_holds_the_links_until_it_closes() -> None:
    life, (ours, theirs) = Lifeline("a rank"), socket.socketpair()
    theirs.setblocking(False)
    life.adopt(Lane(1, is_send=True), ours)
    assert life.retire()
    assert not life.retire()
    assert not life.abort("too late")
    assert life.reason is None
    with pytest.raises(CommunicatorError, match="closed"):
        life.check()
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
    assert life.close()
    assert theirs.recv(1) == b""
    theirs.close()


def test_a_group_that_is_in_a_call_or_has_failed_does_not_retire() -> None:
    life = Lifeline("a rank")
    assert life.run(life.retire) is False

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        life.run(fail)
    assert not life.retire()
    life.close()
