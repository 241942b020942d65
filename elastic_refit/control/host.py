"""The channel's host, in the coordinator's process: hears every end's beacon, and repeats what is ordered.

Orders are level-triggered: what was ordered once is said again every ``interval_s``, so that it reaches an end that
connects late, or again. What must never happen here: an end, known or not, that delays an order to another one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import zmq

from elastic_refit.control.doorkeeper import Doorkeeper
from elastic_refit.control.setup import HostSetup
from elastic_refit.control.sockets import SocketThread
from elastic_refit.control.wire import StandingOrder, decode_beacon, encode_order
from elastic_refit.core.evidence import Beacon

__all__ = ["ControlHost", "Heard"]

_DRAIN = 256


@dataclass(frozen=True, slots=True)
class Heard:
    """The last beacon of one end, and when it came, in seconds of the host's clock."""

    beacon: Beacon
    at_s: float


class ControlHost(SocketThread):
    """Methods are for any thread and do not block. One that follows another orders the abort of what that one had open.

    Raises:
        zmq.ZMQError: the address cannot be bound; the host of before may still be there.
    """

    def __init__(
        self,
        setup: HostSetup,
        *,
        interval_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("control-host")
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._order = StandingOrder(setup.incarnation)
        self._heard: dict[str, Heard] = {}
        self._next_at = clock()
        self._door = Doorkeeper(self._context, setup.ends)
        try:
            self._beacons = self._bind(zmq.PULL, setup, setup.address.beacon_port)
            self._orders = self._bind(zmq.PUB, setup, setup.address.order_port)
        except zmq.ZMQError:
            self.close()
            raise
        for socket in (self._door.questions, self._beacons):
            self._poller.register(socket, zmq.POLLIN)
        self._start()

    @property
    def refused(self) -> int:
        """How often somebody, or something that was sent, was not let in."""
        return self._door.refused

    def admit(self, name: str, public_key: bytes) -> None:
        """Let in one more end."""
        self._door.admit(name, public_key)

    def heard(self) -> dict[str, Heard]:
        """The last beacon of every end that has sent one, by the name that belongs to its key."""
        with self._lock:
            return dict(self._heard)

    def open_epoch(self, epoch: int) -> None:
        """Say from now on that ``epoch`` is the newest."""
        with self._lock:
            self._order = replace(self._order, epoch=max(epoch, self._order.epoch))

    def order_abort(self, epoch: int, reason: str) -> None:
        """Order every end to break off every epoch up to ``epoch``: at once, and again for ever."""
        with self._lock:
            if epoch <= self._order.aborted_through:
                return
            newest = max(epoch, self._order.epoch)
            self._order = replace(self._order, epoch=newest, aborted_through=epoch, reason=reason)
            self._next_at = self._clock()
        self._ring()

    def _bind(self, kind: int, setup: HostSetup, port: int) -> zmq.Socket[bytes]:
        socket = self._socket(kind, setup.address)
        self._door.guard(socket, setup.secret_key)
        socket.bind(setup.address.url(port))
        return socket

    def _patience_s(self) -> float:
        return self._next_at - self._clock()

    def _turn(self) -> None:
        self._door.answer()
        self._publish()
        for _ in range(_DRAIN):
            if not self._beacons.poll(0):
                return
            self._take(self._beacons.recv(copy=False))

    def _publish(self) -> None:
        with self._lock:
            order, now = self._order, self._clock()
            if now < self._next_at:
                return
            self._next_at = now + self._interval_s
        self._orders.send(encode_order(order))

    def _take(self, frame: zmq.Frame) -> None:
        name = str(frame["User-Id"])
        try:
            heard = Heard(decode_beacon(frame.bytes), self._clock())
        except ValueError as error:
            self._door.note_refusal(name, str(error)[:200])
            return
        with self._lock:
            self._heard[name] = heard
