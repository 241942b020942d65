"""The communicator benchmark, small: every figure is there, and they fit together."""

from __future__ import annotations

import json

from elastic_refit.bench.communicators import measure


def test_the_benchmark_measures_what_it_says() -> None:
    report = measure(size_bytes=4 << 20, receivers=1, repeats=2, rebuild_worlds=(2,), release_samples=4)
    assert json.loads(json.dumps(report)) == report
    assert 0 < report["tcp_over_gloo"]["min"] <= report["tcp_over_gloo"]["median"] <= report["tcp_over_gloo"]["max"]
    assert min(report[f"{what}_gb_per_s"] for what in ("tcp", "gloo", "memcpy")) > 0
    assert 0 < report["release_ms"]["p50"] <= report["release_ms"]["p95"]
    assert list(report["rebuild_s"]) == ["2"]
