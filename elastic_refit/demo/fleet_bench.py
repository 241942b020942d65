"""What a refit of a vLLM fleet costs, against handing the same bytes to vLLM's own reload through the object store.

Both take turns in one run, on the same engines, from the trainer's weights to the moment when every shard may serve
them. What must never happen here: a rival that starts with a cold cache, or weights that were not compared.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch

from elastic_refit.actors.fleet import Fleet
from elastic_refit.actors.setup import ParticipantSetup
from elastic_refit.actors.trainer import TrainerActor
from elastic_refit.actors.vllm_shard import VllmShardActor
from elastic_refit.config import RunConfig
from elastic_refit.demo.cluster import cluster
from elastic_refit.demo.tiny_model import load_trainer_model, make_tiny_model
from elastic_refit.forking.workers import VLLM_MODULES, WORKER_MODULES
from elastic_refit.transports.base import HeldWeights, WeightSource

__all__ = ["measure"]

_SHARDS = 3
_SIZES = {"1.4 MB": 2, "100 MB": 176}
"""Layers of the tiny model: many small tensors, as a real one has."""
_LOAD_S = 600.0
_WAIT_S = 300.0
_PATIENT = {"apply_s": 90, "finalize_s": 90, "abort_s": 120, "hard_s": 300, "settle_s": 120}
"""Three engines share what cores there are, and nobody is to be condemned for that."""
_ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128, "kv_cache_memory_bytes": 64 << 20}


class BenchTrainer(TrainerActor):
    """Holds a checkpoint, and makes the next version of it."""

    def __init__(self, setup: ParticipantSetup, *, model: str) -> None:
        super().__init__(setup)
        torch.set_num_threads(1)
        self._weights = {name: p.detach() for name, p in load_trainer_model(model).named_parameters()}

    def weight_source(self) -> WeightSource:
        return HeldWeights(self._weights)

    def step(self) -> None:
        for tensor in self._weights.values():
            tensor.mul_(1.01)

    def put(self) -> list[ray.ObjectRef]:
        """All weights, in the object store."""
        return [ray.put({name: tensor.numpy() for name, tensor in self._weights.items()})]


def measure(*, repeats: int = 15, sizes: Sequence[str] = tuple(_SIZES)) -> dict[str, Any]:
    """Takes some minutes, mostly to start engines. Starts a Ray of its own, on this machine, and ends it.

    Seconds are medians over ``repeats`` rounds; ``refit_over_reload`` is their ratio, round by round. ``engine_s`` is
    what the slowest shard spent inside vLLM; the rest is packing, moving, digests and the protocol.
    """
    own = RunConfig.model_validate({"ray": {"num_cpus": 4}})
    with cluster(own, has_dashboard=False, forks=(*WORKER_MODULES, *VLLM_MODULES)):
        return {size: _of_size(_SIZES[size], repeats) for size in sizes}


def _of_size(num_layers: int, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", family="qwen2", seed=1, num_layers=num_layers)
        config = RunConfig.model_validate(
            {
                "fleet": {"trainers": 1, "shards": _SHARDS},
                "refit": {"bucket_bytes": min(8 << 20, max(1 << 18, model.size_bytes // 16 // 16 * 16))},
                "engine": {"kind": "vllm", "process": "inline", "options": _ENGINE},
                "ray": {"cpus_per_trainer": 0.5, "cpus_per_shard": 0.5},
                "deadlines": _PATIENT,
            }
        )
        fleet = Fleet(
            config,
            trainer_class=BenchTrainer,
            trainer_arguments={"model": model.directory},
            model=model.directory,
            folder=Path(folder),
        )
        try:
            fleet.wait_until_loaded(timeout_s=_LOAD_S)
            rounds = [_round(fleet, version) for version in range(1, repeats + 2)][1:]  # the first is for warm pages
        finally:
            fleet.close()
    figures: dict[str, Any] = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    ratios = [each["refit_s"] / each["reload_s"] for each in rounds]
    figures["refit_over_reload"] = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    return figures | {"size_bytes": model.size_bytes, "tensors": model.num_tensors, "shards": _SHARDS}


def _round(fleet: Fleet, version: int) -> dict[str, float]:
    (trainer,) = fleet.trainers.values()
    shards = list(fleet.shards.values())
    ray.get(trainer.step.remote(), timeout=_WAIT_S)
    ray.get([shard.__ray_call__.remote(_watch_engine) for shard in shards], timeout=_WAIT_S)
    began = time.perf_counter()
    fleet.refit(version)
    refit_s = time.perf_counter() - began
    engine_s = max(ray.get([shard.__ray_call__.remote(_engine_s) for shard in shards], timeout=_WAIT_S))
    ray.get(trainer.step.remote(), timeout=_WAIT_S)
    began = time.perf_counter()
    stored = ray.get(trainer.put.remote(), timeout=_WAIT_S)
    took = ray.get([shard.__ray_call__.remote(_reload, stored) for shard in shards], timeout=_WAIT_S)
    reload_s = time.perf_counter() - began
    return {
        "refit_s": refit_s,
        "refit_engine_s": engine_s,
        "refit_rest_s": refit_s - engine_s,
        "reload_s": reload_s,
        "reload_engine_s": max(took),
        "reload_rest_s": reload_s - max(took),
    }


_spent: list[float] = []
"""In a shard's process: seconds inside vLLM since the last look."""
_is_timed: list[bool] = []
"""Holds something once they are counted there."""


def _watch_engine(actor: VllmShardActor) -> None:
    """Time what a refit does with this shard's engine; in its own process, once."""
    from elastic_refit.engines.vllm_worker import VllmReceiver

    _spent.clear()
    if _is_timed:
        return
    _is_timed.append(True)
    for name in ("begin", "feed", "finish"):
        setattr(VllmReceiver, name, _timed(getattr(VllmReceiver, name)))


def _timed(call: Any) -> Any:
    def timed(*arguments: Any) -> None:
        began = time.perf_counter()
        call(*arguments)
        _spent.append(time.perf_counter() - began)

    return timed


def _engine_s(actor: VllmShardActor) -> float:
    return sum(_spent)


def _reload(actor: VllmShardActor, stored: list[ray.ObjectRef]) -> float:
    """The rival: pause, take the weights out of the store without a copy, vLLM's own reload, resume."""
    engine: Any = actor._engine
    engine.pause()
    weights = ray.get(stored[0])
    began = time.perf_counter()
    tensors = [(name, torch.from_numpy(array)) for name, array in weights.items()]
    engine._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors)})
    took_s = time.perf_counter() - began
    engine.resume()
    return took_s
