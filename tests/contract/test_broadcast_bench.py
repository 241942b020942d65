"""The broadcast benchmark, small: every figure is there, and those that cannot lie do not."""

from __future__ import annotations

from elastic_refit.bench.broadcast import measure

SIZE = 4 << 20


def test_one_run_has_every_figure_of_the_broadcast() -> None:
    moved: list[tuple[int, int]] = []

    def object_store(size_bytes: int, receivers: int) -> float:
        moved.append((size_bytes, receivers))
        return 1.0

    figures = measure(
        size_bytes=SIZE,
        bucket_bytes=SIZE // 16,
        receivers=2,
        repeats=1,
        object_store=lambda size_bytes, receivers: lambda: object_store(size_bytes, receivers),
    )
    assert moved == [(SIZE, 2)] * 2, "once to warm up, and once to measure"
    assert figures["object_store_gb_per_s"] == SIZE / 1e9
    for name in ("streamed", "staged", "gloo", "memcpy", "xxh3", "sum64"):
        assert figures[f"{name}_gb_per_s"] > 0
    for rival in ("gloo", "object_store", "staged"):
        assert 0 < figures[f"streamed_over_{rival}"]["min"] <= figures[f"streamed_over_{rival}"]["max"]
    assert figures["xxh3_over_memcpy"]["median"] > 0
    assert 0 < figures["xxh3_share_of_refit"] < 1
    assert set(figures["resume"]) == {"10%", "50%", "90%"}
    peaks = figures["peak_extra_bytes"]
    assert peaks["receiver_staged"] > SIZE // 2, "a staged receiver holds a copy"
