"""The algebra of deadlines: what contradicts itself is rejected, what is derived never does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_refit.core.deadlines import BandwidthEstimate, check, derive_deadlines
from elastic_refit.errors import ConfigError
from tests.chains import LIMITS

MIB = 1 << 20


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"evidence_s": 1.5}, r"evidence_s \(1.5 s\) must be at least ping_s \(2 s\): .*"),
        (
            {"stall_s": 20},
            r"abort_s \(25 s\) must be at least stall_s \+ evidence_s \+ fence_s \+ order_s \(25.5 s\): .*",
        ),
        (
            {"pack_s": 22, "settle_s": 30},
            r"abort_s \(25 s\) must be at least pack_s \+ evidence_s \+ fence_s \+ order_s \(27.5 s\): .*",
        ),
        ({"apply_s": 22, "settle_s": 30}, r"abort_s \(25 s\) must be at least apply_s \+ .* \(27.5 s\): .*"),
        ({"finalize_s": 22}, r"abort_s \(25 s\) must be at least finalize_s \+ .* \(27.5 s\): .*"),
        ({"apply_s": 1, "settle_s": 10}, r"settle_s \(10 s\) must be at least order_s \+ pack_s \(10.5 s\): .*"),
        ({"settle_s": 11}, r"settle_s \(11 s\) must be at least order_s \+ apply_s \(11.5 s\): .*"),
        ({"hard_s": 24}, r"hard_s \(24 s\) must be at least abort_s \(25 s\): .*"),
    ],
)
def test_limits_that_contradict_each_other_are_rejected_with_both_names_and_numbers(
    changes: dict[str, float], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{sentence}$"):
        check(replace(LIMITS, **changes))


def test_limits_that_just_suffice_are_accepted_whatever_binary_fractions_make_of_them() -> None:
    parts = {"stall_s": 0.1, "pack_s": 0.1, "apply_s": 0.1, "finalize_s": 0.1, "ping_s": 0.2, "evidence_s": 0.2}
    check(replace(LIMITS, **parts, fence_s=0.3, order_s=0.1, settle_s=0.2, abort_s=0.7, hard_s=0.7))


def test_of_several_contradictions_the_widest_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        check(replace(LIMITS, abort_s=10))
    assert caught.value.fields == {
        "name": "abort_s",
        "value_s": 10,
        "needs": "finalize_s + evidence_s + fence_s + order_s",
        "needs_s": 20.5,
    }


def test_each_sum_covers_what_runs_inside_it() -> None:
    limits = LIMITS
    assert limits.reaction_s == 3 + 2 + 0.5
    assert limits.rung_s == 25 + 5
    assert limits.attempt_s == 20 + 20 + 30 + 10 + 60 + 15 + 5 * 0.5
    assert limits.incident_s == 5.5 + 4 * 3 + 5 + 3 * 12 + 2
    assert limits.coordinator_s(0) == 3 * 2 + 2 + limits.attempt_s + limits.incident_s + 4 * 10
    assert limits.coordinator_s(2) == 8 + 3 * (limits.coordinator_s(0) - 8)
    assert limits.driver_s(1) == limits.coordinator_s(1) + 20


def test_a_small_model_keeps_the_configured_limits() -> None:
    derived = derive_deadlines(LIMITS, total_bytes=4 * MIB, bucket_bytes=MIB, bandwidth_bytes_per_s=100e6)
    assert derived == LIMITS


def test_a_large_model_stretches_the_limits_of_its_transfer() -> None:
    derived = derive_deadlines(LIMITS, total_bytes=16 * 10**9, bucket_bytes=10**9, bandwidth_bytes_per_s=100e6)
    assert derived.hard_s == 4 * 160 + LIMITS.apply_s
    assert derived.stall_s == 4 * 10
    assert derived.abort_s == 40 + LIMITS.reaction_s
    assert derived.apply_s == LIMITS.apply_s


def test_no_transfer_is_given_longer_than_the_cap_unless_the_algebra_asks_for_it() -> None:
    size = {"total_bytes": 10**12, "bucket_bytes": 10**9}
    capped = derive_deadlines(LIMITS, **size, bandwidth_bytes_per_s=1e6, hard_cap_s=100)
    assert (capped.stall_s, capped.abort_s, capped.hard_s) == (100, 105.5, 105.5)


def estimate(*rates: float, **changes: float) -> BandwidthEstimate:
    plain = BandwidthEstimate(floor_bytes_per_s=10, cap_bytes_per_s=1000)
    now = replace(plain, **changes)  # type: ignore[arg-type]
    for rate in rates:
        now = now.observe(int(rate * 2), 2.0)
    return now


def test_before_the_first_measurement_the_floor_is_assumed() -> None:
    assert estimate().bytes_per_s == 10


def test_the_estimate_is_a_low_percentile_and_not_the_mean() -> None:
    assert estimate(*[500] * 5, 100, *[500] * 5).bytes_per_s == 500
    assert estimate(*[500] * 5, 100, 100, *[500] * 3).bytes_per_s == 100


def test_what_was_measured_long_ago_counts_less() -> None:
    assert estimate(*[100] * 10, *[500] * 10).bytes_per_s == 100
    assert estimate(*[100] * 10, *[500] * 40).bytes_per_s == 500


def test_the_estimate_stays_between_floor_and_cap() -> None:
    assert estimate(1).bytes_per_s == 10
    assert estimate(5000).bytes_per_s == 1000


def test_a_transfer_without_time_or_bytes_says_nothing() -> None:
    before = estimate(100)
    assert before.observe(100, 0.0) == before
    assert before.observe(0, 1.0) == before


def test_only_the_last_observations_are_kept() -> None:
    assert len(estimate(*range(20, 120)).rates) == 64
    assert estimate(*range(20, 120)).rates[-1] == 119


def test_the_estimate_may_be_asked_for_its_highest_percentile() -> None:
    assert estimate(100, 200, 300, percentile=1.0).bytes_per_s == 300
