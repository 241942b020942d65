"""The demo from configuration to exit code."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from elastic_refit.actors.launch import require_cpus
from elastic_refit.chaos import Fault
from elastic_refit.core.ids import ShardId
from elastic_refit.core.manifest import build_manifest
from elastic_refit.demo.cluster import cluster, log_folder
from elastic_refit.demo.config import DemoConfig
from elastic_refit.demo.display import Display
from elastic_refit.demo.loop import Loop
from elastic_refit.demo.result import DemoResult
from elastic_refit.demo.tiny_model import checkpoint_tensor_specs, make_tiny_model
from elastic_refit.engines.registry import require_engine
from elastic_refit.errors import ConfigError

__all__ = ["run_demo"]


def run_demo(config: DemoConfig, faults: Sequence[Fault], console: Console, json_path: Path | None) -> int:
    """Run it; returns the exit code: 0 if every promise held, else 1.

    Raises:
        ConfigError: something that the user set cannot be used. Nothing was left running.
    """
    require_engine(config.engine.kind)
    if json_path is not None and not json_path.parent.is_dir():
        raise ConfigError(f"--json: there is no folder {str(json_path.parent)!r} to write into", field="json")
    with tempfile.TemporaryDirectory(prefix="elastic-refit-model-") as scratch:
        model = (
            config.demo.model or make_tiny_model(scratch, family=config.demo.family, seed=config.demo.seed).directory
        )
        num_buckets = build_manifest(checkpoint_tensor_specs(model), config.refit.bucket_bytes).num_buckets
        _check_faults(faults, config, num_buckets)
        with Display(console) as display, cluster(config):
            require_cpus(config)
            result = Loop(config, display, faults, num_buckets).run(model, _folder())
    return _conclude(result, display, json_path)


def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="elastic-refit-", dir=log_folder()))
    folder.chmod(0o755)
    return folder


def _check_faults(faults: Sequence[Fault], config: DemoConfig, num_buckets: int) -> None:
    for fault in faults:
        if isinstance(fault.victim, ShardId) and fault.victim.index >= config.fleet.shards:
            raise ConfigError(f"--{fault.kind}: there is no {fault.victim}; shards are 0 to {config.fleet.shards - 1}")
        if not 1 <= fault.version <= config.demo.steps:
            raise ConfigError(f"--{fault.kind}: there is no step {fault.version}; steps are 1 to {config.demo.steps}")
        if fault.bucket is not None and fault.bucket >= num_buckets:
            raise ConfigError(
                f"--{fault.kind}: there is no bucket {fault.bucket}; a refit of this model has buckets 0 to "
                f"{num_buckets - 1} (refit.bucket_bytes={config.refit.bucket_bytes})"
            )


def _conclude(result: DemoResult, display: Display, json_path: Path | None) -> int:
    display.summary(result)
    if json_path is not None:
        result.write(json_path)
    if result.error is not None:
        display.say(f"the run ended: {result.error}")
    elif result.broken:
        display.say(f"the run finished, and {len(result.broken)} of its promises did not hold")
    else:
        incidents = f"{len(result.incidents)} incident" + ("s" if len(result.incidents) != 1 else "")
        worst = max(row.logprob_gap for row in result.steps)
        display.say(
            f"ok: {len(result.steps)} steps, {incidents}, every sampled token within {worst:.1e} of the trainer"
        )
    return 0 if result.ok else 1
