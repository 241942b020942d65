"""The demo's loop: sample from the fleet, score, one policy-gradient step on the trainers, refit, and again.

Each refit is followed by samples of the version it pushed. Their log-probabilities are compared with the trainer's:
that is the proof that the right weights arrived, and the same comparison with the version before is its control.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError

from elastic_refit.actors.fleet import Fleet
from elastic_refit.actors.reports import RefitReport
from elastic_refit.chaos import Fault
from elastic_refit.core.messages import PingOrder
from elastic_refit.demo.config import DemoConfig
from elastic_refit.demo.display import Display
from elastic_refit.demo.policy import Gap, PolicyTrainer
from elastic_refit.demo.result import DemoResult, StepRow, broken_promises
from elastic_refit.demo.rollout import Rollout
from elastic_refit.engines.base import Sample, SamplingSpec
from elastic_refit.errors import ElasticRefitError, ShardError, TrainerLost

__all__ = ["Loop", "reward_of", "token_reward"]

_TRAIN_S = 120.0
_BYTES = 256


def token_reward(token: int) -> float:
    """The verifiable reward of one token: whether its id is even."""
    return 1.0 if token % 2 == 0 else 0.0


def reward_of(sample: Sample) -> float:
    """Mean reward of the answer's tokens, in [0, 1]."""
    return sum(map(token_reward, sample.token_ids)) / len(sample.token_ids)


@dataclass(slots=True)
class Loop:
    """One run of the demo over a fleet that is loaded. ``num_buckets`` is for the progress bar."""

    config: DemoConfig
    display: Display
    faults: Sequence[Fault]
    num_buckets: int

    def run(self, model: str, folder: Path) -> DemoResult:
        """Run every step; what ends the run early is in the result, never raised, unless it is no error of ours."""
        result = DemoResult()
        loop = self.config.demo
        fleet = Fleet(
            self.config,
            trainer_class=PolicyTrainer,
            trainer_arguments={"model": model, "learning_rate": loop.learning_rate},
            model=model,
            folder=folder,
            faults=self.faults,
        )
        try:
            self._load(fleet)
            self._steps(fleet, result)
            result.broken = broken_promises(result, self.faults, [record.fault for record in fleet.chaos.records()])
        except ElasticRefitError as error:
            result.error = f"{type(error).__name__}: {error}"
            incident = error.fields.get("incident")
            if incident is not None:
                result.incidents.append(incident)
        finally:
            fleet.close()
        return result

    def _load(self, fleet: Fleet) -> None:
        loaded = 0
        what = f"loading {len(fleet.trainers)} trainers, {len(fleet.shards)} engines"
        self.display.begin(what, len(fleet.members))

        def on_ready(member: object) -> None:
            nonlocal loaded
            loaded += 1
            self.display.advance_to(what, loaded)

        fleet.wait_until_loaded(timeout_s=self.config.demo.load_timeout_s, on_ready=on_ready)
        self.display.end(what)

    def _steps(self, fleet: Fleet, result: DemoResult) -> None:
        samples, result.bring_up = self._push_and_sample(fleet, 0, result)
        self.display.begin("steps", self.config.demo.steps)
        for step in range(1, self.config.demo.steps + 1):
            self._train(fleet, samples)
            samples, row = self._push_and_sample(fleet, step, result)
            result.steps.append(row)
            self.display.row(row)
            self.display.advance_to("steps", step)
        self.display.end("steps")

    def _push_and_sample(self, fleet: Fleet, version: int, result: DemoResult) -> tuple[list[Sample], StepRow]:
        self._strike_idle(fleet, version)
        report = self._refit(fleet, version)
        if report.incident is not None:
            result.incidents.append(report.incident)
            self.display.incident(report.incident)
        loop = self.config.demo
        sampling = SamplingSpec(max_tokens=loop.max_tokens, seed=loop.seed + version)
        samples = Rollout(fleet).sample(self._prompts(), sampling)
        mislabelled = {sample.weight_version for sample in samples} - {version}
        if mislabelled:
            raise ShardError(f"samples of version {version} are labelled {sorted(mislabelled)}")
        gap = self._measure(fleet, samples)
        rewards = [reward_of(sample) for sample in samples]
        return samples, _row(version, report, gap, sum(rewards) / len(rewards))

    def _refit(self, fleet: Fleet, version: int) -> RefitReport:
        what = f"refit v{version}"
        self.display.begin(what, self.num_buckets)
        root = next(iter(fleet.trainers.values()))

        def look() -> None:
            try:
                beacon = ray.get(root.attend.remote(PingOrder(-1)), timeout=1).beacon
            except (GetTimeoutError, RayActorError):
                return  # the refit itself says what became of the trainer
            self.display.advance_to(what, beacon.completed + 1)

        try:
            return fleet.refit(version, while_waiting=look if self.display.is_live else None)
        finally:
            self.display.end(what)

    def _strike_idle(self, fleet: Fleet, version: int) -> None:
        for fault in self.faults:
            if fault.phase == "idle" and fault.version == version:
                ray.wait([fleet.members[fault.striker].idle.remote(version)], timeout=5)

    def _prompts(self) -> list[tuple[int, ...]]:
        """Every prompt of the run, once for each of its samples."""
        loop = self.config.demo
        dice = random.Random(loop.seed)
        prompts = [tuple(dice.randrange(_BYTES) for _ in range(loop.prompt_tokens)) for _ in range(loop.num_prompts)]
        return [prompt for prompt in prompts for _ in range(loop.samples_per_prompt)]

    def _train(self, fleet: Fleet, samples: Sequence[Sample]) -> None:
        """One step: every rank its share, the mean to all of them."""
        baseline = sum(map(reward_of, samples)) / len(samples)
        advantages = [[token_reward(token) - baseline for token in sample.token_ids] for sample in samples]
        ranks = list(fleet.trainers.values())
        shares = [
            handle.gradient.remote(samples[rank :: len(ranks)], advantages[rank :: len(ranks)])
            for rank, handle in enumerate(ranks)
            if samples[rank :: len(ranks)]
        ]
        gradients: list[list[torch.Tensor]] = _answers(shares)
        mean = ray.put([sum(parts[1:], parts[0]) / len(samples) for parts in zip(*gradients, strict=True)])
        digests = set(_answers([handle.step.remote(mean) for handle in ranks]))
        if len(digests) > 1:
            raise TrainerLost("the trainer ranks hold different weights after the same step")

    def _measure(self, fleet: Fleet, samples: Sequence[Sample]) -> Gap:
        """The worst gap that any rank sees on its share."""
        ranks = list(fleet.trainers.values())
        shares = [share for rank in range(len(ranks)) if (share := samples[rank :: len(ranks)])]
        gaps: list[Gap] = _answers([handle.measure.remote(share) for handle, share in zip(ranks, shares, strict=False)])
        previous = [gap.previous for gap in gaps if gap.previous is not None]
        return Gap(max(gap.current for gap in gaps), max(previous) if previous else None)


def _answers(calls: list[ray.ObjectRef]) -> list[Any]:
    """The trainers' answers, of whatever type the method returns."""
    try:
        answers: list[Any] = ray.get(calls, timeout=_TRAIN_S)
        return answers
    except (GetTimeoutError, RayActorError) as error:
        raise TrainerLost(f"a trainer is gone or silent: {type(error).__name__}") from None


def _row(version: int, report: RefitReport, gap: Gap, reward: float) -> StepRow:
    return StepRow(
        step=version,
        version=version,
        world_size=report.world_size,
        participants=report.participants,
        seconds=report.seconds,
        bytes=report.size_bytes,
        logprob_gap=gap.current,
        logprob_gap_previous=gap.previous,
        reward=reward,
        incident=report.incident.id if report.incident is not None else None,
    )
