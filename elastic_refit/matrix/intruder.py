"""A condemned process that could not be killed, when it wakes: it must neither join nor serve, nor disturb anybody."""

from __future__ import annotations

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from elastic_refit.actors.sabotage import thaw
from elastic_refit.core.ids import ShardId
from elastic_refit.core.membership import plan_membership
from elastic_refit.core.messages import Done, JoinOrder
from elastic_refit.engines.base import SamplingSpec
from elastic_refit.errors import ElasticRefitError
from elastic_refit.matrix.lab import Lab

__all__ = ["wake_the_condemned"]

_ANSWER_S = 15.0
_STOLEN = b"a secret of another epoch".ljust(32)


def wake_the_condemned(lab: Lab, condemned: tuple[ShardId, ...]) -> tuple[str, ...]:
    """Let them go on, and try: what any of them could still do, one sentence each. Pushes one more version."""
    handles = {shard: lab.fleet.shards[shard] for shard in condemned}
    if not thaw(lab.processes(*condemned)):
        return ("nobody was left to wake: the kill was not withheld",)
    done = [
        what for shard, handle in handles.items() for what in (*_serves(shard, handle), *_joins(lab, shard, handle))
    ]
    try:
        report = lab.refit()
    except ElasticRefitError as error:
        return (*done, f"the next refit ended: {error}")
    done += [f"{shard} takes part in the next refit" for shard in condemned if str(shard) in report.participants]
    if report.incident is not None:
        done.append(f"the next refit was disturbed: {report.incident.sentence}")
    done += [f"{shard} serves by the ledger" for shard in condemned if shard in lab.fleet.serving()]
    return (*done, *(what for shard, handle in handles.items() for what in _serves(shard, handle)))


def _serves(shard: ShardId, handle: ActorHandle) -> tuple[str, ...]:
    """A shard whose update was broken off holds no whole version, and says so."""
    try:
        ray.get(handle.generate.remote([(1, 2, 3)], SamplingSpec(max_tokens=1)), timeout=_ANSWER_S)
    except (RayTaskError, RayActorError, GetTimeoutError):
        return ()
    return (f"{shard} gave samples after it was condemned",)


def _joins(lab: Lab, shard: ShardId, handle: ActorHandle) -> tuple[str, ...]:
    """Told to join the epoch that goes on without it, as somebody who does not know its secret could tell it."""
    epoch = lab.state().refits.epoch
    widths = lab.shape.widths
    group = plan_membership(lab.shape.trainers, widths, [ShardId(i) for i in range(len(widths))], epoch=epoch)
    order = JoinOrder(epoch, group, ("nowhere",) * group.world_size, lab.version)
    try:
        answer = ray.get(handle.work.remote(order, _STOLEN), timeout=_ANSWER_S)
    except (RayTaskError, RayActorError, GetTimeoutError):
        return ()
    return (f"{shard} joined epoch {epoch} after it was condemned",) if isinstance(answer, Done) else ()
