"""A sampler in plain torch and transformers behind the engine protocol: for tests, and for machines without vLLM.

Weights are applied in place, tensor by tensor, as they are fed; a half-fed update leaves a mixture, and the engine's
label says so.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from elastic_refit.engines.base import Sample, SamplingSpec, ShardEngine, WeightReceiver, request_seed
from elastic_refit.engines.checkpoint import require_checkpoint
from elastic_refit.engines.gate import GenerationGate
from elastic_refit.engines.plain_lm import PlainLM, load_plain_lm
from elastic_refit.engines.update import UpdateLedger
from elastic_refit.errors import ConfigError, PlanMismatch, ShardError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from elastic_refit.core.manifest import Manifest

__all__ = ["TorchEngine", "TorchReceiver", "load_causal_lm"]

T = TypeVar("T")


def load_causal_lm(directory: str | Path, *, dtype: str = "float32") -> PreTrainedModel:
    """A local checkpoint on CPU with eager attention and dropout off.

    Raises:
        ConfigError: there is no checkpoint in ``directory``, or torch has no such ``dtype``.
    """
    path = require_checkpoint(directory)
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise ConfigError(f"dtype: torch has no {dtype!r}", field="dtype")
    from transformers import AutoModelForCausalLM

    with _no_progress_bar():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch_dtype, attn_implementation="eager", local_files_only=True
        )
    return model.eval()


class TorchReceiver(WeightReceiver):
    """Copies what is fed into the model's own parameters."""

    def __init__(self, model: torch.nn.Module, initial_version: int, rank: int = 0) -> None:
        self.rank = rank
        self.update = UpdateLedger(initial_version)
        self._targets: dict[str, torch.Tensor] = model.state_dict()

    def begin(self, manifest: Manifest) -> None:
        self._require_whole_model(manifest)
        self.update.open(manifest)

    def feed(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        with self.update.taking(name for name, _ in tensors):
            for name, tensor in tensors:
                self._targets[name].copy_(tensor)

    def finish(self, version: int) -> None:
        self.update.require_complete()
        self.update.close()
        self.update.version = version

    def rollback(self) -> None:
        self.update.close()

    def _require_whole_model(self, manifest: Manifest) -> None:
        wrong = [
            spec.name
            for spec in manifest.tensors
            if spec.name not in self._targets or tuple(self._targets[spec.name].shape) != spec.shape
        ]
        # Tied parameters have several names and one memory: any of the names will do.
        covered = {self._targets[spec.name].data_ptr() for spec in manifest.tensors if spec.name in self._targets}
        wrong += [name for name, target in self._targets.items() if target.data_ptr() not in covered]
        if wrong:
            raise PlanMismatch(f"the manifest does not fit the model at {wrong[0]}", tensors=tuple(wrong))


class TorchEngine(ShardEngine):
    """One model in the calling process.

    ``options``: ``dtype`` (a torch dtype's name, default float32); ``plain: true`` for a small Llama in float32, which
    then loads without transformers.
    """

    def __init__(
        self, model: str, options: Mapping[str, Any] | None = None, *, initial_version: int = 0, rank: int = 0
    ) -> None:
        given = dict(options or {})
        unknown = set(given) - {"dtype", "plain"}
        if unknown or ("dtype" in given and given.get("plain")):
            wrong = sorted(unknown)[0] if unknown else "dtype beside plain"
            raise ConfigError(f"engine options: the torch engine has no {wrong!r}; it knows dtype, or plain")
        is_plain = given.pop("plain", False)
        self._model: PlainLM | PreTrainedModel = load_plain_lm(model) if is_plain else load_causal_lm(model, **given)
        self._receiver = TorchReceiver(self._model, initial_version, rank)
        self._gate = GenerationGate()
        self._worker = threading.Lock()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingSpec) -> list[Sample]:
        if not all(prompts):
            raise ValueError("a prompt holds no token")
        with self._gate.generating():
            return self._generate([tuple(prompt) for prompt in prompts], sampling)

    def pause(self) -> None:
        self._gate.pause()

    def resume(self) -> None:
        if self._receiver.update.is_open:
            raise ShardError("cannot resume: a weight update is open; finish it or roll it back first")
        self._gate.resume()

    def in_workers(self, function: Callable[[WeightReceiver], T]) -> list[T]:
        with self._worker:
            return [function(self._receiver)]

    def pids(self) -> tuple[int, ...]:
        return (os.getpid(),)

    def close(self) -> None:
        self._gate.close()

    def _generate(self, prompts: list[tuple[int, ...]], sampling: SamplingSpec) -> list[Sample]:
        """Prompts of one length form a batch, so that nothing is padded."""
        batches: dict[int, list[int]] = defaultdict(list)
        for index, prompt in enumerate(prompts):
            batches[len(prompt)].append(index)
        samples: dict[int, Sample] = {}
        for indices in batches.values():
            generators = [_generator(request_seed(sampling.seed, index)) for index in indices]
            token_ids, logprobs = self._sample([prompts[index] for index in indices], sampling, generators)
            for row, index in enumerate(indices):
                length, version = self._length(token_ids[row], sampling), self._receiver.update.version
                samples[index] = Sample(
                    prompt_ids=prompts[index],
                    token_ids=tuple(token_ids[row][:length]),
                    logprobs=tuple(logprobs[row][:length]),
                    weight_version=version,
                    token_versions=(version,) * length,
                )
        return [samples[index] for index in range(len(prompts))]

    @torch.inference_mode()
    def _sample(
        self, prompts: list[tuple[int, ...]], sampling: SamplingSpec, generators: list[torch.Generator]
    ) -> tuple[list[list[int]], list[list[float]]]:
        token_ids, logprobs, cache = [], [], None
        inputs = torch.tensor(prompts)
        for _ in range(sampling.max_tokens):
            output = self._model(input_ids=inputs, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            policy = torch.log_softmax(output.logits[:, -1].float(), dim=-1)
            inputs = _choose(policy, sampling.temperature, generators)
            token_ids.append(inputs)
            logprobs.append(policy.gather(-1, inputs))
        return torch.cat(token_ids, dim=-1).tolist(), torch.cat(logprobs, dim=-1).tolist()

    def _length(self, token_ids: list[int], sampling: SamplingSpec) -> int:
        """How many tokens the sample has: up to and with the first end token, unless those are ignored."""
        config = self._model.generation_config
        eos = config.eos_token_id if config is not None else None
        ends = set(eos) if isinstance(eos, list) else {eos}
        if sampling.ignore_eos:
            ends = set()
        return next((count for count, token in enumerate(token_ids, 1) if token in ends), len(token_ids))


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing on the terminal, and leave its setting as it was."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _generator(seed: int | None) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def _choose(policy: torch.Tensor, temperature: float, generators: list[torch.Generator]) -> torch.Tensor:
    """One token id per row, shape ``(rows, 1)``; a row's choice depends on its own generator alone."""
    if temperature == 0:
        return policy.argmax(dim=-1, keepdim=True)
    probabilities = torch.softmax(policy / temperature, dim=-1)
    rows = zip(probabilities, generators, strict=True)
    return torch.stack([torch.multinomial(row, 1, generator=generator) for row, generator in rows])
