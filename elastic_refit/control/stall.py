"""When nobody moves: the coordinator's view of the beacons, in the rounds in which all wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from elastic_refit.control.host import Heard
from elastic_refit.core.evidence import Beacon
from elastic_refit.core.ids import Member
from elastic_refit.core.refit_state import Running
from elastic_refit.core.refit_turn import WATCHED
from elastic_refit.ranks import furthest_behind, member_of

__all__ = ["StallWatch"]


class StallWatch:
    """Tells when ``stall_s`` will have passed since the last move of anybody, by what is ``heard``.

    ``now`` is seconds of the clock by which the beacons were heard. A stall that was looked into is one again only
    ``stall_s`` after the look.
    """

    def __init__(self, heard: Callable[[], Mapping[str, Heard]], stall_s: float) -> None:
        self._heard = heard
        self._stall_s = stall_s
        self._token: int | None = None
        self._since = 0.0

    def follow(self, running: Running | None, now: float) -> None:
        """Take in where the refit is after a step of the protocol."""
        token = running.round.token if running is not None and running.round.op in WATCHED else None
        if token != self._token:
            self._token, self._since = token, now

    def beacons(self, members: Iterable[Member], now: float) -> dict[Member, tuple[Beacon, float]]:
        """The last beacon of each member that sent one, as if it had not moved since, and the seconds since.

        Of a member of several ranks: that of the one furthest behind, and the seconds since the most silent one's.
        """
        heard: dict[str, list[tuple[Beacon, float]]] = {}
        for name, last in self._heard().items():
            age_s = now - last.at_s
            still = replace(last.beacon, tick_age_s=last.beacon.tick_age_s + age_s)
            heard.setdefault(member_of(name), []).append((still, age_s))
        return {
            member: (furthest_behind([beacon for beacon, _ in ranks]), max(age_s for _, age_s in ranks))
            for member in members
            if (ranks := heard.get(str(member)))
        }

    def due(self, epoch: int) -> tuple[float, int] | None:
        """When it will be a stall unless somebody moves, and the round's token; None if nothing is to be watched."""
        if self._token is None:
            return None
        moved = (each.at_s - each.beacon.tick_age_s for each in self._heard().values() if each.beacon.epoch == epoch)
        return max((self._since, *moved)) + self._stall_s, self._token
