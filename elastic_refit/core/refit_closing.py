"""How a refit ends whose coordinator died: by what its participants say of themselves.

What must never happen here: a refit called landed of which one participant that is left does not hold all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from elastic_refit.core.events import Event, RefitEnded, RefitLanded, ShardCommitted, WeightsPartial
from elastic_refit.core.ids import ShardId
from elastic_refit.core.ledger_state import OpenRefit
from elastic_refit.core.messages import Settled

__all__ = ["closing_events"]


def closing_events(
    refit: OpenRefit, settled: Mapping[ShardId, Settled], *, absent: Collection[ShardId] = ()
) -> tuple[Event, ...]:
    """What to tell the ledger of ``refit``, given what its participants answered when they were told to leave it.

    Nothing is said of who did not answer: its shard serves nothing that is not whole, and the next probe finds it.
    """
    events: list[Event] = []
    for shard in sorted(settled.keys() & refit.participants):
        answer = settled[shard]
        if answer.serving_version == refit.version:
            events.append(ShardCommitted(shard, refit.epoch, refit.version))
        elif (through := answer.mixed_through) is not None:
            events.append(WeightsPartial(shard, refit.epoch, refit.version, through))
    left = refit.participants - frozenset(absent)
    is_whole = bool(left) and all(
        shard in settled and settled[shard].serving_version == refit.version for shard in left
    )
    ending = (
        RefitLanded(refit.epoch, refit.version)
        if is_whole
        else RefitEnded(refit.epoch, refit.version, "its coordinator died")
    )
    return (*events, ending)
