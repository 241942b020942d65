"""A trainer and one engine side by side, as the engine tests need them: step, push, sample, compare."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from elastic_refit.core.manifest import Manifest, build_manifest
from elastic_refit.demo.tiny_model import Family, load_trainer_model, make_tiny_model
from elastic_refit.engines.base import Hosting, Sample, SamplingSpec, ShardEngine, WeightReceiver
from elastic_refit.engines.registry import build_engine
from elastic_refit.transports.base import NamedTensors
from elastic_refit.transports.packing import BucketUnpacker, fresh_buffer, pack_bucket, tensor_specs

if TYPE_CHECKING:
    from transformers import PreTrainedModel
from tests.wide_fleet import WideFleet

__all__ = [
    "BUCKET_BYTES",
    "EXACT",
    "INLINE",
    "PROMPTS",
    "STALE",
    "VLLM_OPTIONS",
    "Lab",
    "begin",
    "carried",
    "feed",
    "finish",
    "logprob_gap",
]

INLINE = Hosting(process="inline")

VLLM_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 128,
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 32,
}
EXACT, STALE = 1e-3, 1e-2
"""Max log-prob gap: below the first is rounding, above the second is other weights."""
PROMPTS: list[list[int]] = [[72, 101, 108], [72, 101, 108], [5, 6], [200, 7, 9], list(range(1, 81)), [250], [9], [77]]
"""One is long enough to leave full blocks in a prefix cache."""
BUCKET_BYTES = 40 * 1024


def begin(manifest: Manifest, receiver: WeightReceiver) -> None:
    receiver.begin(manifest)


def feed(fed: Sequence[NamedTensors], receiver: WeightReceiver) -> None:
    for tensors in fed:
        receiver.feed(tensors)


def finish(version: int, receiver: WeightReceiver) -> None:
    receiver.finish(version)


def rollback(receiver: WeightReceiver) -> None:
    receiver.rollback()


class Lab:
    """One engine, the trainer's model beside it, and the version that the trainer is at."""

    def __init__(
        self,
        directory: Path,
        kind: str,
        family: Family,
        *,
        tie_embeddings: bool = False,
        hosting: Hosting | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        make_tiny_model(directory, family=family, seed=11, tie_embeddings=tie_embeddings)
        self.directory = str(directory)
        self.trainer: PreTrainedModel = load_trainer_model(directory)
        self.previous: PreTrainedModel = self.trainer
        self.version = 0
        self.manifest = build_manifest(tensor_specs(self.trainer.named_parameters()), BUCKET_BYTES)
        options = options or (VLLM_OPTIONS if kind == "vllm" else {})
        self.engine: ShardEngine = build_engine(kind, self.directory, options, hosting=hosting or INLINE)
        self.fleet: WideFleet | None = None
        """Where the engine's workers have taken their seats, once a test needs them to."""
        self._unpacker = BucketUnpacker(self.manifest)

    def step(self) -> None:
        """One real optimizer step on random text; the trainer is one version further."""
        self.previous = copy.deepcopy(self.trainer)
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        text = torch.randint(0, 256, (4, 24), generator=generator)
        optimizer = torch.optim.Adam(self.trainer.parameters(), lr=3e-3)
        self.trainer(input_ids=text, labels=text).loss.backward()
        optimizer.step()

    def open(self, manifest: Manifest | None = None) -> None:
        self.engine.pause()
        self._unpacker = BucketUnpacker(manifest or self.manifest)
        self.engine.in_workers(partial(begin, manifest or self.manifest))

    def feed(self, start: int, stop: int, manifest: Manifest | None = None) -> None:
        """Pack, unpack and feed buckets ``start..stop-1`` of the trainer's weights."""
        weights = {name: parameter.detach() for name, parameter in self.trainer.named_parameters()}
        fed = carried(weights, manifest or self.manifest, self._unpacker, range(start, stop))
        self.engine.in_workers(partial(feed, fed))

    def finish(self) -> None:
        self.engine.in_workers(partial(finish, self.version))

    def rollback(self) -> None:
        self.engine.in_workers(rollback)

    def update(self) -> None:
        """The whole of it: the trainer steps, and the engine gets the new version."""
        self.step()
        self.open()
        self.feed(0, self.manifest.num_buckets)
        self.finish()
        self.engine.resume()

    def sample(self, temperature: float = 1.0, seed: int = 3) -> list[Sample]:
        return self.sample_from(self.engine, temperature, seed)

    def sample_from(self, engine: ShardEngine, temperature: float = 1.0, seed: int = 3) -> list[Sample]:
        return engine.generate(PROMPTS, SamplingSpec(max_tokens=16, temperature=temperature, seed=seed))

    def require_exact(self) -> list[Sample]:
        """The engine has the trainer's weights and says so; the previous version would have been told apart."""
        samples = self.sample()
        assert sum(len(sample.token_ids) for sample in samples) >= 128
        assert {sample.weight_version for sample in samples} == {self.version}
        assert logprob_gap(self.trainer, samples) < EXACT
        if self.version:
            assert logprob_gap(self.previous, samples) > STALE
        return samples

    def cuts(self) -> list[int]:
        """How many buckets to feed before an abort: few, twice up to the middle of a fused q/k/v, all but one."""
        names = [spec.name for spec in self.manifest.tensors]
        last_names = [names[bucket.pieces[-1].tensor] for bucket in self.manifest.buckets]
        inside = [n for n, name in enumerate(last_names, 1) if name.endswith(("q_proj.weight", "k_proj.weight"))]
        assert inside, "no bucket ends inside a fused q/k/v: change the bucket size"
        early = 1 + next(n for n, bucket in enumerate(self.manifest.buckets) if bucket.pieces[-1].tensor > 0)
        return [early, inside[0], inside[-1], self.manifest.num_buckets - 1]


def carried(
    weights: Mapping[str, torch.Tensor], manifest: Manifest, unpacker: BucketUnpacker, buckets: Iterable[int]
) -> list[NamedTensors]:
    """What each of these buckets completes, after the way through bytes."""
    fed: list[NamedTensors] = []
    for index in buckets:
        buffer = fresh_buffer(manifest.buckets[index])
        pack_bucket(manifest.buckets[index], manifest, tensors=weights, out=buffer)
        fed.append(unpacker.unpack(index, buffer))
    return fed


def logprob_gap(model: PreTrainedModel, samples: Sequence[Sample]) -> float:
    """The largest difference between the samples' log-probabilities and the model's, over all sampled tokens."""
    return max(_gap(model, sample) for sample in samples)


@torch.no_grad()
def _gap(model: PreTrainedModel, sample: Sample) -> float:
    logits = model(input_ids=torch.tensor([sample.prompt_ids + sample.token_ids])).logits[0].float()
    policy = torch.log_softmax(logits[len(sample.prompt_ids) - 1 : -1], dim=-1)
    expected = policy.gather(-1, torch.tensor(sample.token_ids).unsqueeze(-1)).squeeze(-1)
    return float((expected - torch.tensor(sample.logprobs)).abs().max())
