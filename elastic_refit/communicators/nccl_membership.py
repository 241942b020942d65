"""How a new epoch's NCCL communicator comes about, and what an abort does with the old one: one class per way.

``Rebuild`` is the only one: a fresh communicator each time. Another one, say a shrink of the communicator that there
was (ncclCommShrink, since 2.27.3), keeps what it needs of the last epoch between ``let_go`` and ``form``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from elastic_refit.communicators.base import GroupSpec
from elastic_refit.communicators.nccl_library import UNIQUE_ID_BYTES, Handle, abort_together, mint_unique_id

__all__ = ["MembershipChange", "Rebuild", "Share"]

Share = Callable[[bytes], list[bytes]]
"""What every rank of the new group gave, by rank; as many bytes from each."""


class MembershipChange(Protocol):
    """One instance per process: it sees every epoch."""

    def form(self, handle: Handle, group: GroupSpec, share: Share) -> None:
        """Begin to fill ``handle`` with a communicator of ``group``, whose ranks are all there and agree."""

    def let_go(self, handles: Sequence[Handle], flagged: Callable[[], None]) -> None:
        """Break off everything that is under way in ``handles``, parents first, and give back what is not kept.

        ``flagged`` is called once their work has been told to end. Blocks as long as the library does.
        """


class Rebuild:
    """Abort what there was, and start from a fresh unique id."""

    def form(self, handle: Handle, group: GroupSpec, share: Share) -> None:
        mine = mint_unique_id() if group.rank == 0 else bytes(UNIQUE_ID_BYTES)
        handle.init(share(mine)[0], rank=group.rank, world_size=group.world_size)

    def let_go(self, handles: Sequence[Handle], flagged: Callable[[], None]) -> None:
        abort_together(handles, flagged)
