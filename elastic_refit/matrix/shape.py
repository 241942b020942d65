"""What cells must have in common to share a fleet, and the configuration of such a fleet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from elastic_refit.config import (
    ChaosConfig,
    DeadlinesConfig,
    EngineConfig,
    FleetConfig,
    LedgerConfig,
    RayConfig,
    RefitConfig,
    RunConfig,
)
from elastic_refit.core.events import CommitMode
from elastic_refit.matrix.cells import Cell

__all__ = ["NUM_BUCKETS", "Shape", "lab_deadlines", "shape_of"]

NUM_BUCKETS = 6
"""Of a refit, unless a cell says how large a bucket is."""

_VLLM = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 128,
    "kv_cache_memory_bytes": 64 << 20,
    "seed": 0,
}
_ENDLESS = 1_000_000


@dataclass(frozen=True, slots=True)
class Shape:
    trainers: int
    widths: tuple[int, ...]
    engine: Literal["torch", "vllm"]
    transport: str
    commit: CommitMode
    bucket_bytes: int | None
    min_healthy: int
    max_recoveries: int
    gathering: bool

    def config(self, *, model_bytes: int) -> RunConfig:
        """The run of such a fleet. The deadlines are as short as a busy machine of two cores lets them be."""
        bucket_bytes = self.bucket_bytes or -(-model_bytes // NUM_BUCKETS // 16) * 16
        options: dict[str, Any] = _VLLM if self.engine == "vllm" else {"plain": True}
        return RunConfig(
            fleet=FleetConfig(
                trainers=self.trainers,
                shards=len(self.widths),
                widths=list(self.widths),
                min_healthy=self.min_healthy,
            ),
            refit=RefitConfig(
                bucket_bytes=bucket_bytes,
                commit=self.commit,
                max_recoveries_per_refit=self.max_recoveries,
                transport=self.transport,
            ),
            deadlines=lab_deadlines(),
            ledger=LedgerConfig(restart_budget=_ENDLESS, dead_after_requests=_ENDLESS),
            engine=EngineConfig(kind=self.engine, options=options, process="own" if self.engine == "vllm" else None),
            ray=RayConfig(cpus_per_trainer=0.01, cpus_per_shard=0.01),
            chaos=ChaosConfig(enabled=True),
        )


def shape_of(cell: Cell) -> Shape:
    return Shape(
        trainers=cell.trainers,
        widths=tuple(cell.widths or [1] * cell.shards),
        engine=cell.engine,
        transport=cell.transport,
        commit=cell.commit,
        bucket_bytes=cell.bucket_bytes,
        min_healthy=cell.min_healthy,
        max_recoveries=cell.max_recoveries,
        gathering=cell.gathering,
    )


def lab_deadlines() -> DeadlinesConfig:
    return DeadlinesConfig(
        ping_s=1.5,
        stall_s=2.0,
        evidence_s=2.0,
        fence_s=1.0,
        order_s=0.5,
        pack_s=3.0,
        apply_s=3.0,
        finalize_s=4.0,
        abort_s=7.5,
        abort_grace_s=2.0,
        prepare_s=4.0,
        join_s=8.0,
        pause_s=4.0,
        hard_s=20.0,
        settle_s=5.0,
        ledger_s=10.0,
        coordinator_restart_s=15.0,
    )
