"""What travels on the control channel: two messages of fixed layout, judged byte by byte and never unpickled.

A message longer than ``MAX_MESSAGE_BYTES`` is not even received. No buffer is ever allocated because of a number in a
message. What must never happen here: a value outside the ranges of :class:`Beacon` or :class:`StandingOrder` let in.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import isfinite
from typing import Final, get_args

from elastic_refit.core.evidence import Beacon, WaitingOn

__all__ = ["MAX_MESSAGE_BYTES", "StandingOrder", "decode_beacon", "decode_order", "encode_beacon", "encode_order"]

MAX_MESSAGE_BYTES = 512
_REASON_MAX_BYTES = 400
_BEACON = struct.Struct("!4sqqqqBqBd")
_ORDER = struct.Struct("!4sqqq")
_BEACON_MAGIC, _ORDER_MAGIC = b"ERB1", b"ERO1"
_NO_PEER = -1

_WAITING: Final[tuple[WaitingOn, ...]] = get_args(WaitingOn)
_PHASES = (
    *("preparing", "joining", "pausing", "packing", "in_collective", "applying", "finalizing", "done", "aborted"),
)
"""In the order of their numbers on the wire; a new one is added at the end."""


@dataclass(frozen=True, slots=True)
class StandingOrder:
    """What the host says again and again: every epoch up to ``aborted_through`` is broken off, because of ``reason``.

    ``coordinator`` is the incarnation that says so, ``epoch`` the newest one that it has opened; -1 is none yet.
    """

    coordinator: int
    epoch: int = -1
    aborted_through: int = -1
    reason: str = ""


def encode_beacon(beacon: Beacon) -> bytes:
    """Raises ValueError for a phase that the wire has no number for."""
    return _BEACON.pack(
        _BEACON_MAGIC,
        beacon.epoch,
        beacon.entered,
        beacon.completed,
        beacon.applied,
        _WAITING.index(beacon.waiting_on),
        _NO_PEER if beacon.waiting_peer is None else beacon.waiting_peer,
        _PHASES.index(beacon.phase),
        beacon.tick_age_s,
    )


def decode_beacon(raw: bytes) -> Beacon:
    """The inverse of ``encode_beacon``.

    Raises:
        ValueError: ``raw`` is no beacon.
    """
    if len(raw) != _BEACON.size:
        raise ValueError(f"a beacon has {_BEACON.size} bytes, not {len(raw)}")
    magic, epoch, entered, completed, applied, waiting, peer, phase, tick_age_s = _BEACON.unpack(raw)
    is_named = magic == _BEACON_MAGIC and waiting < len(_WAITING) and phase < len(_PHASES) and peer >= _NO_PEER
    is_counted = epoch >= -1 and entered >= -2 and completed >= -2 and applied >= -1
    if not (is_named and is_counted and isfinite(tick_age_s) and tick_age_s >= 0):
        raise ValueError(f"not a beacon: {raw.hex()}")
    waiting_peer = None if peer == _NO_PEER else peer
    return Beacon(epoch, entered, completed, applied, _WAITING[waiting], waiting_peer, _PHASES[phase], tick_age_s)


def encode_order(order: StandingOrder) -> bytes:
    """A reason that is too long for the wire is cut."""
    reason = order.reason.encode()[:_REASON_MAX_BYTES].decode(errors="ignore").encode()
    return _ORDER.pack(_ORDER_MAGIC, order.coordinator, order.epoch, order.aborted_through) + reason


def decode_order(raw: bytes) -> StandingOrder:
    """The inverse of ``encode_order``.

    Raises:
        ValueError: ``raw`` is no order.
    """
    if not _ORDER.size <= len(raw) <= _ORDER.size + _REASON_MAX_BYTES:
        raise ValueError(f"an order has {_ORDER.size} bytes and at most {_REASON_MAX_BYTES} of reason, not {len(raw)}")
    magic, coordinator, epoch, aborted_through = _ORDER.unpack_from(raw)
    if magic != _ORDER_MAGIC or coordinator < 0 or epoch < -1 or not -1 <= aborted_through <= epoch:
        raise ValueError(f"not an order: {raw[: _ORDER.size].hex()}")
    return StandingOrder(coordinator, epoch, aborted_through, raw[_ORDER.size :].decode())
