"""The two messages of the control channel: what survives the wire, and what is none of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_refit.control.wire import (
    MAX_MESSAGE_BYTES,
    StandingOrder,
    decode_beacon,
    decode_order,
    encode_beacon,
    encode_order,
)
from elastic_refit.core.evidence import Beacon

BEACON = Beacon(9, 3, 2, 2, "recv", 1, "in_collective", 0.25)
ORDER = StandingOrder(1, 9, 8, "shard[1] is frozen")
COUNT = st.integers(-1, 2**62)
PHASES = ["preparing", "joining", "pausing", "packing", "in_collective", "applying", "finalizing", "done", "aborted"]


@given(
    st.builds(
        Beacon,
        epoch=COUNT,
        entered=st.integers(-2, 2**62),
        completed=st.integers(-2, 2**62),
        applied=COUNT,
        waiting_on=st.sampled_from(["recv", "send", "buffer", "source", "engine", "none"]),
        waiting_peer=st.none() | st.integers(0, 2**31),
        phase=st.sampled_from(PHASES),
        tick_age_s=st.floats(0, 1e9),
    )
)
def test_a_beacon_survives_the_wire(beacon: Beacon) -> None:
    assert decode_beacon(encode_beacon(beacon)) == beacon


@given(st.integers(0, 2**62), COUNT, st.integers(0, 9), st.text(max_size=90))
def test_an_order_survives_the_wire(coordinator: int, epoch: int, back: int, reason: str) -> None:
    order = StandingOrder(coordinator, epoch, max(-1, epoch - back), reason)
    assert decode_order(encode_order(order)) == order


@pytest.mark.parametrize("reason", ["x" * 401, "é" * 300, "x" + "é" * 300, "€" * 300, "𝛅" * 1000])
def test_a_reason_that_is_too_long_is_cut_between_two_characters(reason: str) -> None:
    raw = encode_order(replace(ORDER, reason=reason))
    assert len(raw) <= MAX_MESSAGE_BYTES
    kept = decode_order(raw).reason
    assert reason.startswith(kept)
    assert len(kept.encode()) > 396


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -2},
        {"entered": -3},
        {"completed": -3},
        {"applied": -2},
        {"waiting_peer": -2},
        {"tick_age_s": -0.1},
        {"tick_age_s": float("nan")},
        {"tick_age_s": float("inf")},
    ],
)
def test_a_beacon_with_a_value_out_of_its_range_is_refused(change: dict[str, float]) -> None:
    raw = encode_beacon(replace(BEACON, **change))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not a beacon"):
        decode_beacon(raw)


@pytest.mark.parametrize("change", [{"coordinator": -1}, {"epoch": -2}, {"aborted_through": -2}, {"epoch": 7}])
def test_an_order_with_a_value_out_of_its_range_is_refused(change: dict[str, int]) -> None:
    raw = encode_order(replace(ORDER, **change))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not an order"):
        decode_order(raw)


def test_one_message_is_not_taken_for_the_other() -> None:
    with pytest.raises(ValueError, match="not a beacon"):
        decode_beacon(encode_order(replace(ORDER, reason="x" * 26)))
    with pytest.raises(ValueError, match="not an order"):
        decode_order(encode_beacon(BEACON))
