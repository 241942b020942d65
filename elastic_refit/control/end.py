"""A participant process' end of the channel: says how far the process is, and hears what is ordered.

It needs nobody: with the host gone, frozen or not yet there it goes on, and finds whoever takes the host's place. What
must never happen here: a send that waits, an order of a coordinator obeyed after a newer one was heard.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

import zmq

from elastic_refit.control.setup import EndSetup
from elastic_refit.control.sockets import SocketThread
from elastic_refit.control.wire import StandingOrder, decode_order, encode_beacon
from elastic_refit.core.evidence import Beacon

__all__ = ["ControlEnd"]

logger = logging.getLogger(__name__)


class ControlEnd(SocketThread):
    """One daemon thread that sends ``read_beacon()`` every ``interval_s``, unless it is None, and obeys.

    ``obey(epoch, reason)`` is called on that thread whenever epochs up to ``epoch`` are ordered to abort and were not
    before, as ``RefitAbortWatchdog.order_abort`` wants it; it must not block.
    """

    def __init__(
        self,
        setup: EndSetup,
        *,
        read_beacon: Callable[[], Beacon | None],
        obey: Callable[[int, str], None],
        interval_s: float = 0.2,
    ) -> None:
        super().__init__("control-end")
        self._read_beacon = read_beacon
        self._obey = obey
        self._interval_s = interval_s
        self._next_at = time.monotonic()
        self._heard = StandingOrder(coordinator=0)
        self._superseded: set[int] = set()
        self.is_cut = False
        """Neither beacons nor orders get through, as if the network had gone: a fault on purpose. Any thread."""
        self._beacons = self._connect(zmq.PUSH, setup, setup.address.beacon_port)
        self._orders = self._connect(zmq.SUB, setup, setup.address.order_port)
        self._orders.subscribe(b"")
        self._poller.register(self._orders, zmq.POLLIN)
        self._start()

    @property
    def heard(self) -> StandingOrder:
        """What is ordered, as far as this end knows. Any thread."""
        return self._heard

    def _connect(self, kind: int, setup: EndSetup, port: int) -> zmq.Socket[bytes]:
        socket = self._socket(kind, setup.address)
        socket.curve_serverkey = setup.host_key
        socket.curve_publickey = setup.public_key
        socket.curve_secretkey = setup.secret_key
        socket.connect(setup.address.url(port))
        return socket

    def _patience_s(self) -> float:
        return self._next_at - time.monotonic()

    def _turn(self) -> None:
        if self._orders.poll(0):
            raw = self._orders.recv()
            if not self.is_cut:
                self._take(raw)
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + self._interval_s
            self._report()

    def _take(self, raw: bytes) -> None:
        try:
            order = decode_order(raw)
        except ValueError as error:
            logger.error("order_refused", extra={"error": str(error)[:200]})
            return
        before = self._heard
        if order.coordinator < before.coordinator:
            self._note_superseded(order.coordinator, before.coordinator)
            return
        self._heard = order
        if order.aborted_through > before.aborted_through:
            self._obey(order.aborted_through, order.reason)

    def _note_superseded(self, coordinator: int, by: int) -> None:
        if coordinator not in self._superseded:
            self._superseded.add(coordinator)
            logger.warning("coordinator_superseded", extra={"coordinator": coordinator, "by": by})

    def _report(self) -> None:
        beacon = self._read_beacon()
        if beacon is not None and not self.is_cut:
            with contextlib.suppress(zmq.Again):
                self._beacons.send(encode_beacon(beacon), zmq.NOBLOCK)
