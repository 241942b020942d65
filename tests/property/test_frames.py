"""Every byte that a peer or a stranger may send to the parsers: refused by name, quickly, and without growing."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_refit.communicators import handshake
from elastic_refit.communicators.addresses import Address
from elastic_refit.communicators.base import GroupSpec
from elastic_refit.communicators.frames import Frame, FrameKind, check_frame, decode_frame, encode_frame
from elastic_refit.communicators.handshake import HandshakeRefused, Hello
from elastic_refit.control import wire
from elastic_refit.core.evidence import Beacon
from elastic_refit.errors import CommunicatorError

MUTANTS = 10_000
SEED = 20
ALLOCATION_LIMIT_BYTES = 1 << 20

GROUP = GroupSpec(
    epoch=9,
    rank=1,
    addresses=("tcp=127.0.0.1:1|unix=a|host=b",) * 3,
    identities=("trainer[0]/0", "shard[0]/0", "shard[1]#2/0"),
    secret=bytes(range(32)),
)
LISTENER_NONCE, DIALLER_NONCE = b"l" * 32, b"d" * 32
HELLO = Hello(sender=2, receiver=1, channel="/1:0")
FRAME = Frame(FrameKind.BROADCAST, root=2, sequence=7, size_bytes=1 << 20)


def mutate(data: bytes, source: random.Random) -> bytes:
    """One to three edits: a flipped bit, a changed, inserted or deleted byte, a cut, a repeat, a huge number."""
    mutant = bytearray(data)
    for _ in range(source.randint(1, 3)):
        at = source.randrange(len(mutant) + 1)
        edit = source.randrange(7)
        if edit == 0 and at < len(mutant):
            mutant[at] ^= 1 << source.randrange(8)
        elif edit == 1 and at < len(mutant):
            mutant[at] = source.randrange(256)
        elif edit == 2:
            mutant[at:at] = source.randbytes(source.randint(1, 9))
        elif edit == 3:
            del mutant[at : at + source.randint(1, 9)]
        elif edit == 4:
            del mutant[at:]
        elif edit == 5:
            mutant *= source.randint(1, 3)
        else:
            mutant[at : at + 8] = b"\xff" * 8
    return bytes(mutant)


def parse_frame(raw: bytes) -> bool:
    check_frame(raw, FRAME, peer=2)
    return True


def parse_hello(raw: bytes) -> bool:
    if len(raw) <= handshake.HELLO_MAX_BYTES:
        missing = handshake.hello_bytes_missing(raw)
        assert len(raw) + missing <= handshake.HELLO_MAX_BYTES
    return handshake.verify_hello(GROUP, raw, LISTENER_NONCE) == (HELLO, DIALLER_NONCE)


def parse_verdict(raw: bytes) -> bool:
    handshake.open_verdict(GROUP, raw, HELLO, LISTENER_NONCE, DIALLER_NONCE)
    return True


def parse_greeting(raw: bytes) -> bool:
    return len(handshake.open_greeting(raw)) == handshake.NONCE_BYTES


def parse_beacon(raw: bytes) -> bool:
    return wire.encode_beacon(wire.decode_beacon(raw)) == raw


def parse_order(raw: bytes) -> bool:
    return wire.encode_order(wire.decode_order(raw)) == raw


def parse_address(raw: bytes) -> bool:
    return str(Address.parse(raw.decode(errors="replace"))) != ""


SEALED = handshake.seal_hello(GROUP, HELLO, LISTENER_NONCE, DIALLER_NONCE)
PARSERS: dict[str, tuple[Callable[[bytes], bool], bytes, type[Exception]]] = {
    "frame": (parse_frame, encode_frame(FRAME), CommunicatorError),
    "hello": (parse_hello, SEALED, HandshakeRefused),
    "verdict": (
        parse_verdict,
        handshake.seal_welcome(GROUP, HELLO, LISTENER_NONCE, DIALLER_NONCE),
        HandshakeRefused,
    ),
}
LENIENT: dict[str, tuple[Callable[[bytes], bool], bytes, type[Exception]]] = {
    "greeting": (parse_greeting, handshake.encode_greeting(LISTENER_NONCE), HandshakeRefused),
    "beacon": (parse_beacon, wire.encode_beacon(Beacon(9, 3, 2, 2, "recv", 1, "in_collective", 0.25)), ValueError),
    "order": (parse_order, wire.encode_order(wire.StandingOrder(1, 9, 8, "shard[1] is frozen")), ValueError),
    "address": (parse_address, GROUP.addresses[0].encode(), ValueError),
}


@pytest.mark.parametrize("name", [*PARSERS, *LENIENT])
def test_mutated_bytes_are_refused_by_the_declared_error_and_allocate_nothing_to_speak_of(name: str) -> None:
    parse, valid, declared = (PARSERS | LENIENT)[name]
    assert parse(valid)
    source = random.Random(SEED)
    tracemalloc.start()
    for number in range(MUTANTS):
        mutant = mutate(valid, source)
        try:
            accepted = parse(mutant)
        except declared:
            continue
        assert accepted, f"mutant {number} of seed {SEED} was taken for something else: {mutant.hex()}"
        assert name in LENIENT or mutant == valid, f"mutant {number} of seed {SEED} was let in: {mutant.hex()}"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < ALLOCATION_LIMIT_BYTES


@given(
    st.sampled_from(FrameKind),
    st.integers(0, (1 << 24) - 1),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 64) - 1),
)
def test_a_frame_survives_the_wire(kind: FrameKind, root: int, sequence: int, size_bytes: int) -> None:
    frame = Frame(kind, root, sequence, size_bytes)
    assert decode_frame(encode_frame(frame)) == frame


@given(st.integers(0, 2), st.integers(0, 2), st.text("/:0123456789", max_size=20), st.binary(min_size=32, max_size=32))
def test_a_hello_is_accepted_by_the_rank_it_was_made_for_and_by_no_other(
    sender: int, receiver: int, channel: str, nonce: bytes
) -> None:
    hello = Hello(sender, receiver, channel)
    raw = handshake.seal_hello(GROUP, hello, LISTENER_NONCE, nonce)
    if receiver == GROUP.rank and sender != GROUP.rank:
        assert handshake.verify_hello(GROUP, raw, LISTENER_NONCE) == (hello, nonce)
        with pytest.raises(HandshakeRefused, match="proof"):
            handshake.verify_hello(GROUP, raw, nonce[::-1] if nonce != nonce[::-1] else b"x" * 32)
    else:
        with pytest.raises(HandshakeRefused, match="rank"):
            handshake.verify_hello(GROUP, raw, LISTENER_NONCE)


def test_a_listener_cannot_answer_with_what_the_dialler_said() -> None:
    reflected = b"\0" + SEALED[-32:]
    with pytest.raises(HandshakeRefused, match="proof"):
        handshake.open_verdict(GROUP, reflected, HELLO, LISTENER_NONCE, DIALLER_NONCE)
