"""The lab's trainer: weights that are others in every version, and the judge of what a shard samples from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from elastic_refit.actors.setup import ParticipantSetup
from elastic_refit.actors.trainer import TrainerActor
from elastic_refit.demo.policy import Gap, gap_of
from elastic_refit.engines.base import Sample
from elastic_refit.engines.plain_lm import load_plain_lm
from elastic_refit.matrix.gathering import Exchange, GatheredWeights
from elastic_refit.transports.base import HeldWeights, WeightSource

__all__ = ["LabTrainer"]


class LabTrainer(TrainerActor):
    """Every rank makes the same weights of a version, and pushes them whole; with a ``secret``, its part of them."""

    def __init__(self, setup: ParticipantSetup, *, model: str, secret: bytes | None = None) -> None:
        super().__init__(setup)
        self._exchange: Exchange | None = None
        if secret is not None:
            self._exchange = Exchange(setup.member.index, secret=secret, patience_s=setup.deadlines.hard_s)
        torch.set_num_threads(1)
        self._model = load_plain_lm(model)
        self._first = {name: value.clone() for name, value in self._model.state_dict().items()}
        self._version = 0

    def weight_source(self) -> WeightSource:
        whole = self._model.state_dict()
        if self._exchange is None:
            return HeldWeights(whole)
        return GatheredWeights(self._exchange, self._version, whole)

    def gathers_at(self) -> tuple[str, int]:
        """Where this rank gives its parts to the others; asked of trainers that have a secret."""
        assert self._exchange is not None, "it holds its weights whole"
        return self._exchange.address

    def meet(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Link up with every rank, at these addresses in their order."""
        assert self._exchange is not None, "it holds its weights whole"
        self._exchange.meet(addresses)

    def advance(self, version: int) -> None:
        """Have the weights of ``version`` from now on."""
        self._model.load_state_dict(self._weights(version))
        self._version = version

    def measure(self, samples: Mapping[str, Sequence[Sample]]) -> dict[str, Gap]:
        """How far each shard's log-probabilities are from the present version's, and from those of the one before."""
        with torch.no_grad():
            current = {shard: gap_of(self._model, given) for shard, given in samples.items()}
            self._model.load_state_dict(self._weights(self._version - 1))
            previous = {shard: gap_of(self._model, given) for shard, given in samples.items()}
            self._model.load_state_dict(self._weights(self._version))
        return {shard: Gap(current[shard], previous[shard]) for shard in samples}

    def _weights(self, version: int) -> dict[str, torch.Tensor]:
        dice = torch.Generator().manual_seed(version)
        return {
            name: value + 0.05 * torch.randn(value.shape, generator=dice) if version else value
            for name, value in self._first.items()
        }
