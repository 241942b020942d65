"""What is looked at after a cell's refits: the ledger, the processes of the condemned, and every shard that lives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from elastic_refit.core.ids import ShardId
from elastic_refit.core.ledger_state import LedgerState
from elastic_refit.core.ledger_table import ABSENT, SERVING
from elastic_refit.demo.policy import Gap
from elastic_refit.engines.base import Sample, SamplingSpec
from elastic_refit.errors import ShardError
from elastic_refit.matrix.lab import Lab
from elastic_refit.matrix.observation import Observation, Served, ShardView
from elastic_refit.processes import living
from elastic_refit.stacks import stacks_of

__all__ = ["look_at_ledger", "look_at_processes", "look_at_shards"]

_ANSWER_S = 15.0
_PROMPTS = ((5, 17, 200, 3), (99, 250, 1, 64))
_SAMPLING = SamplingSpec(max_tokens=6, seed=7)
_CONDEMNED = "Condemned"


def look_at_ledger(seen: Observation, state: LedgerState, *, epoch: int, began_s: float) -> None:
    """``epoch`` was the highest when the cell began, at ``began_s`` of the wall clock."""
    changes = [change for change in state.history if change.time_s >= began_s]
    condemned = {change.shard for change in changes if change.cause.startswith(_CONDEMNED)}
    seen.epochs_opened = state.refits.epoch - epoch
    seen.shards = {
        index: ShardView(record.id, record.state.name, record.version, record.request_failures)
        for index, record in sorted(state.shards.items())
    }
    seen.condemned = tuple(sorted(condemned))
    seen.left_serving = tuple(
        sorted(
            {
                change.shard
                for change in changes
                if change.before in SERVING and change.after not in SERVING and change.shard not in condemned
            }
        )
    )
    seen.refused = tuple(
        f"{each.event} of {each.subject}: {each.reason}"
        for each in state.rejections
        if each.time_s >= began_s and each.writer == "coordinator"
    )


def look_at_processes(seen: Observation, lab: Lab) -> None:
    condemned = [shard for shard in seen.condemned or () if shard in lab.fleet.processes]
    struck = [fault.victim for fault in seen.planned if isinstance(fault.victim, ShardId)]
    seen.stacks = stacks_of(lab.incidents, struck)
    seen.living = tuple(
        f"pid {process.pid} of {shard}" for shard in condemned for process in living(lab.processes(shard))
    )


def look_at_shards(seen: Observation, lab: Lab) -> None:
    """Have every shard that is not absent sample, and then say what it holds; have the trainers judge the samples.

    In this order: a coordinator that was thawed may just be finishing its refit, and a request waits for that.
    """
    gone = {record.id.index for record in lab.state().shards.values() if record.state in ABSENT}
    there = {shard: handle for shard, handle in lab.fleet.shards.items() if shard.index not in gone}
    sampling = {shard: handle.generate.remote(_PROMPTS, _SAMPLING) for shard, handle in there.items()}
    if sampling:
        ray.wait(list(sampling.values()), num_returns=len(sampling), timeout=_ANSWER_S)
    holding = {shard: handle.ready.remote() for shard, handle in there.items()}
    samples = {shard: taken for shard, call in sampling.items() if (taken := _samples(call))}
    gaps = _measure(lab, samples)
    found = {}
    for shard, call in holding.items():
        gap = gaps.get(shard)
        labels = {sample.weight_version for sample in samples.get(shard, ())}
        if len(labels) > 1:
            raise ShardError(f"{shard} labels the samples of one call {sorted(labels)}")
        try:
            holds = ray.get(call, timeout=_ANSWER_S)
        except RayActorError:
            continue
        found[shard] = Served(
            holds=holds,
            label=labels.pop() if labels else None,
            gap=None if gap is None else gap.current,
            gap_previous=None if gap is None else gap.previous,
        )
    seen.served = found


def _samples(call: ray.ObjectRef) -> Sequence[Sample]:
    """What came by now: nothing from a shard that refuses, as it holds no whole version, that has died, or that waits.

    A request waits as long as a refit is open; after a run that ended without its coordinator one is.
    """
    try:
        samples: list[Sample] = ray.get(call, timeout=0)
    except RayTaskError as error:
        if isinstance(error.cause, ShardError):
            return ()
        raise
    except (RayActorError, GetTimeoutError):
        return ()
    return samples


def _measure(lab: Lab, samples: Mapping[ShardId, Sequence[Sample]]) -> dict[ShardId, Gap]:
    """By any trainer that is left: each holds the weights of every version."""
    named = {str(shard): taken for shard, taken in samples.items()}
    for handle in lab.fleet.trainers.values() if named else ():
        try:
            gaps = ray.get(handle.measure.remote(named), timeout=_ANSWER_S)
            return {shard: gaps[str(shard)] for shard in samples}
        except (RayActorError, GetTimeoutError):
            continue
    return {}
