"""What the ``nccl`` communicators of one process share."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_refit.communicators.nccl_membership import MembershipChange
from elastic_refit.communicators.nccl_stream import Device
from elastic_refit.communicators.nccl_terms import Terms

__all__ = ["Patience", "Settings"]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long NCCL and the device are given, in seconds."""

    drain_s: float = 10.0
    """From an abort until the device has let go of the buffers; after that its context is lost."""
    close_s: float = 10.0
    """How long a group that ends well waits for its peers, in the background."""
    reclaim_s: float = 30.0
    """When a reclaim counts as overdue. It goes on."""


@dataclass(frozen=True, slots=True)
class Settings:
    device: Device
    membership: MembershipChange
    terms: Terms
    patience: Patience
