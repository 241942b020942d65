"""What a refit by packed broadcast costs, against Gloo, a copy and the object store, and what a loss adds to it.

Every comparison alternates in one run, between the same processes, on as many bytes. A refit here is everything: pack,
digest, send, receive, digest, apply, commit; its rivals only bring the bytes into the receivers' memory.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from elastic_refit.bench.refit_ranks import Layout, RefitRanks, RefitTimes
from elastic_refit.core.events import CommitMode
from elastic_refit.core.ids import ShardId, TrainerId
from elastic_refit.transports.base import Packing
from elastic_refit.transports.digests import DIGESTS

__all__ = ["measure"]

_GB = 1e9
_TENSORS = 64
_COMMITS: tuple[CommitMode, ...] = ("streamed", "staged")
_LOSSES = (0.1, 0.5, 0.9)
_ROOT = TrainerId(0)


def measure(
    *,
    size_bytes: int = 256 << 20,
    bucket_bytes: int = 8 << 20,
    receivers: int = 3,
    repeats: int = 5,
    object_store: Callable[[int, int], Callable[[], float]] | None = None,
) -> dict[str, Any]:
    """Measure; takes a minute or two with the defaults, and three times ``size_bytes`` per rank.

    ``object_store(size_bytes, receivers)`` gives a call that moves as many bytes to as many receivers and returns the
    seconds; it is called in turn with the others. Rates are bytes of one copy over the seconds until the last rank is
    done. ``resume`` is what a shard lost after that share of the buckets adds, in refits without a loss.
    """
    layout = Layout(size_bytes, _TENSORS, Packing(bucket_bytes))
    ranks = RefitRanks(layout, shards=receivers)
    try:
        bench = _Bench(ranks, size_bytes, object_store and object_store(size_bytes, receivers))
        figures = bench.throughput(repeats) | {"resume": bench.resumes(repeats), "peak_extra_bytes": bench.peaks()}
    finally:
        ranks.stop()
    return figures | {"size_bytes": size_bytes, "bucket_bytes": bucket_bytes, "receivers": receivers}


class _Bench:
    def __init__(self, ranks: RefitRanks, size: int, object_store: Callable[[], float] | None) -> None:
        self._ranks = ranks
        self._size = size
        self._object_store = object_store
        self._version = 0
        self._group = ranks.build()

    def throughput(self, repeats: int) -> dict[str, Any]:
        """Everything once for warm pages, then ``repeats`` rounds in which all take turns."""
        with tempfile.TemporaryDirectory() as folder:
            self._join_gloo(Path(folder) / "store")
            rounds = [self._round() for _ in range(repeats + 1)][1:]
        seconds = {name: [each[name] for each in rounds] for name in rounds[0]}
        refits = seconds["streamed"]
        figures: dict[str, Any] = {
            f"{name}_gb_per_s": self._size / statistics.median(took) / _GB for name, took in seconds.items()
        }
        for rival in seconds.keys() - {"streamed", "memcpy", *DIGESTS}:
            figures[f"streamed_over_{rival}"] = _ratio(seconds[rival], refits)
        for digest in DIGESTS:
            figures[f"{digest}_over_memcpy"] = _ratio(seconds["memcpy"], seconds[digest])
            figures[f"{digest}_share_of_refit"] = statistics.median(seconds[digest]) / statistics.median(refits)
        return figures

    def peaks(self) -> dict[str, int]:
        """The most that was resident beyond the weights, on a sender that has no buffers yet and on a receiver."""
        self._ranks.take_part([_ROOT])
        self._group = self._ranks.build()
        found: dict[str, int] = {}
        for commit in _COMMITS:
            self._ranks.each(self._group.members, lambda member: ("mark_memory", ()))
            self._refit(commit)
            peaks = self._ranks.each(self._group.members, lambda member: ("peak_extra_bytes", ()))
            found.setdefault("sender", peaks[_ROOT])
            found[f"receiver_{commit}"] = max(peaks[shard] for shard in self._group.shard_ids)
        return found

    def resumes(self, repeats: int) -> dict[str, Any]:
        """For each share of the buckets after which the last shard is lost: what it costs beyond a refit."""
        costs: dict[str, list[float]] = {f"{share:.0%}": [] for share in _LOSSES}
        for _ in range(repeats):
            for share in _LOSSES:
                costs[f"{share:.0%}"].append(self._resume(share))
        return {share: {"median": statistics.median(found), "max": max(found)} for share, found in costs.items()}

    def _round(self) -> dict[str, float]:
        took: dict[str, float] = {commit: self._refit(commit).total_s for commit in _COMMITS}
        took["gloo"] = self._slowest("timed_gloo", self._size, 0)
        if self._object_store is not None:
            took["object_store"] = self._object_store()
        root = self._ranks.processes[_ROOT]
        took["memcpy"] = root.call("timed_copy", self._size)
        return took | {digest: root.call("timed_digest", self._size, digest) for digest in DIGESTS}

    def _refit(self, commit: CommitMode = "streamed") -> RefitTimes:
        self._version += 1
        return self._ranks.refit(self._group, self._version, commit=commit)

    def _resume(self, share: float) -> float:
        """A refit whose last shard is lost after ``share`` of the buckets, over one without a loss, less 1."""
        ranks, victim, usual_s = self._ranks, self._group.shard_ids[-1], self._refit().total_s
        self._version += 1
        began = time.perf_counter()
        manifest = ranks.ready(self._group, self._version)
        ranks.each([victim], lambda member: ("fail_at", (f"bucket:{int(share * manifest.num_buckets)}",)))
        ranks.transfer(self._group, self._version, manifest, commit="streamed")
        settled = ranks.settle([member for member in self._group.members if member != victim], self._version)
        through = min(answer.applied_through for member, answer in settled.items() if isinstance(member, ShardId))
        ranks.refit(ranks.build(without=victim), self._version, start=through + 1)
        took_s = time.perf_counter() - began
        ranks.each([victim], lambda member: ("fail_at", (None,)))
        ranks.settle([victim], self._version, roll_back=True)
        self._group = ranks.build()
        return took_s / usual_s - 1

    def _join_gloo(self, store: Path) -> None:
        members = list(self._ranks.processes)
        self._ranks.each(members, lambda member: ("join_gloo", (str(store), members.index(member), len(members))))

    def _slowest(self, verb: str, *arguments: object) -> float:
        took = self._ranks.each(self._group.members, lambda member: (verb, arguments))
        return max(map(float, took.values()))


def _ratio(seconds: Sequence[float], over: Sequence[float]) -> dict[str, float]:
    """How many times faster ``over`` is, round by round."""
    ratios = [one / other for one, other in zip(seconds, over, strict=True)]
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
