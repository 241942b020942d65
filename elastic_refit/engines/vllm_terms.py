"""What both vLLM engines have in common on the caller's side: environment, options, requests, samples."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_refit.engines.base import NO_VERSION, Sample, SamplingSpec, request_seed
from elastic_refit.errors import ConfigError, ShardError

__all__ = [
    "KNOWN_VERSIONS",
    "OWNER_VARIABLE",
    "engine_arguments",
    "is_turned_away",
    "prompts_of",
    "require_known",
    "sample_of",
    "sampling_params",
    "vllm_environment",
]

OWNER_VARIABLE = "ELASTIC_REFIT_OWNER"
"""Names the process, by its pid, that vLLM's processes were started for."""
KNOWN_VERSIONS = ("0.32", "0.33")
"""Those whose private parts, as far as :mod:`elastic_refit.engines.vllm_api` uses them, somebody has looked at."""

_EXTENSION = "elastic_refit.engines.vllm_worker.ElasticRefitWorkerExtension"
_OWN_OPTIONS = frozenset({"model", "weight_transfer_config", "worker_extension_cls", "logprobs_mode"})


def vllm_environment(*, is_inline: bool) -> dict[str, str]:
    """The environment that a vLLM engine wants, for an actor's ``runtime_env``; what the user set must win.

    Some of it is read when torch or vLLM is imported: setting it later has no effect.
    """
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if is_inline else "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        # Else several engines on one machine bind themselves to the same core, and several ranks do not start.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def engine_arguments(model: str, options: Mapping[str, Any], *, is_inline: bool) -> dict[str, Any]:
    """vLLM's own arguments: the user's ``options``, and what elastic-refit needs.

    Raises:
        ConfigError: an option is set by elastic-refit itself, or vLLM cannot be imported or is of an unknown version.
    """
    for name, value in vllm_environment(is_inline=is_inline).items():
        os.environ.setdefault(name, value)
    taken = sorted(_OWN_OPTIONS & options.keys())
    if taken:
        raise ConfigError(f"engine options: {taken[0]!r} is set by elastic-refit itself", field=taken[0])
    try:
        import torch
        import vllm

        require_known(vllm.__version__)
        from vllm.config import WeightTransferConfig

        from elastic_refit.engines import vllm_worker
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"vLLM is installed but cannot be imported: {error}") from error
    if os.environ["TORCH_COMPILE_DISABLE"] == "1":
        torch._dynamo.config.disable = True  # torch reads the variable when it is imported, which may be long ago
    own = {
        "model": model,
        "weight_transfer_config": WeightTransferConfig(backend=vllm_worker.BACKEND),
        "worker_extension_cls": _EXTENSION,
        "logprobs_mode": "raw_logprobs",
    }
    return {**options, **own}


def require_known(version: str) -> None:
    """Raises ConfigError if nobody has looked at this version of vLLM."""
    if ".".join(version.split(".")[:2]) not in KNOWN_VERSIONS:
        raise ConfigError(
            f"vLLM {version} is unknown to this version of elastic-refit, which knows {', '.join(KNOWN_VERSIONS)} and "
            "uses parts that may change; install one of these",
            version=version,
        )


def is_turned_away(error: BaseException) -> bool:
    """Whether vLLM refused a request for the time of a pause; only 0.33 has such an error."""
    return type(error).__name__ == "RetryableRequestError"


def prompts_of(prompts: Sequence[Sequence[int]]) -> list[Any]:
    from vllm import TokensPrompt

    return [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]


def sampling_params(sampling: SamplingSpec, index: int) -> Any:
    """Those of prompt number ``index`` of a call."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        seed=request_seed(sampling.seed, index),
        ignore_eos=sampling.ignore_eos,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def sample_of(output: Any) -> Sample:
    """A finished request. Its labels are vLLM's own: spans of tokens, each with the version that made them."""
    completion = output.outputs[0]
    token_ids = tuple(completion.token_ids)
    spans = completion.weight_versions or []
    versions = tuple(int(span.version) for span in spans for _ in range(span.start, span.end))
    if len(versions) != len(token_ids):
        raise ShardError(f"vLLM does not say which weights made each of {len(token_ids)} tokens: {spans}")
    return Sample(
        prompt_ids=tuple(output.prompt_token_ids),
        token_ids=token_ids,
        logprobs=tuple(step[token].logprob for token, step in zip(token_ids, completion.logprobs, strict=True)),
        weight_version=versions[0] if len(set(versions)) == 1 else NO_VERSION,
        token_versions=versions,
    )
