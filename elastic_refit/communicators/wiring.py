"""How one communicator comes by its links: it dials the peers it sends to, and claims the links that peers opened."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from elastic_refit.communicators.addresses import Address
from elastic_refit.communicators.base import GroupSpec
from elastic_refit.communicators.dialling import DialTimeout, NobodyListens, dial
from elastic_refit.communicators.exchange import Lane
from elastic_refit.communicators.handshake import HandshakeRefused, Hello
from elastic_refit.communicators.lifeline import Lifeline
from elastic_refit.communicators.links import Link, LinkEnded, first_hung_up
from elastic_refit.communicators.switchboard import Switchboard
from elastic_refit.communicators.tap import Tap
from elastic_refit.errors import PeerLost, RendezvousFailed

__all__ = ["Wiring"]


class Wiring:
    """The links of one channel of ``group``. For the communicator's thread; peers are ranks of the epoch's group."""

    def __init__(
        self,
        group: GroupSpec,
        switchboard: Switchboard,
        *,
        patience_s: float,
        channel: str = "",
        tap: Tap | None = None,
    ) -> None:
        self.group = group
        self.patience_s = patience_s
        self.tap = tap
        self.life = Lifeline(f"rank {group.rank} of epoch {group.epoch}" + (channel and f", part {channel}"))
        self._switchboard = switchboard
        self._channel = channel
        switchboard.subscribe(channel, self.life.bell.ring)
        if tap is not None:
            tap.follow(group, self.life)

    def branch(self, name: str) -> Wiring:
        """The links of a part of this channel's group."""
        channel = f"{self._channel}/{name}"
        return Wiring(self.group, self._switchboard, patience_s=self.patience_s, channel=channel, tap=self.tap)

    def turn_away(self) -> None:
        """Drop what peers have opened on this channel and nobody has claimed. Any thread."""
        self._switchboard.unsubscribe(self._channel)

    def hang_up(self) -> None:
        """Admit nobody any more; the group's own channel closes the door for all of them. Any thread."""
        self.turn_away()
        if not self._channel:
            self._switchboard.stop()

    def find(self, lane: Lane) -> Link | None:
        """The link of ``lane`` if it is there; never waits."""
        self.life.check()
        link = self.life.find(lane)
        if link is None and not lane.is_send:
            sock = self._switchboard.claim(self._channel, lane.peer)
            link = None if sock is None else self.life.adopt(lane, sock)
        return link

    def open(self, lanes: Iterable[Lane], deadline: float, *, guards: Sequence[Link] = ()) -> None:
        """Return when every lane has its link. Who hangs up on a guard will not open one any more.

        Raises:
            RendezvousFailed: some did not come in time, or refused us; ``missing`` has their ranks.
            PeerLost: one is gone.
            LinkEnded: one of ``guards`` has.
        """
        missing = [lane.peer for lane in lanes if not self._opened(lane, deadline, guards)]
        if missing:
            ranks = tuple(dict.fromkeys(missing))
            names = ", ".join(map(self._name, ranks))
            raise RendezvousFailed(
                f"{self._name(self.group.rank)} waited {self.patience_s:.1f} s in vain for {names}",
                epoch=self.group.epoch,
                missing=ranks,
            )

    def _opened(self, lane: Lane, deadline: float, guards: Sequence[Link]) -> bool:
        if lane.is_send:
            return self.find(lane) is not None or self._dialled(lane, deadline)
        while self.find(lane) is None:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            if lost := first_hung_up(guards, self.life.bell, remaining_s):
                raise LinkEnded(lost.peer, "hung up")
        return True

    def _dialled(self, lane: Lane, deadline: float) -> bool:
        self._refuse_foreign_loopback(lane.peer)
        hello = Hello(self.group.rank, lane.peer, self._channel)
        try:
            sock = dial(self.group, hello, deadline=deadline, bell=self.life.bell, check=self.life.check)
        except DialTimeout:
            return False
        except NobodyListens as gone:
            raise PeerLost(f"{self._name(lane.peer)} listens no more: {gone}", peer=lane.peer) from gone
        except HandshakeRefused as refused:
            raise RendezvousFailed(
                f"{self._name(self.group.rank)} was refused: {refused}", epoch=self.group.epoch, missing=(lane.peer,)
            ) from refused
        self.life.adopt(lane, sock)
        if self.tap is not None:
            self.tap.dialled()
        return True

    def _refuse_foreign_loopback(self, peer: int) -> None:
        address = Address.parse(self.group.addresses[peer])
        if address.is_loopback() and not Address.parse(self.group.addresses[self.group.rank]).shares_host(address):
            raise RendezvousFailed(
                f"{self._name(peer)} listens on another host's loopback; give its TcpBackend the host to listen on",
                epoch=self.group.epoch,
                missing=(peer,),
            )

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self.group.identities[rank]}) of epoch {self.group.epoch}"
