"""The mutual proof by which two ranks of one epoch recognise each other before a link carries data.

Three messages, each of bounded size::

    listener → dialler   greeting   magic, listener's nonce
    dialler  → listener  hello      epoch, both ranks, channel, dialler's identity and nonce, dialler's proof
    listener → dialler   verdict    welcome and the listener's proof, or a refusal code

A proof is an HMAC-SHA256 under the epoch's secret over its sender's role, both nonces, the epoch, both ranks, the
channel and the identities of the whole group: a stranger, a rank of another epoch, another incarnation or another idea
of the membership is refused. The dialler proves itself first, so the listener computes nothing for a stranger to take
away. What follows on the link is not authenticated again: the digest of each bucket is what proves the data.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum

from elastic_refit.communicators.base import GroupSpec

__all__ = [
    "GREETING_BYTES",
    "HELLO_MAX_BYTES",
    "MIN_SECRET_BYTES",
    "NONCE_BYTES",
    "VERDICT_BYTES",
    "HandshakeRefused",
    "Hello",
    "Refusal",
    "check_group",
    "encode_greeting",
    "encode_refusal",
    "hello_bytes_missing",
    "open_greeting",
    "open_verdict",
    "seal_hello",
    "seal_welcome",
    "verify_hello",
]

_MAGIC = b"ERH1"
_HELLO = struct.Struct("!4sQIIBB")
MIN_SECRET_BYTES = 16
NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_TEXT_MAX_BYTES = 255
GREETING_BYTES = len(_MAGIC) + NONCE_BYTES
HELLO_MAX_BYTES = _HELLO.size + 2 * _TEXT_MAX_BYTES + NONCE_BYTES + _PROOF_BYTES
VERDICT_BYTES = 1 + _PROOF_BYTES


class Refusal(IntEnum):
    """Why a listener turned a dialler away; on the wire, a hint for the dialler's message and never more."""

    MALFORMED = 1
    EPOCH = 2
    RANK = 3
    IDENTITY = 4
    PROOF = 5
    CROWDED = 6
    LATE = 7


class HandshakeRefused(Exception):
    """The other end did not prove who it should be. ``claim`` is what it said of itself, unproven."""

    def __init__(self, refusal: Refusal, claim: str) -> None:
        super().__init__(f"{refusal.name.lower()}: {claim}")
        self.refusal = refusal
        self.claim = claim


@dataclass(frozen=True, slots=True)
class Hello:
    """Who dials whom, and on which channel: ``""`` is the whole group, anything else a part that ``split`` made."""

    sender: int
    receiver: int
    channel: str


def check_group(group: GroupSpec, address: str) -> None:
    """Refuse a group that this listener is not in, or that the wire cannot express.

    Raises:
        ValueError: the coordinator handed out a specification that cannot work.
    """
    if len(group.identities) != group.world_size or not 0 <= group.rank < group.world_size:
        raise ValueError(f"rank {group.rank} of {group.world_size} with {len(group.identities)} identities is no group")
    if group.world_size > 0xFFFFFF or not 0 <= group.epoch < 1 << 63:
        raise ValueError(f"epoch {group.epoch} of {group.world_size} ranks does not fit into a frame")
    if group.addresses[group.rank] != address:
        raise ValueError(f"rank {group.rank} listens on {address}, the group says {group.addresses[group.rank]}")
    if len(group.secret) < MIN_SECRET_BYTES:
        raise ValueError(f"an epoch secret needs {MIN_SECRET_BYTES} bytes, not {len(group.secret)}")
    if max(len(identity.encode()) for identity in group.identities) > _TEXT_MAX_BYTES:
        raise ValueError(f"an identity has at most {_TEXT_MAX_BYTES} bytes")


def encode_greeting(nonce: bytes) -> bytes:
    return _MAGIC + nonce


def open_greeting(raw: bytes) -> bytes:
    """The listener's nonce.

    Raises:
        HandshakeRefused: the other end does not speak this protocol.
    """
    if len(raw) != GREETING_BYTES or raw[: len(_MAGIC)] != _MAGIC:
        raise HandshakeRefused(Refusal.MALFORMED, raw[:8].hex())
    return raw[len(_MAGIC) :]


def seal_hello(group: GroupSpec, hello: Hello, listener_nonce: bytes, nonce: bytes) -> bytes:
    identity = group.identities[hello.sender].encode()
    channel = hello.channel.encode()
    if len(channel) > _TEXT_MAX_BYTES:
        raise ValueError(f"a channel name has at most {_TEXT_MAX_BYTES} bytes: groups are split too deep")
    head = _HELLO.pack(_MAGIC, group.epoch, hello.sender, hello.receiver, len(identity), len(channel))
    return head + identity + channel + nonce + _proof(group, b"dialler", hello, listener_nonce + nonce)


def hello_bytes_missing(raw: bytes | bytearray) -> int:
    """How many bytes a listener may still read: first the fixed part, then what its one-byte lengths announce."""
    if len(raw) < _HELLO.size:
        return _HELLO.size - len(raw)
    identity_bytes, channel_bytes = raw[_HELLO.size - 2 : _HELLO.size]
    return _HELLO.size + identity_bytes + channel_bytes + NONCE_BYTES + _PROOF_BYTES - len(raw)


def verify_hello(group: GroupSpec, raw: bytes, listener_nonce: bytes) -> tuple[Hello, bytes]:
    """What a dialler proved, and its nonce.

    Raises:
        HandshakeRefused: it proved nothing; ``refusal`` says what was wrong first.
    """
    if len(raw) < _HELLO.size or hello_bytes_missing(raw) != 0:
        raise HandshakeRefused(Refusal.MALFORMED, f"{len(raw)} bytes")
    magic, epoch, sender, receiver, identity_bytes, channel_bytes = _HELLO.unpack_from(raw)
    texts = raw[_HELLO.size : _HELLO.size + identity_bytes + channel_bytes]
    nonce, proof = raw[-NONCE_BYTES - _PROOF_BYTES : -_PROOF_BYTES], raw[-_PROOF_BYTES:]
    identity = texts[:identity_bytes].decode(errors="replace")
    channel = texts[identity_bytes:].decode(errors="replace")
    claim = f"{identity!r} as rank {sender} of epoch {epoch}"
    if magic != _MAGIC:
        raise HandshakeRefused(Refusal.MALFORMED, raw[:8].hex())
    if epoch != group.epoch:
        raise HandshakeRefused(Refusal.EPOCH, claim)
    if receiver != group.rank or sender >= group.world_size or sender == group.rank:
        raise HandshakeRefused(Refusal.RANK, f"{claim} looks for rank {receiver}")
    if identity != group.identities[sender]:
        raise HandshakeRefused(Refusal.IDENTITY, claim)
    hello = Hello(sender, receiver, channel)
    if not hmac.compare_digest(proof, _proof(group, b"dialler", hello, listener_nonce + nonce)):
        raise HandshakeRefused(Refusal.PROOF, claim)
    return hello, nonce


def seal_welcome(group: GroupSpec, hello: Hello, listener_nonce: bytes, nonce: bytes) -> bytes:
    return b"\0" + _proof(group, b"listener", hello, listener_nonce + nonce)


def encode_refusal(refusal: Refusal) -> bytes:
    return bytes([refusal]) + bytes(_PROOF_BYTES)


def open_verdict(group: GroupSpec, raw: bytes, hello: Hello, listener_nonce: bytes, nonce: bytes) -> None:
    """Return if the listener admitted us and proved that it is who we dialled.

    Raises:
        HandshakeRefused: it did not.
    """
    claim = f"rank {hello.receiver}, {group.identities[hello.receiver]}"
    if len(raw) != VERDICT_BYTES or raw[0] > max(Refusal):
        raise HandshakeRefused(Refusal.MALFORMED, claim)
    if raw[0]:
        raise HandshakeRefused(Refusal(raw[0]), claim)
    if not hmac.compare_digest(raw[1:], _proof(group, b"listener", hello, listener_nonce + nonce)):
        raise HandshakeRefused(Refusal.PROOF, claim)


def _proof(group: GroupSpec, role: bytes, hello: Hello, nonces: bytes) -> bytes:
    """Every part has a fixed size or its length before it, so no two transcripts read the same."""
    mac = hmac.new(group.secret, digestmod=hashlib.sha256)
    for part in (role, nonces, hello.channel.encode(), *(identity.encode() for identity in group.identities)):
        mac.update(struct.pack("!I", len(part)))
        mac.update(part)
    mac.update(struct.pack("!QII", group.epoch, hello.sender, hello.receiver))
    return mac.digest()
