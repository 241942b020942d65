"""How a coordinator follows one that died: what that one had open is broken off and closed by who took part in it.

What must never happen here: a refit left open that nobody carries on, or a member left waiting in it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from elastic_refit.actors.ledger_client import LedgerClient
from elastic_refit.control.host import ControlHost
from elastic_refit.core.ids import Member, ShardId
from elastic_refit.core.ledger_queries import absent
from elastic_refit.core.messages import Settled, SettleOrder
from elastic_refit.core.refit_closing import closing_events

__all__ = ["close_what_is_open"]

logger = logging.getLogger(__name__)

_WHY = "its coordinator died"


def close_what_is_open(
    ledger: LedgerClient, channel: ControlHost, members: Mapping[Member, ActorHandle], *, settle_s: float
) -> int:
    """Abort every epoch so far, ask every member where it stands, and tell the ledger; returns the last epoch.

    Blocks at most ``settle_s`` and a few calls to the ledger, which may raise.
    """
    state = ledger.state()
    book = state.refits
    if book.epoch:
        channel.order_abort(book.epoch, _WHY)
        order = SettleOrder(book.epoch, book.highest_version or 0, _WHY, roll_back=True)
        settled = _settle(members, order, settle_s)
        if book.open is not None:
            events = closing_events(book.open, settled, absent=absent(state))
            for ack in ledger.record(*events).rejected:
                logger.error("event_rejected", extra={"reason": ack.reason})
    return book.epoch


def _settle(members: Mapping[Member, ActorHandle], order: SettleOrder, settle_s: float) -> dict[ShardId, Settled]:
    """What the shards answer in time; who does not is found by the probe before the next refit."""
    asked = {handle.attend.remote(order): member for member, handle in members.items()}
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=settle_s)
    settled: dict[ShardId, Settled] = {}
    for call in answered:
        member = asked[call]
        with contextlib.suppress(RayError):
            answer = ray.get(call)
            if isinstance(member, ShardId) and isinstance(answer, Settled):
                settled[member] = answer
    return settled
