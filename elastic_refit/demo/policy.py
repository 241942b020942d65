"""The demo's trainer: a tiny causal LM, REINFORCE with a baseline, Adam; data-parallel over the ranks.

Each rank computes the gradient of its share of the samples; the driver averages and every rank applies the same
mean, so that all ranks hold the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import xxhash
from torch import nn

from elastic_refit.actors.setup import ParticipantSetup
from elastic_refit.actors.trainer import TrainerActor
from elastic_refit.demo.tiny_model import load_trainer_model
from elastic_refit.engines.base import Sample
from elastic_refit.transports.base import HeldWeights, WeightSource

__all__ = ["Gap", "PolicyTrainer", "gap_of"]


@dataclass(frozen=True, slots=True)
class Gap:
    """Largest absolute difference of log-probabilities (natural log, float32) over the sampled tokens."""

    current: float
    """Against the weights that the sampler should hold."""
    previous: float | None
    """Against the version before: the control that must fail. None before there is one."""


class PolicyTrainer(TrainerActor):
    """One data-parallel rank. Call ``gradient`` on each rank's share, then ``step`` with the mean on every rank."""

    def __init__(self, setup: ParticipantSetup, *, model: str, learning_rate: float) -> None:
        super().__init__(setup)
        torch.set_num_threads(1)
        self._model = load_trainer_model(model)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=learning_rate)
        self._previous: dict[str, torch.Tensor] | None = None

    def weight_source(self) -> WeightSource:
        return HeldWeights({name: parameter.detach() for name, parameter in self._model.named_parameters()})

    def measure(self, samples: Sequence[Sample]) -> Gap:
        """How far the sampler's log-probabilities are from this trainer's, and from those of the version before."""
        with torch.no_grad():
            current = gap_of(self._model, samples)
            if self._previous is None:
                return Gap(current, None)
            with self._as_before():
                return Gap(current, gap_of(self._model, samples))

    def gradient(self, samples: Sequence[Sample], advantages: Sequence[Sequence[float]]) -> list[torch.Tensor]:
        """The policy gradient, per parameter, summed over the tokens of ``samples``; one advantage per token."""
        self._optimizer.zero_grad()
        logprobs = _logprobs(self._model, samples)
        weights = torch.tensor(advantages, dtype=torch.float32)
        torch.autograd.backward(-(weights * logprobs).sum())
        return [_gradient_of(parameter) for parameter in self._model.parameters()]

    def step(self, gradients: Sequence[torch.Tensor]) -> int:
        """Apply ``gradients``; returns a digest of all weights, equal on ranks that agree."""
        self._previous = {name: value.detach().clone() for name, value in self._model.state_dict().items()}
        for parameter, gradient in zip(self._model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        self._optimizer.step()
        digest = xxhash.xxh3_64()
        for parameter in self._model.parameters():
            digest.update(memoryview(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy()))
        return digest.intdigest()

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        assert self._previous is not None
        now = {name: value.detach().clone() for name, value in self._model.state_dict().items()}
        self._model.load_state_dict(self._previous)
        try:
            yield
        finally:
            self._model.load_state_dict(now)


def _gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()


def _logprobs(model: nn.Module, samples: Sequence[Sample]) -> torch.Tensor:
    """Log-probabilities of the sampled tokens, [samples, tokens]; prompts, and completions, are of equal lengths."""
    prompt = len(samples[0].prompt_ids)
    ids = torch.tensor([[*sample.prompt_ids, *sample.token_ids] for sample in samples])
    logits = model(input_ids=ids).logits[:, prompt - 1 : -1].float()
    chosen = ids[:, prompt:].unsqueeze(-1)
    return torch.log_softmax(logits, dim=-1).gather(-1, chosen).squeeze(-1)


def gap_of(model: nn.Module, samples: Sequence[Sample]) -> float:
    """The largest difference between the samples' log-probabilities and those of ``model``."""
    theirs = torch.tensor([sample.logprobs for sample in samples], dtype=torch.float32)
    return float((_logprobs(model, samples) - theirs).abs().max())
