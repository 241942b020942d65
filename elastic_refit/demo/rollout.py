"""Sampling from the fleet: prompts are dealt to the shards that serve; those of a shard that dies go to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import ray
from ray.exceptions import RayActorError

from elastic_refit.actors.fleet import Fleet
from elastic_refit.core.events import ActorDied
from elastic_refit.core.ids import ShardId
from elastic_refit.engines.base import Sample, SamplingSpec
from elastic_refit.errors import NoSurvivingShards, ShardUnresponsive

__all__ = ["Rollout"]

Prompts = list[tuple[int, ...]]

_SEED_STRIDE = 1_000_003


@dataclass(frozen=True, slots=True)
class Rollout:
    """Samples ``prompts`` from ``fleet``; a shard has ``timeout_s`` for its share."""

    fleet: Fleet
    timeout_s: float = 60.0

    def sample(self, prompts: Prompts, sampling: SamplingSpec) -> list[Sample]:
        """One sample per prompt, in the order of ``prompts``.

        Raises:
            NoSurvivingShards: nobody serves.
            ShardUnresponsive: a shard did not answer in time.
        """
        done: dict[int, Sample] = {}
        while len(done) < len(prompts):
            missing = [number for number in range(len(prompts)) if number not in done]
            serving = self.fleet.serving()
            if not serving:
                raise NoSurvivingShards("no shard serves: there is nobody to sample from")
            shares = {shard: missing[place :: len(serving)] for place, shard in enumerate(serving)}
            done.update(self._ask({shard: share for shard, share in shares.items() if share}, prompts, sampling))
        return [done[number] for number in range(len(prompts))]

    def _ask(self, shares: dict[ShardId, list[int]], prompts: Prompts, sampling: SamplingSpec) -> dict[int, Sample]:
        calls = {
            shard: self.fleet.shards[shard].generate.remote(
                [prompts[number] for number in share], _of_its_own(sampling, shard)
            )
            for shard, share in shares.items()
        }
        done: dict[int, Sample] = {}
        for shard, call in calls.items():
            done.update(zip(shares[shard], self._answer(shard, call), strict=False))
        return done

    def _answer(self, shard: ShardId, call: ray.ObjectRef) -> Sequence[Sample]:
        try:
            samples: list[Sample] = ray.get(call, timeout=self.timeout_s)
        except RayActorError as error:
            self.fleet.ledger.record(ActorDied(shard, f"a generation call failed: {type(error).__name__}"))
            return []
        except ray.exceptions.GetTimeoutError:
            raise ShardUnresponsive(f"{shard} did not answer within {self.timeout_s:g} s", shard=str(shard)) from None
        return samples


def _of_its_own(sampling: SamplingSpec, shard: ShardId) -> SamplingSpec:
    """Shards that are given the same prompt must not give the same answer."""
    return replace(sampling, seed=None if sampling.seed is None else sampling.seed + _SEED_STRIDE * (shard.index + 1))
