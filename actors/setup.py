"""What every participant actor is given when it is made, and how it hosts its part in refits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import ray
from ray.actor import ActorHandle

from elastic_refit.actors.sabotage import keep_in
from elastic_refit.chaos import Saboteur
from elastic_refit.communicators.tcp import TcpBackend
from elastic_refit.control.setup import EndSetup
from elastic_refit.core.deadlines import Deadlines
from elastic_refit.core.ids import Member
from elastic_refit.participant import RefitParticipant
from elastic_refit.processes import identify
from elastic_refit.transports.base import Packing
from elastic_refit.transports.registry import build_transport

__all__ = ["ParticipantSetup"]

_CHUNK_BYTES = 1 << 20
_CHUNKS_PER_BUCKET = 4
"""At least: a chunk is what is forwarded while the next one arrives, and a sign of progress."""


@dataclass(frozen=True, slots=True)
class ParticipantSetup:
    """``host`` is the interface that the communicator listens on; None: loopback, for a fleet on one node.

    ``stacks_folder`` is where the process leaves its stacks when it has to, on its own node. ``fault_log`` is there in
    a run whose members may be struck on purpose.
    """

    member: Member
    deadlines: Deadlines
    packing: Packing
    control: EndSetup
    stacks_folder: str
    transport: str = "broadcast"
    host: str | None = None
    fault_log: ActorHandle | None = None

    def participant(self, *, pids: Sequence[int] = ()) -> tuple[RefitParticipant, Saboteur | None]:
        """The participant of this process; ``pids`` are the member's other processes. And who may strike it."""
        node = ray.get_runtime_context().get_node_id()
        processes = [identify(pid, node) for pid in dict.fromkeys([os.getpid(), *pids])]
        saboteur = None
        if self.fault_log is not None:
            saboteur = Saboteur(self.member, partial(keep_in, self.fault_log), processes=processes)
        tap = None if saboteur is None else saboteur.tap
        chunk_bytes = min(_CHUNK_BYTES, max(1, self.packing.bucket_bytes // _CHUNKS_PER_BUCKET))
        participant = RefitParticipant(
            self.member,
            build_transport(self.transport, TcpBackend(self.host, chunk_bytes=chunk_bytes, tap=tap)),
            deadlines=self.deadlines,
            processes=processes,
            reach=None if saboteur is None else saboteur.reach,
        )
        participant.leave_stacks(self.stacks_folder)
        participant.open_channel(self.control)
        if saboteur is not None:
            saboteur.cut_channel = participant.cut_channel
        return participant, saboteur
