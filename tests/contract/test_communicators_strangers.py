"""The tcp communicator's door: a stranger neither gets in nor keeps anybody waiting. Ranks are threads here."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from elastic_refit.communicators.addresses import Address
from elastic_refit.communicators.base import Communicator, GroupSpec, PendingCommunicator
from elastic_refit.communicators.dialling import DialTimeout, dial
from elastic_refit.communicators.handshake import GREETING_BYTES, HELLO_MAX_BYTES, HandshakeRefused, Hello, Refusal
from elastic_refit.communicators.links import Bell
from elastic_refit.communicators.rank_processes import make_specs
from elastic_refit.communicators.tcp import Limits, TcpBackend
from elastic_refit.errors import CommunicatorError, ConfigError, PeerLost, RendezvousFailed

DEADLINE_S = 40.0
EPOCH = 5


class Door:
    """A group of two of which rank 0 is joining, and through whose door others may try to come."""

    def __init__(self, limits: Limits) -> None:
        self.pending = [TcpBackend(limits=limits).bind() for _ in range(2)]
        self.specs = make_specs([pending.address for pending in self.pending], epoch=EPOCH)
        self._pool = ThreadPoolExecutor()
        self.first = self._pool.submit(self.pending[0].join, self.specs[0], timeout_s=DEADLINE_S)

    def knock(self) -> socket.socket:
        """Connect to rank 0 as anybody can."""
        sock, target = Address.parse(self.pending[0].address).open_socket()
        sock.settimeout(DEADLINE_S)
        sock.connect(target)
        return sock

    def let_second_join(self) -> list[Communicator]:
        second = self.pending[1].join(self.specs[1], timeout_s=DEADLINE_S)
        return [self.first.result(DEADLINE_S), second]

    def dial(self, group: GroupSpec, *, sender: int = 1, receiver: int = 0, channel: str = "") -> socket.socket:
        bell = Bell()
        hello = Hello(sender, receiver, channel)
        try:
            return dial(group, hello, deadline=time.monotonic() + DEADLINE_S, bell=bell, check=lambda: None)
        finally:
            bell.close()

    def close(self) -> None:
        for pending in self.pending:
            pending.abort("the test is over")
            pending.close()
        self._pool.shutdown()


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door(Limits(handshake_s=DEADLINE_S, half_open=16))
    yield door
    door.close()


def works(group: list[Communicator]) -> bool:
    """Whether a broadcast goes through; the ranks are closed afterwards."""
    buffers = [bytearray(b"weights"), bytearray(7)]
    other = threading.Thread(target=group[1].broadcast, args=(memoryview(buffers[1]), 0))
    other.start()
    group[0].broadcast(memoryview(buffers[0]), 0)
    other.join()
    for communicator in group:
        communicator.close()
    return bytes(buffers[1]) == b"weights"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.002)


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [vars(record)["refusal"] for record in caplog.records if record.message == "peer_refused"]


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"secret": b"guessed, and of sufficient length"}, Refusal.PROOF),
        ({"epoch": EPOCH - 1}, Refusal.EPOCH),
        ({"epoch": EPOCH + 1}, Refusal.EPOCH),
        ({"identities": ("shard[0]/0", "shard[1]#1/0")}, Refusal.IDENTITY),
        ({"identities": ("shard[0]#1/0", "shard[1]/0")}, Refusal.PROOF),
    ],
    ids=["wrong secret", "old epoch", "future epoch", "other incarnation of the dialler", "other view of the group"],
)
def test_who_does_not_belong_is_refused_and_logged_and_the_group_forms(
    door: Door, caplog: pytest.LogCaptureFixture, change: dict[str, object], refusal: Refusal
) -> None:
    with pytest.raises(HandshakeRefused) as raised:
        door.dial(dataclasses.replace(door.specs[1], **change))  # type: ignore[arg-type]
    assert raised.value.refusal is refusal
    until(lambda: refusals(caplog) == [refusal.name.lower()])
    assert not door.first.done()
    assert works(door.let_second_join())


@pytest.mark.parametrize(("sender", "receiver"), [(1, 1), (0, 0)], ids=["looks for another rank", "is ourselves"])
def test_ranks_that_make_no_sense_are_refused(door: Door, sender: int, receiver: int) -> None:
    spec = dataclasses.replace(door.specs[1], addresses=(door.pending[0].address,) * 2)
    with pytest.raises(HandshakeRefused) as raised:
        door.dial(spec, sender=sender, receiver=receiver)
    assert raised.value.refusal is Refusal.RANK


def test_silent_connections_over_the_cap_cannot_stall_the_group(door: Door) -> None:
    silent = [door.knock() for _ in range(100)]
    assert all(sock.recv(GREETING_BYTES) for sock in silent)
    assert works(door.let_second_join())
    for sock in silent:
        sock.close()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" * 40, b"\0" * HELLO_MAX_BYTES, b"ERH1", b""])
def test_garbage_is_refused_and_the_group_forms(door: Door, data: bytes) -> None:
    with door.knock() as sock:
        assert sock.recv(GREETING_BYTES)
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        refused = sock.recv(100)
        assert refused[0] in list(Refusal)
    assert works(door.let_second_join())


def test_a_silent_connection_is_dropped_when_its_time_is_over() -> None:
    door = Door(Limits(handshake_s=0.05))
    with door.knock() as sock:
        sock.recv(GREETING_BYTES)
        assert sock.recv(100)[0] == Refusal.LATE
        assert sock.recv(100) == b""
    assert works(door.let_second_join())
    door.close()


def test_a_listener_that_cannot_prove_itself_is_not_believed(door: Door) -> None:
    """Rank 1 dials rank 0 at an address behind which somebody else answers, with the greeting of the real one."""
    impostor = TcpBackend().bind()
    spec = dataclasses.replace(door.specs[1], addresses=(impostor.address, door.specs[1].addresses[1]))
    wrong = dataclasses.replace(spec, rank=0, secret=os.urandom(32))
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(impostor.join, wrong, timeout_s=DEADLINE_S)
        with pytest.raises(HandshakeRefused):
            door.dial(spec)
        impostor.abort("unmasked")
        with pytest.raises(CommunicatorError):
            joining.result(DEADLINE_S)


def test_authenticated_links_that_nobody_claims_are_limited(door: Door) -> None:
    bell = Bell()
    socks = [door.dial(door.specs[1], channel=f"/{number}:0") for number in range(16)]
    with pytest.raises(DialTimeout):
        dial(door.specs[1], Hello(1, 0, "/16:0"), deadline=time.monotonic() + 0.2, bell=bell, check=lambda: None)
    for sock in socks:
        sock.close()
    bell.close()


def test_ranks_with_different_secrets_refuse_each_other_at_join(door: Door) -> None:
    """Whoever dials first is refused and goes; the other is refused too, or finds nobody left."""
    with pytest.raises((RendezvousFailed, PeerLost)) as second:
        door.pending[1].join(dataclasses.replace(door.specs[1], secret=os.urandom(32)), timeout_s=DEADLINE_S)
    first = door.first.exception(DEADLINE_S)
    assert any(isinstance(error, RendezvousFailed) and "refused" in str(error) for error in (first, second.value))


def test_refusals_are_logged_only_so_often(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(80):
        with door.knock() as sock:
            sock.recv(GREETING_BYTES)
    assert works(door.let_second_join())
    assert len(refusals(caplog)) <= 64


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_listening_on_every_interface_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="every interface"):
        TcpBackend(host).bind()


def test_a_host_of_another_machine_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        TcpBackend("192.0.2.1").bind()


def test_a_peer_on_the_loopback_of_another_host_is_named_with_the_fix() -> None:
    pending = TcpBackend().bind()
    foreign = dataclasses.replace(Address.parse(pending.address), host="another", unix="elsewhere")
    specs = make_specs([pending.address, str(foreign)])
    with pytest.raises(RendezvousFailed, match="give its TcpBackend the host"):
        pending.join(specs[0], timeout_s=DEADLINE_S)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rank": 2}, "is no group"),
        ({"identities": ("one",)}, "is no group"),
        ({"addresses": ("tcp=127.0.0.1:1|unix=|host=", "tcp=127.0.0.1:2|unix=|host=")}, "the group says"),
        ({"secret": b"short"}, "epoch secret needs"),
        ({"identities": ("x" * 256, "y")}, "an identity has at most"),
        ({"epoch": -1}, "does not fit into a frame"),
    ],
    ids=["rank", "identities", "address", "secret", "long identity", "epoch"],
)
def test_a_specification_that_cannot_work_is_refused(change: dict[str, object], says: str) -> None:
    pending: PendingCommunicator = TcpBackend().bind()
    spec = dataclasses.replace(make_specs([pending.address, pending.address])[0], **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=says):
        pending.join(spec, timeout_s=1)
    pending.close()


def test_a_pending_that_was_closed_cannot_join_and_listens_no_more() -> None:
    first, second = TcpBackend().bind(), TcpBackend().bind()
    specs = make_specs([first.address, second.address])
    second.close()
    second.close()
    with pytest.raises(CommunicatorError, match="closed"):
        second.join(specs[1], timeout_s=1)
    with pytest.raises(PeerLost):
        first.join(specs[0], timeout_s=DEADLINE_S)
