"""How fast the ``tcp`` communicator moves bytes, against torch's Gloo and a plain copy, and how fast it lets go.

Every comparison alternates in one run, in the same processes, on the same bytes: on a machine that others use too, only
ratios mean something.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_refit.communicators.base import CommunicatorBackend
from elastic_refit.communicators.rank_processes import RankProcess, Seat, form_group
from elastic_refit.errors import CommunicatorError

__all__ = ["measure"]

_GB = 1e9
_REBUILDS = 5
_START_S = 300.0


class BenchSeat(Seat):
    """A rank that can also broadcast the same buffer over Gloo, and copy it."""

    def __init__(self, backend: CommunicatorBackend) -> None:
        super().__init__(backend)
        self._gloo: Any = None

    def join_gloo(self, store: str, rank: int, world_size: int) -> None:
        import torch.distributed

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # it would resolve the host's name, which need not have an address
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        self._gloo = torch.distributed

    def timed_gloo(self, size: int, root: int) -> float:
        import torch

        tensor = torch.frombuffer(self.scratch(size), dtype=torch.uint8)
        self._gloo.barrier()
        start = time.perf_counter()
        self._gloo.broadcast(tensor, root)
        return time.perf_counter() - start

    def timed_copy(self, size: int) -> float:
        source, target = memoryview(self.scratch(size)), memoryview(bytearray(size))
        target[:] = source  # the first copy pays for fresh pages
        start = time.perf_counter()
        target[:] = source
        return time.perf_counter() - start


def measure(
    *,
    size_bytes: int = 256 << 20,
    receivers: int = 3,
    repeats: int = 9,
    rebuild_worlds: Sequence[int] = (4, 16),
    release_samples: int = 50,
) -> dict[str, Any]:
    """Measure; takes a minute or two with the defaults, and ``size_bytes`` per rank.

    Rates are payload bytes over the time until the last rank has them. ``release_ms`` is from ``abort`` to the moment
    at which the blocked call had left; ``rebuild_s`` is bind, exchange of addresses and join of that many ranks.
    """
    return _broadcasts(size_bytes, receivers + 1, repeats) | {
        "release_ms": _release_ms(release_samples),
        "rebuild_s": {str(world_size): _rebuild_s(world_size) for world_size in rebuild_worlds},
        "size_bytes": size_bytes,
        "receivers": receivers,
    }


def _broadcasts(size: int, world_size: int, repeats: int) -> dict[str, Any]:
    ranks = [RankProcess("tcp", seat=BenchSeat) for _ in range(world_size)]
    try:
        form_group(ranks)
        with tempfile.TemporaryDirectory() as folder:
            for rank, process in enumerate(ranks):
                process.start("join_gloo", str(Path(folder) / "store"), rank, world_size)
            for process in ranks:
                process.finish(_START_S)
        rounds = [_one_round(ranks, size) for _ in range(repeats + 1)][1:]
    finally:
        for process in ranks:
            process.stop()
    tcp_s, gloo_s, copy_s = zip(*rounds, strict=True)
    ratios = [gloo / tcp for tcp, gloo in zip(tcp_s, gloo_s, strict=True)]
    return {
        "tcp_over_gloo": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "tcp_gb_per_s": size / statistics.median(tcp_s) / _GB,
        "gloo_gb_per_s": size / statistics.median(gloo_s) / _GB,
        "memcpy_gb_per_s": size / statistics.median(copy_s) / _GB,
    }


def _one_round(ranks: Sequence[RankProcess], size: int) -> tuple[float, float, float]:
    return (
        _slowest(ranks, "timed_broadcast", size),
        _slowest(ranks, "timed_gloo", size),
        ranks[0].call("timed_copy", size),
    )


def _slowest(ranks: Sequence[RankProcess], verb: str, size: int) -> float:
    for process in ranks:
        process.start(verb, size, 0)
    return max(float(process.finish(_START_S)) for process in ranks)


def _release_ms(count: int) -> dict[str, float]:
    """Half of the samples are blocked in receiving, half in sending to a peer that takes nothing."""
    ranks = [RankProcess("tcp") for _ in range(2)]
    try:
        samples = sorted(_one_release_s(ranks, blocked_rank=number % 2) * 1e3 for number in range(count))
    finally:
        for process in ranks:
            process.stop()
    return {"p50": statistics.median(samples), "p95": samples[int(0.95 * len(samples))]}


def _one_release_s(ranks: Sequence[RankProcess], *, blocked_rank: int) -> float:
    form_group(ranks)
    blocked = ranks[blocked_rank]
    blocked.start("broadcast", 64 << 20, 0, 0)
    while blocked.aside("status")["waiting_on"] == ("none", None):
        pass
    blocked.is_finished(0.02)  # long enough to fill the buffers, so that it is blocked and not merely on its way
    blocked.aside("abort", "measured")
    try:
        blocked.finish()
    except CommunicatorError:
        released_s = blocked.call("status")["released_s"]
    else:
        raise AssertionError("a broadcast ended without its peer")
    for process in ranks:
        process.call("close")
    return float(released_s)


def _rebuild_s(world_size: int) -> float:
    ranks = [RankProcess("tcp") for _ in range(world_size)]
    try:
        times = []
        for epoch in range(_REBUILDS + 1):
            start = time.perf_counter()
            form_group(ranks, epoch=epoch)
            times.append(time.perf_counter() - start)
            for process in ranks:
                process.call("close")
    finally:
        for process in ranks:
            process.stop()
    return statistics.median(times[1:])
