"""vLLM inside the calling process: scheduler, worker and model share it, so a death of one is the death of all.

Weights enter through vLLM's own weight-transfer API (backend ``elastic_refit``), labels come from vLLM's own spans.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from elastic_refit.engines.base import Sample, SamplingSpec, ShardEngine, WeightReceiver, request_seed
from elastic_refit.engines.checkpoint import require_checkpoint
from elastic_refit.engines.gate import GenerationGate
from elastic_refit.errors import ConfigError, ShardError

__all__ = ["VllmEngine", "vllm_environment"]

T = TypeVar("T")

_EXTENSION = "elastic_refit.engines.vllm_worker.ElasticRefitWorkerExtension"
_OWN_OPTIONS = frozenset({"model", "weight_transfer_config", "worker_extension_cls", "logprobs_mode"})


def vllm_environment() -> dict[str, str]:
    """The environment that :class:`VllmEngine` wants, for an actor's ``runtime_env``; what the user set must win.

    Some of it is read when torch or vLLM is imported: setting it later has no effect.
    """
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


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
        self._llm.collective_rpc("elastic_refit_assume_version", args=(initial_version,))
        self._label(initial_version)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingSpec) -> list[Sample]:
        with self._gate.generating():
            return [_sample(output) for output in self._complete(prompts, sampling)]

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
        from vllm import TokensPrompt
        from vllm.exceptions import VLLMClientError

        try:
            requests = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
            params = [_sampling_params(sampling, index) for index in range(len(requests))]
            outputs: list[Any] = self._llm.generate(requests, params, use_tqdm=False)
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


def _load(model: str, options: dict[str, Any]) -> Any:
    for name, value in vllm_environment().items():
        os.environ.setdefault(name, value)
    _refuse(options)
    try:
        import torch
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        from elastic_refit.engines import vllm_worker
    except Exception as error:
        raise ConfigError(f"vLLM is installed but cannot be imported: {error}") from error
    if os.environ["TORCH_COMPILE_DISABLE"] == "1":
        torch._dynamo.config.disable = True  # torch reads the variable when it is imported, which may be long ago
    return LLM(
        model=model,
        weight_transfer_config=WeightTransferConfig(backend=vllm_worker.BACKEND),
        worker_extension_cls=_EXTENSION,
        logprobs_mode="raw_logprobs",
        **{"use_tqdm_on_load": False, **options},
    )


def _refuse(options: Mapping[str, Any]) -> None:
    taken = sorted(_OWN_OPTIONS & options.keys())
    if taken:
        raise ConfigError(f"engine options: {taken[0]!r} is set by elastic-refit itself", field=taken[0])
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if options.get(name, 1) != 1:
            raise ConfigError(f"engine options: {name} must be 1 for an engine inside one process", field=name)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise ConfigError("VLLM_ENABLE_V1_MULTIPROCESSING must be 0 for an engine inside one process")


def _sampling_params(sampling: SamplingSpec, index: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        seed=request_seed(sampling.seed, index),
        ignore_eos=sampling.ignore_eos,
        logprobs=0,
        detokenize=False,
    )


def _sample(output: Any) -> Sample:
    completion = output.outputs[0]
    spans = completion.weight_versions or []
    if len(spans) != 1:
        raise ShardError(f"one set of weights must make a whole sample; vLLM reports {spans}")
    token_ids = tuple(completion.token_ids)
    return Sample(
        prompt_ids=tuple(output.prompt_token_ids),
        token_ids=token_ids,
        logprobs=tuple(step[token].logprob for token, step in zip(token_ids, completion.logprobs, strict=True)),
        weight_version=int(spans[0].version),
    )
