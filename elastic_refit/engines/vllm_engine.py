"""vLLM inside the calling process: scheduler, worker and model share it, so a death of one is the death of all.

Weights enter through vLLM's own weight-transfer API (backend ``elastic_refit``), labels come from vLLM's own spans.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from elastic_refit.engines.base import Sample, SamplingSpec, ShardEngine, WeightReceiver
from elastic_refit.engines.checkpoint import require_checkpoint
from elastic_refit.engines.gate import GenerationGate
from elastic_refit.engines.vllm_terms import engine_arguments, prompts_of, sample_of, sampling_params
from elastic_refit.errors import ConfigError, ShardError

__all__ = ["VllmEngine"]

T = TypeVar("T")

_MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"


class VllmEngine(ShardEngine):
    """One vLLM engine in the calling process, of one rank. ``options`` are ``vllm.LLM``'s own argument names.

    Generations are serialised: vLLM batches the prompts of one call. Loading takes seconds to minutes.
    """

    def __init__(self, model: str, options: Mapping[str, Any] | None = None, *, initial_version: int = 0) -> None:
        """Raises ConfigError: no model, an option that cannot be used here, or a vLLM that cannot be imported."""
        self._gate = GenerationGate()
        self._llm = _load(str(require_checkpoint(model)), dict(options or {}))
        self._worker = threading.Lock()
        self._update_open = False
        from elastic_refit.engines.vllm_worker import assume_version

        self.in_worker(partial(assume_version, initial_version))

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingSpec) -> list[Sample]:
        with self._gate.generating():
            return [sample_of(output) for output in self._complete(prompts, sampling)]

    def pause(self) -> None:
        self._gate.pause()

    def resume(self) -> None:
        if not self._gate.is_paused:
            return
        if self._update_open:
            raise ShardError("cannot resume: a weight update is open; finish it or roll it back first")
        if not self._llm.reset_prefix_cache():
            raise ShardError("vLLM kept its prefix cache, whose entries were made by older weights")
        self._gate.resume()

    def in_workers(self, function: Callable[[WeightReceiver], T]) -> list[T]:
        # Without the lock a slower thread could note the state before a rollback as the one after it.
        with self._worker:
            (outcome,) = self._llm.collective_rpc("elastic_refit_call", args=(function,))
            self._update_open = outcome.update_open
            self._label(outcome.version)
        if outcome.error is not None:
            raise outcome.error
        value: T = outcome.value
        return [value]

    def pids(self) -> tuple[int, ...]:
        return (os.getpid(),)

    def close(self) -> None:
        self._gate.close()
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            gc.collect()

    def _label(self, version: int) -> None:
        """Nothing is scheduled between the worker's answer and this, so no token gets the label of other weights."""
        self._llm.llm_engine.set_weight_version(str(version))

    def _complete(self, prompts: Sequence[Sequence[int]], sampling: SamplingSpec) -> list[Any]:
        from vllm.exceptions import VLLMClientError

        try:
            params = [sampling_params(sampling, index) for index in range(len(prompts))]
            outputs: list[Any] = self._llm.generate(prompts_of(prompts), params, use_tqdm=False)
        except VLLMClientError as error:
            self._abort_leftovers()
            raise ValueError(str(error)) from error
        except BaseException:
            self._abort_leftovers()
            raise
        return outputs

    def _abort_leftovers(self) -> None:
        """A generation that raised leaves its requests in the scheduler, and the next one would wait for them."""
        engine = self._llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)


def _load(model: str, options: Mapping[str, Any]) -> Any:
    if os.environ.get(_MULTIPROCESSING, "0") != "0":
        raise ConfigError(f"{_MULTIPROCESSING} must be 0 for an engine inside one process")
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if options.get(name, 1) != 1:
            raise ConfigError(f"engine options: {name} must be 1 for an engine inside one process", field=name)
    arguments = engine_arguments(model, options, is_inline=True)
    from vllm import LLM

    return LLM(**{"use_tqdm_on_load": False, **arguments})
