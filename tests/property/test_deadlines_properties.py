"""Every budget covers the sum of what runs inside it, for every model, link and configuration."""

from __future__ import annotations

from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st

from elastic_refit.core.deadlines import MAX_ASKS, BandwidthEstimate, Deadlines, check, derive_deadlines

SECONDS = st.floats(0.01, 1000)
RECOVERIES = st.integers(0, 5)


@st.composite
def consistent(draw: st.DrawFn) -> Deadlines:
    """Any limits that pass the check."""
    drawn = Deadlines(**{each.name: draw(SECONDS) for each in fields(Deadlines)})
    evidence_s = max(drawn.evidence_s, drawn.ping_s)
    longest_s = max(drawn.stall_s, drawn.pack_s, drawn.apply_s, drawn.finalize_s)
    abort_s = max(drawn.abort_s, longest_s + evidence_s + drawn.fence_s + drawn.order_s)
    settle_s = max(drawn.settle_s, drawn.order_s + max(drawn.apply_s, drawn.pack_s))
    hard_s = max(drawn.hard_s, abort_s)
    limits = replace(drawn, evidence_s=evidence_s, abort_s=abort_s, settle_s=settle_s, hard_s=hard_s)
    check(limits)
    return limits


@given(
    consistent(),
    st.integers(0, 10**13),
    st.integers(16, 10**11),
    st.floats(1e5, 1e12),
    st.floats(1, 100),
)
def test_limits_that_are_derived_for_a_transfer_pass_the_check_and_are_never_below_the_configured(
    base: Deadlines, total_bytes: int, bucket_bytes: int, bandwidth: float, slack: float
) -> None:
    derived = derive_deadlines(
        base, total_bytes=total_bytes, bucket_bytes=bucket_bytes, bandwidth_bytes_per_s=bandwidth, slack=slack
    )
    check(derived)
    assert all(getattr(derived, each.name) >= getattr(base, each.name) for each in fields(Deadlines))


@given(consistent(), st.integers(0, 10**13), st.floats(1e5, 1e12), st.floats(1e5, 1e12))
def test_a_slower_link_never_gets_shorter_limits(base: Deadlines, total_bytes: int, one: float, other: float) -> None:
    slow, fast = (
        derive_deadlines(base, total_bytes=total_bytes, bucket_bytes=1 << 26, bandwidth_bytes_per_s=bandwidth)
        for bandwidth in (min(one, other), max(one, other))
    )
    assert slow.hard_s >= fast.hard_s
    assert slow.stall_s >= fast.stall_s


@given(consistent(), RECOVERIES)
def test_the_coordinators_budget_covers_every_attempt_and_every_incident(limits: Deadlines, recoveries: int) -> None:
    d = limits
    rounds = [d.prepare_s, d.join_s, d.pause_s, d.pack_s, d.hard_s, d.finalize_s]
    asked = [MAX_ASKS * d.evidence_s, (MAX_ASKS - 1) * d.evidence_s, MAX_ASKS * d.settle_s]  # pings, pauses, settles
    incident = [*asked, d.fence_s, d.order_s, d.abort_grace_s]
    inside = (1 + recoveries) * (sum(rounds) + sum(incident) + d.ledger_s) + MAX_ASKS * d.ping_s
    assert d.coordinator_s(recoveries) >= inside
    assert d.driver_s(recoveries) >= d.coordinator_s(recoveries) + d.coordinator_restart_s


@given(consistent(), RECOVERIES)
def test_no_limit_of_a_rank_outlasts_what_waits_for_it(limits: Deadlines, recoveries: int) -> None:
    d = limits
    assert d.ping_s <= d.evidence_s
    assert max(d.stall_s, d.pack_s, d.apply_s, d.finalize_s) + d.reaction_s <= d.abort_s * (1 + 1e-9)
    assert d.abort_s < d.rung_s
    assert d.abort_s <= d.hard_s <= d.attempt_s <= d.coordinator_s(recoveries) <= d.driver_s(recoveries)


@given(st.lists(st.tuples(st.integers(1, 10**12), st.floats(1e-3, 1e4)), max_size=100))
def test_the_estimate_is_bounded_by_floor_cap_and_what_was_measured(transfers: list[tuple[int, float]]) -> None:
    estimate = BandwidthEstimate(floor_bytes_per_s=1e6, cap_bytes_per_s=1e9)
    for size_bytes, seconds in transfers:
        estimate = estimate.observe(size_bytes, seconds)
    assert 1e6 <= estimate.bytes_per_s <= 1e9
    assert len(estimate.rates) <= estimate.max_observations
    if estimate.rates:
        assert estimate.bytes_per_s <= max(1e6, max(estimate.rates))
