"""Engines by name. An engine's libraries are imported when it is built, and not before."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from elastic_refit.errors import ConfigError

if TYPE_CHECKING:
    from elastic_refit.engines.base import ShardEngine

__all__ = ["ENGINES", "build_engine", "engine_environment", "require_engine"]


def build_engine(
    kind: str, model: str, options: Mapping[str, Any], *, width: int = 1, initial_version: int = 0
) -> ShardEngine:
    """Load ``model`` into a new engine of ``kind`` and ``width`` ranks; may take minutes.

    ``options`` are the engine's own argument names. ``initial_version`` labels samples until the first update.

    Raises:
        ConfigError: ``kind`` is unknown, its library is missing, or the model or an option cannot be used.
        ShardDied: a process of the engine ended while it loaded.
    """
    require_engine(kind)
    return ENGINES[kind](model, options, width, initial_version)


def require_engine(kind: str) -> None:
    """Raises ConfigError if an engine of ``kind`` cannot be built here; imports nothing heavy."""
    if kind not in ENGINES:
        raise ConfigError(f"engine: {kind!r} is unknown; use one of {', '.join(ENGINES)}", engine=kind)
    if kind == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed: pip install 'elastic-refit[cpu]' ([cuda] on a GPU machine), or use --engine torch",
            engine=kind,
        )
    for library in ("torch", "transformers"):
        if importlib.util.find_spec(library) is None:
            raise ConfigError(f"{library} is not installed: pip install 'elastic-refit[cpu]'", engine=kind)


def engine_environment(kind: str) -> dict[str, str]:
    """The environment that an engine of ``kind`` wants before its process imports anything; imports nothing heavy."""
    if kind == "vllm":
        from elastic_refit.engines.vllm_engine import vllm_environment

        return vllm_environment()
    return {"OMP_NUM_THREADS": "1"}


def _vllm(model: str, options: Mapping[str, Any], width: int, initial_version: int) -> ShardEngine:
    from elastic_refit.engines.vllm_engine import VllmEngine

    return VllmEngine(model, options, initial_version=initial_version)


def _torch(model: str, options: Mapping[str, Any], width: int, initial_version: int) -> ShardEngine:
    if width > 1:  # the whole models are in other processes, and this one need not even import torch
        from elastic_refit.engines.torch_workers import TorchWorkersEngine

        return TorchWorkersEngine(model, options, initial_version=initial_version, width=width)
    from elastic_refit.engines.torch_engine import TorchEngine

    return TorchEngine(model, options, initial_version=initial_version)


ENGINES: dict[str, Callable[[str, Mapping[str, Any], int, int], ShardEngine]] = {"vllm": _vllm, "torch": _torch}
