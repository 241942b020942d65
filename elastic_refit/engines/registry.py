"""Engines by name. An engine's libraries are imported when it is built, and not before."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from elastic_refit.engines.base import Hosting, ShardEngine
from elastic_refit.errors import ConfigError

__all__ = ["ENGINES", "build_engine", "engine_environment", "is_inline", "require_engine"]


def build_engine(
    kind: str, model: str, options: Mapping[str, Any], *, hosting: Hosting | None = None, initial_version: int = 0
) -> ShardEngine:
    """Load ``model`` into a new engine of ``kind``; may take minutes.

    ``options`` are the engine's own argument names. ``initial_version`` labels samples until the first update.

    Raises:
        ConfigError: ``kind`` is unknown, its library is missing, or the model, an option or the hosting does not fit.
        ShardDied: a process of the engine ended while it loaded.
    """
    require_engine(kind)
    hosting = hosting or Hosting()
    if is_inline(kind, hosting) and hosting.width > 1:
        raise ConfigError("engine.process: an inline engine has one rank; choose own for wider shards", field="process")
    return ENGINES[kind](model, options, hosting, initial_version)


def is_inline(kind: str, hosting: Hosting) -> bool:
    """Whether the engine lives in its caller's process. If it is not said: vLLM does not, torch if it has one rank."""
    if hosting.process is None:
        return kind == "torch" and hosting.width == 1
    return hosting.process == "inline"


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


def engine_environment(kind: str, hosting: Hosting) -> dict[str, str]:
    """The environment that such an engine wants before its process imports anything; imports nothing heavy."""
    if kind == "vllm":
        from elastic_refit.engines.vllm_terms import vllm_environment

        return vllm_environment(is_inline=is_inline(kind, hosting))
    return {"OMP_NUM_THREADS": "1"}


def _vllm(model: str, options: Mapping[str, Any], hosting: Hosting, initial_version: int) -> ShardEngine:
    if is_inline("vllm", hosting):
        from elastic_refit.engines.vllm_engine import VllmEngine

        return VllmEngine(model, options, initial_version=initial_version)
    from elastic_refit.engines.vllm_process import VllmProcessEngine

    width, pause = hosting.width, hosting.pause
    return VllmProcessEngine(model, options, width=width, pause=pause, initial_version=initial_version)


def _torch(model: str, options: Mapping[str, Any], hosting: Hosting, initial_version: int) -> ShardEngine:
    if is_inline("torch", hosting):
        from elastic_refit.engines.torch_engine import TorchEngine

        return TorchEngine(model, options, initial_version=initial_version)
    from elastic_refit.engines.torch_workers import TorchWorkersEngine

    return TorchWorkersEngine(model, options, initial_version=initial_version, width=hosting.width)


ENGINES: dict[str, Callable[[str, Mapping[str, Any], Hosting, int], ShardEngine]] = {"vllm": _vllm, "torch": _torch}
