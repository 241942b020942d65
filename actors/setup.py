"""What every participant actor is given when it is made, and how it hosts its part in refits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import ray

from elastic_refit.communicators.tcp import TcpBackend
from elastic_refit.control.setup import EndSetup
from elastic_refit.core.deadlines import Deadlines
from elastic_refit.core.ids import Member
from elastic_refit.participant import Reach, RefitParticipant
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

    ``stacks_folder`` is where the process leaves its stacks when it has to, on its own node.
    """

    member: Member
    deadlines: Deadlines
    packing: Packing
    control: EndSetup
    stacks_folder: str
    transport: str = "broadcast"
    host: str | None = None

    def participant(self, *, pids: Sequence[int] = (), reach: Reach | None = None) -> RefitParticipant:
        """The participant of this process; ``pids`` are the member's other processes."""
        node = ray.get_runtime_context().get_node_id()
        chunk_bytes = min(_CHUNK_BYTES, max(1, self.packing.bucket_bytes // _CHUNKS_PER_BUCKET))
        participant = RefitParticipant(
            self.member,
            build_transport(self.transport, TcpBackend(self.host, chunk_bytes=chunk_bytes)),
            deadlines=self.deadlines,
            processes=[identify(pid, node) for pid in sorted({os.getpid(), *pids})],
            reach=reach,
        )
        participant.leave_stacks(self.stacks_folder)
        participant.open_channel(self.control)
        return participant
