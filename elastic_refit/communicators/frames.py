"""The header that precedes every message on a link, and how it is judged.

A header carries nothing that the receiver does not know already: it is compared, never obeyed. No buffer is ever
allocated, and no byte written, because of a number in it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from elastic_refit.errors import CommunicatorError

__all__ = ["HEADER_BYTES", "Frame", "FrameKind", "check_frame", "decode_frame", "encode_frame"]

_MAGIC = b"ERF1"
_HEADER = struct.Struct("!4sIQQ")
HEADER_BYTES = _HEADER.size


class FrameKind(IntEnum):
    BROADCAST = 1
    MESSAGE = 2
    WINDOW = 3
    """A broadcast whose chunks lie in a window; its descriptor comes with the header."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message: ``sequence`` counts broadcasts per group and messages per link; ``root`` is where it starts."""

    kind: FrameKind
    root: int
    sequence: int
    size_bytes: int


def encode_frame(frame: Frame) -> bytes:
    return _HEADER.pack(_MAGIC, frame.kind << 24 | frame.root, frame.sequence, frame.size_bytes)


def decode_frame(raw: bytes | bytearray | memoryview) -> Frame:
    """The inverse of ``encode_frame``.

    Raises:
        CommunicatorError: ``raw`` is not a header.
    """
    if len(raw) != HEADER_BYTES:
        raise CommunicatorError(f"a frame header has {HEADER_BYTES} bytes, not {len(raw)}")
    magic, kind_and_root, sequence, size_bytes = _HEADER.unpack(raw)
    kind = kind_and_root >> 24
    if magic != _MAGIC or kind not in list(FrameKind):
        raise CommunicatorError(f"not a frame header: {bytes(raw)[:8].hex()}…")
    return Frame(FrameKind(kind), kind_and_root & 0xFFFFFF, sequence, size_bytes)


def check_frame(raw: bytes | bytearray | memoryview, expected: Frame, peer: int) -> None:
    """Refuse a header that is not exactly ``expected``.

    Raises:
        CommunicatorError: ``peer`` is in another call than this rank, or sends something else than this protocol.
    """
    frame = decode_frame(raw)
    if frame != expected:
        raise CommunicatorError(
            f"out of step with rank {peer}: it sends {_describe(frame)}, this rank expects {_describe(expected)}; "
            "every rank must make the same calls in the same order with the same sizes",
            peer=peer,
        )


def _describe(frame: Frame) -> str:
    return f"{frame.kind.name.lower()} {frame.sequence} from rank {frame.root} of {frame.size_bytes} bytes"
