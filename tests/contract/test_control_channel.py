"""The control channel in one process: what is said and ordered arrives, and strangers neither get in nor hold it up."""

from __future__ import annotations

import logging
import os
import pickle
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import zmq

from elastic_refit.control.end import ControlEnd
from elastic_refit.control.host import ControlHost
from elastic_refit.control.setup import ChannelPlan, EndSetup
from elastic_refit.control.wire import MAX_MESSAGE_BYTES, encode_beacon
from elastic_refit.core.evidence import Beacon
from elastic_refit.errors import CommunicatorAborted, ConfigError
from elastic_refit.watchdog import RefitAbortWatchdog
from tests import held
from tests.waiting import wait_until, wait_while

DEADLINE_S = 60.0
FAST_S = 0.005


@dataclass
class Heard:
    """What one end was ordered."""

    orders: list[tuple[int, str]] = field(default_factory=list)

    def obey(self, epoch: int, reason: str) -> None:
        self.orders.append((epoch, reason))


class Channel:
    """A host and its ends, closed together."""

    def __init__(self) -> None:
        self.plan = ChannelPlan()
        self.setups = [self.plan.end(f"shard[{index}]") for index in range(3)]
        self._opened: list[ControlEnd | ControlHost] = []

    def host(self) -> ControlHost:
        host = ControlHost(self.plan.host(), interval_s=0.02)
        self._opened.append(host)
        return host

    def end(
        self,
        setup: EndSetup,
        read_beacon: Callable[[], Beacon | None] = lambda: None,
        obey: Callable[[int, str], None] = lambda epoch, reason: None,
    ) -> ControlEnd:
        end = ControlEnd(setup, read_beacon=read_beacon, obey=obey, interval_s=FAST_S)
        self._opened.append(end)
        return end

    def close(self) -> None:
        for each in self._opened:
            each.close()
        self.plan.close()


@pytest.fixture
def channel() -> Iterator[Channel]:
    with closing(Channel()) as channel:
        yield channel


def beacons(host: ControlHost) -> dict[str, Beacon]:
    return {name: heard.beacon for name, heard in host.heard().items()}


def fired_in(watchdog: RefitAbortWatchdog, *, epoch: int) -> str | None:
    """Why a refit of ``epoch`` is broken off as soon as it begins, if it is."""
    with suppress(CommunicatorAborted), watchdog.armed(epoch=epoch, abort_s=DEADLINE_S, hard_s=DEADLINE_S) as armed:
        pass
    return armed.fired


def test_the_last_beacon_of_every_end_is_kept_under_its_own_name(channel: Channel) -> None:
    host, sent = channel.host(), [0, 0, 0]

    def count(index: int) -> Beacon:
        sent[index] += 1
        return Beacon(index, entered=sent[index])

    for index, setup in enumerate(channel.setups):
        channel.end(setup, partial(count, index))
    wait_until(lambda: [each.entered > 20 for each in beacons(host).values()] == [True] * 3, DEADLINE_S)
    epochs = {name: beacon.epoch for name, beacon in beacons(host).items()}
    assert epochs == {"shard[0]": 0, "shard[1]": 1, "shard[2]": 2}


def test_an_end_with_nothing_to_report_sends_nothing(channel: Channel) -> None:
    host, reports = channel.host(), iter([None, None, None])
    channel.end(channel.setups[0], lambda: next(reports, Beacon(7)))
    wait_until(host.heard, DEADLINE_S)
    assert (beacons(host), list(reports)) == ({"shard[0]": Beacon(7)}, [])


def test_an_order_reaches_every_end_and_one_that_connects_late(channel: Channel) -> None:
    host, heard = channel.host(), [Heard(), Heard(), Heard()]
    for index in (0, 1):
        channel.end(channel.setups[index], obey=heard[index].obey)
    host.order_abort(3, "refit v2: shard[1] is frozen")
    wait_until(lambda: heard[0].orders and heard[1].orders, DEADLINE_S)
    channel.end(channel.setups[2], obey=heard[2].obey)
    wait_until(lambda: heard[2].orders, DEADLINE_S)
    assert [each.orders for each in heard] == [[(3, "refit v2: shard[1] is frozen")]] * 3


def test_who_joins_an_epoch_that_was_aborted_before_it_came_is_told_at_once(channel: Channel) -> None:
    host, watchdog = channel.host(), RefitAbortWatchdog()
    host.order_abort(3, "refit v2 is aborted")
    end = channel.end(channel.setups[0], obey=watchdog.order_abort)
    wait_until(lambda: end.heard.aborted_through == 3, DEADLINE_S)
    with closing(watchdog):
        assert fired_in(watchdog, epoch=2) == fired_in(watchdog, epoch=3) == "ordered: refit v2 is aborted"
        host.open_epoch(4)
        wait_until(lambda: end.heard.epoch == 4, DEADLINE_S)
        assert fired_in(watchdog, epoch=4) is None


def test_a_lower_order_takes_nothing_back_and_each_is_obeyed_once(channel: Channel) -> None:
    host, heard = channel.host(), Heard()
    end = channel.end(channel.setups[0], obey=heard.obey)
    for epoch in (5, 2, 6):
        host.order_abort(epoch, str(epoch))
        wait_until(lambda: end.heard.aborted_through == max(5, epoch), DEADLINE_S)  # noqa: B023
    assert heard.orders == [(5, "5"), (6, "6")]


def test_an_end_whose_own_side_raises_still_obeys(channel: Channel, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Beacon:
        raise ZeroDivisionError("an error of the reader's own")

    host, heard = channel.host(), Heard()
    channel.end(channel.setups[0], broken, heard.obey)
    wait_until(lambda: "control_turn_failed" in caplog.messages, DEADLINE_S)
    host.order_abort(1, "now")
    wait_until(lambda: heard.orders, DEADLINE_S)


def test_an_end_that_is_admitted_later_is_let_in_then(channel: Channel) -> None:
    host, late = channel.host(), channel.plan.end("shard[3]#1")
    channel.end(late, lambda: Beacon(1))
    wait_until(lambda: host.refused == 2, DEADLINE_S)  # at both doors
    host.admit(late.name, late.public_key)
    wait_until(lambda: beacons(host) == {"shard[3]#1": Beacon(1)}, DEADLINE_S)


# -- strangers


@contextmanager
def dialled(setup: EndSetup) -> Iterator[zmq.Socket[bytes]]:
    """A socket that is let in, and sends what it likes."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 0
        socket.curve_serverkey, socket.curve_publickey = setup.host_key, setup.public_key
        socket.curve_secretkey = setup.secret_key
        socket.connect(setup.address.url(setup.address.beacon_port))
        yield socket


def _unknown_key(setup: EndSetup) -> EndSetup:
    public_key, secret_key = zmq.curve_keypair()
    return replace(setup, public_key=public_key, secret_key=secret_key)


def test_an_unknown_key_is_refused_logged_once_and_holds_nobody_up(
    channel: Channel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    host, heard, stranger = channel.host(), Heard(), Heard()
    channel.end(_unknown_key(channel.setups[0]), lambda: Beacon(9), stranger.obey)
    wait_until(lambda: host.refused > 2, DEADLINE_S)
    channel.end(channel.setups[1], lambda: Beacon(1), heard.obey)
    host.order_abort(1, "now")
    wait_until(lambda: heard.orders and host.heard(), DEADLINE_S)
    assert (beacons(host), stranger.orders) == ({"shard[1]": Beacon(1)}, [])
    assert caplog.messages.count("control_refused") == 1


@pytest.mark.parametrize("opening", [b"", b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)])
def test_who_speaks_something_else_or_nothing_holds_nobody_up(channel: Channel, opening: bytes) -> None:
    host, heard = channel.host(), Heard()
    address = channel.setups[0].address
    ports = (address.beacon_port, address.order_port)
    with ExitStack() as strangers:
        for port in ports:
            strangers.enter_context(socket.create_connection((address.host, port))).sendall(opening)
        channel.end(channel.setups[1], lambda: Beacon(1), heard.obey)
        host.order_abort(1, "now")
        wait_until(lambda: heard.orders and host.heard(), DEADLINE_S)
    assert beacons(host) == {"shard[1]": Beacon(1)}


def test_without_curve_nobody_gets_in(channel: Channel) -> None:
    host, address = channel.host(), channel.setups[0].address
    with zmq.Context() as context, context.socket(zmq.PUSH) as plain:
        plain.linger = 0
        plain.connect(address.url(address.beacon_port))
        plain.send(encode_beacon(Beacon(9)))
        channel.end(channel.setups[1], lambda: Beacon(1))
        wait_until(host.heard, DEADLINE_S)
    assert beacons(host) == {"shard[1]": Beacon(1)}


def test_what_an_end_sends_beside_beacons_is_refused_and_the_others_are_heard(channel: Channel) -> None:
    host, setup = channel.host(), channel.setups[0]
    channel.end(channel.setups[1], lambda: Beacon(1))
    with dialled(setup) as own:
        own.send(b"")
        own.send(b"x" * MAX_MESSAGE_BYTES)
        own.send_multipart([b"shard[1]", encode_beacon(Beacon(8))])
        own.send(encode_beacon(Beacon(2)))
        wait_until(lambda: host.refused == 3 and len(host.heard()) == 2, DEADLINE_S)
        assert beacons(host) == {"shard[0]": Beacon(2), "shard[1]": Beacon(1)}
        own.send(b"x" * (MAX_MESSAGE_BYTES + 1))
        before = host.heard()["shard[1]"].at_s
        wait_until(lambda: host.heard()["shard[1]"].at_s > before, DEADLINE_S)


def test_a_flood_of_noise_from_an_admitted_end_holds_nobody_up(channel: Channel) -> None:
    host, heard, source = channel.host(), Heard(), random.Random(20)
    with dialled(channel.setups[0]) as own:
        for _ in range(2_000):
            own.send(source.randbytes(source.randint(0, MAX_MESSAGE_BYTES)))
        channel.end(channel.setups[1], lambda: Beacon(1), heard.obey)
        host.order_abort(1, "now")
        wait_until(lambda: host.refused == 2_000 and heard.orders and host.heard(), DEADLINE_S)
    assert beacons(host) == {"shard[1]": Beacon(1)}


# -- keys, ports and threads


def test_no_secret_key_is_ever_shown(channel: Channel) -> None:
    host, end = channel.plan.host(), channel.setups[0]
    assert host.secret_key != end.secret_key
    for setup in (host, end):
        assert setup.secret_key.decode() not in repr(setup)
        assert pickle.loads(pickle.dumps(setup)) == setup


def test_the_ports_are_nobody_elses_while_the_run_lasts(channel: Channel) -> None:
    address = channel.setups[0].address
    for _ in range(2):
        channel.host().close()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((address.host, address.beacon_port))
    host = channel.host()
    with pytest.raises(zmq.ZMQError, match="in use"):
        channel.host()
    channel.end(channel.setups[0], lambda: Beacon(1))
    wait_until(host.heard, DEADLINE_S)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "eth0", "192.0.2.1"])
def test_a_channel_is_on_one_address_of_this_machine(host: str) -> None:
    with pytest.raises(ConfigError, match=f"host='{host}'"):
        ChannelPlan(host)


def test_hosts_and_ends_that_come_and_go_leave_no_thread_and_no_file(channel: Channel) -> None:
    def open_and_close() -> None:
        with closing(ControlHost(channel.plan.host())) as host:
            host.order_abort(1, "now")
            with closing(ControlEnd(channel.setups[0], read_beacon=lambda: Beacon(1), obey=lambda *_: None)):
                pass

    open_and_close()
    files, threads = held.files(), held.threads()
    for _ in range(200):
        open_and_close()
    assert held.files() <= files
    wait_while(lambda: held.threads() - threads, DEADLINE_S)  # who is joined may still be about to end


def test_what_is_closed_may_be_closed_and_told_again(channel: Channel) -> None:
    host, end = channel.host(), channel.end(channel.setups[0])
    for each in (host, end):
        closers = [threading.Thread(target=each.close) for _ in range(4)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
    host.order_abort(1, "nobody hears it")
    assert end.heard.aborted_through == -1
