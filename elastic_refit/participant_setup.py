"""What every process that takes part in refits is given, and how it comes to host its part."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from elastic_refit.chaos import FaultRecord, Saboteur
from elastic_refit.communicators.tcp import TcpBackend
from elastic_refit.control.setup import EndSetup
from elastic_refit.core.deadlines import Deadlines
from elastic_refit.core.ids import Member
from elastic_refit.participant import RefitParticipant
from elastic_refit.processes import identify
from elastic_refit.transports.base import Packing
from elastic_refit.transports.registry import build_transport

__all__ = ["Keep", "RankSetup"]

Keep = Callable[[FaultRecord], None]
"""Has the record of a fault kept before it strikes; see :class:`Saboteur`."""


_CHUNK_BYTES = 1 << 20
_CHUNKS_PER_BUCKET = 4
"""At least: a chunk is what is forwarded while the next one arrives, and a sign of progress."""


@dataclass(frozen=True, slots=True)
class RankSetup:
    """``control`` has an end of the channel for each of the member's ranks.

    ``host`` is the interface that the communicator listens on; None: loopback, for a fleet on one node.
    ``stacks_folder`` is where each process leaves its stacks when it has to, on its own node.
    """

    member: Member
    deadlines: Deadlines
    packing: Packing
    control: tuple[EndSetup, ...]
    stacks_folder: str
    transport: str = "broadcast"
    host: str | None = None

    @property
    def width(self) -> int:
        """How many ranks the member has."""
        return len(self.control)

    def for_workers(self) -> RankSetup:
        """What a process that is no actor needs of it."""
        return RankSetup(**{each.name: getattr(self, each.name) for each in fields(RankSetup)})

    def participant(
        self, node: str, *, rank: int = 0, pids: Sequence[int] = (), keep: Keep | None = None
    ) -> tuple[RefitParticipant, Saboteur | None]:
        """The participant of this process on ``node``, for the member's rank number ``rank``, and who may strike it.

        ``pids`` are processes of the member that speak by this one. Without ``keep`` nothing strikes.
        """
        processes = [identify(pid, node) for pid in dict.fromkeys([os.getpid(), *pids])]
        saboteur = None if keep is None else Saboteur(self.member, keep, processes=processes)
        tap = None if saboteur is None else saboteur.tap
        chunk_bytes = min(_CHUNK_BYTES, max(1, self.packing.bucket_bytes // _CHUNKS_PER_BUCKET))
        participant = RefitParticipant(
            self.member,
            build_transport(self.transport, TcpBackend(self.host, chunk_bytes=chunk_bytes, tap=tap)),
            deadlines=self.deadlines,
            processes=processes,
            reach=None if saboteur is None else saboteur.reach,
            rank=rank,
        )
        participant.leave_stacks(self.stacks_folder)
        participant.open_channel(self.control[rank])
        if saboteur is not None:
            saboteur.cut_channel = participant.cut_channel
        return participant, saboteur
