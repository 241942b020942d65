"""When nobody moves: the coordinator's view of the beacons, in the rounds of an attempt."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from elastic_refit.control.host import Heard
from elastic_refit.core.deadlines import Deadlines
from elastic_refit.core.evidence import Beacon
from elastic_refit.core.ids import Member
from elastic_refit.core.refit_state import Round, Running, StallSeen
from elastic_refit.core.refit_turn import ATTEMPT, IN_STEP
from elastic_refit.ranks import furthest_behind, member_of

__all__ = ["StallWatch"]


class StallWatch:
    """Tells when to look why nobody moves, by what is ``heard``: early, for silence, and again once it is a stall.

    In rounds in which nobody waits for the others, standing still means nothing, and silence is all that is looked for.
    ``now`` is seconds of the clock by which the beacons were heard. ``look_s`` and ``stall_s`` count from the last move
    of anybody, or from the last look that took place at a stall.
    """

    def __init__(self, heard: Callable[[], Mapping[str, Heard]], limits: Deadlines) -> None:
        self._heard = heard
        self._limits = limits
        self._watched: Round | None = None
        self._token = -1
        self._since = 0.0
        self._early_at = -math.inf

    def follow(self, running: Running | None, now: float) -> None:
        """Take in where the refit is after a step of the protocol."""
        self._watched = running.round if running is not None and running.round.op in ATTEMPT else None
        if self._watched is not None and self._watched.token != self._token:
            self._token, self._since = self._watched.token, now

    def due(self, epoch: int) -> float | None:
        """When to look unless somebody moves; None if nothing is to be watched."""
        if self._watched is None:
            return None
        moved = self._moved(epoch)
        return moved + (self._limits.look_s if self._early_at < moved else self._limits.stall_s)

    def look(self, epoch: int, now: float) -> StallSeen:
        """The look that is due."""
        assert self._watched is not None, "nothing is watched"
        is_early = self._early_at < self._moved(epoch)
        if is_early:
            self._early_at = now
        else:
            self._since = now
        return StallSeen(self._token, is_for_silence=is_early or self._watched.op not in IN_STEP)

    def still_s(self, epoch: int, now: float) -> float:
        """For how many seconds nobody has moved, or nothing was to be expected."""
        return now - self._moved(epoch)

    def _moved(self, epoch: int) -> float:
        ticks = (each.at_s - each.beacon.tick_age_s for each in self._heard().values() if each.beacon.epoch == epoch)
        return max((self._since, *ticks))

    def beacons(self, widths: Mapping[Member, int], now: float) -> dict[Member, tuple[Beacon, float]]:
        """The last beacon of each member that sent one, as if it had not moved since, and the seconds since.

        Of a member of several ranks: that of the one furthest behind, and the seconds since the most silent one's. One
        of whose ranks nothing was ever heard has none: the others say nothing of that rank.
        """
        heard: dict[str, list[tuple[Beacon, float]]] = {}
        for name, last in self._heard().items():
            age_s = now - last.at_s
            still = replace(last.beacon, tick_age_s=last.beacon.tick_age_s + age_s)
            heard.setdefault(member_of(name), []).append((still, age_s))
        return {
            member: (furthest_behind([beacon for beacon, _ in ranks]), max(age_s for _, age_s in ranks))
            for member, width in widths.items()
            if len(ranks := heard.get(str(member), [])) == width
        }
