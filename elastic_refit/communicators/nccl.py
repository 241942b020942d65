"""The ``nccl`` communicator: GPU memory, over NVIDIA's own binding of NCCL.

A group is the same ring of links as a ``tcp`` group's. It brings the ranks together (authenticated, bounded, missing
ranks by name), compares what they load, carries the unique id, and tells of a peer that has gone; NCCL tells nobody.

What must never happen here: a blocking communicator. A thread inside one of its calls cannot be freed.
"""

from __future__ import annotations

import os

from elastic_refit.communicators.addresses import bind_listeners
from elastic_refit.communicators.base import PendingCommunicator
from elastic_refit.communicators.nccl_group import NcclCommunicator
from elastic_refit.communicators.nccl_library import library_version
from elastic_refit.communicators.nccl_membership import MembershipChange, Rebuild
from elastic_refit.communicators.nccl_settings import Patience, Settings
from elastic_refit.communicators.nccl_stream import CudaDevice, Device
from elastic_refit.communicators.nccl_terms import Terms
from elastic_refit.communicators.pending import RingPending
from elastic_refit.communicators.switchboard import Limits
from elastic_refit.communicators.wiring import Wiring
from elastic_refit.errors import ConfigError

__all__ = ["NcclBackend", "Patience"]

_CHUNK_BYTES = 64 << 20


class NcclBackend:
    """Makes ``nccl`` communicators. Its behaviour on a GPU has not been measured.

    ``host`` is where other hosts reach the ring, by default the loopback address and so nobody; NCCL finds its own
    interfaces. ``chunk_bytes`` is one NCCL call of a broadcast: smaller ones report progress sooner and leave less to
    an abort. Buffers are what ``device`` says, by default contiguous tensors on the current CUDA device.
    """

    name = "nccl"

    def __init__(
        self,
        host: str | None = None,
        *,
        device: Device | None = None,
        chunk_bytes: int = _CHUNK_BYTES,
        membership: MembershipChange | None = None,
        patience: Patience | None = None,
        limits: Limits | None = None,
    ) -> None:
        if chunk_bytes <= 0:
            raise ValueError(f"chunk_bytes must be positive, not {chunk_bytes}")
        self._host = host
        self._device = device or CudaDevice()
        self._chunk_bytes = chunk_bytes
        self._membership = membership or Rebuild()
        self._patience = patience or Patience()
        self._limits = limits or Limits()

    def bind(self) -> PendingCommunicator:
        """Listen.

        Raises:
            ConfigError: NCCL is missing, too old, or made to block by the environment.
        """
        _refuse_blocking()
        terms = Terms(library_version(), self._chunk_bytes)
        settings = Settings(self._device, self._membership, terms, self._patience)

        def make(wiring: Wiring, ranks: tuple[int, ...]) -> NcclCommunicator:
            return NcclCommunicator(wiring, ranks, settings=settings)

        address, listeners = bind_listeners(self._host)
        return RingPending(address, listeners, make=make, limits=self._limits)


def _refuse_blocking() -> None:
    """NCCL prefers this variable to what a program asks for."""
    forced = os.environ.get("NCCL_COMM_BLOCKING", "0")
    if forced != "0":
        raise ConfigError(
            f"NCCL_COMM_BLOCKING={forced} in the environment makes every NCCL call block, and a blocked call cannot be "
            "aborted; unset it",
            value=forced,
        )
