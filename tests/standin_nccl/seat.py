"""The verbs of a rank over the stand-in. Every rank process imports this: nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from elastic_refit.communicators.base import GroupSpec
from elastic_refit.communicators.nccl_group import NcclCommunicator
from elastic_refit.communicators.nccl_library import Handle
from elastic_refit.communicators.nccl_membership import Rebuild, Share
from elastic_refit.communicators.rank_processes import Seat
from elastic_refit.errors import CommunicatorError
from tests.standin_nccl.host_memory import HostMemory
from tests.waiting import wait_until

__all__ = ["NcclSeat", "NotedChange"]

_READY_S = 40.0


class NcclSeat(Seat):
    """A rank that can also look into what only NCCL has."""

    def broadcast_and_look(self, size: int, root: int) -> tuple[str, int]:
        """How a broadcast of ones ended, and how many of them are here."""
        self._ones = bytearray(b"\1" * size if self._group.rank == root else size)
        try:
            self._group.broadcast(memoryview(self._ones), root)
        except CommunicatorError as error:
            return type(error).__name__, self.arrived()
        return "success", self.arrived()

    def arrived(self) -> int:
        return self._ones.count(1)

    def sync_foreign_work(self, peer: int, timeout_s: float) -> None:
        """Enqueue a receive from ``peer`` on a stream of the caller's, and wait for it."""
        assert isinstance(self._group, NcclCommunicator)
        device = HostMemory()
        region, stream = device.locate(memoryview(self.scratch(8)), is_written=True), device.open_stream()
        self._group._handle.exchange([(False, peer, region.pointer, 8)], stream=stream.handle)
        wait_until(self._group._handle.is_ready, timeout_s=_READY_S)
        self._group.sync_stream_within(timeout_s, stream)

    def is_reclaim_overdue(self) -> bool:
        assert isinstance(self._group, NcclCommunicator)
        return self._group.is_reclaim_overdue


class NotedChange(Rebuild):
    """Notes what it is asked for where the library notes its calls."""

    def form(self, handle: Handle, group: GroupSpec, share: Share) -> None:
        _note("form")
        super().form(handle, group, share)

    def let_go(self, handles: Sequence[Handle], flagged: Callable[[], None]) -> None:
        _note("let go")
        super().let_go(handles, flagged)


def _note(line: str) -> None:
    with open(os.environ["STANDIN_NCCL_LOG"], "a", encoding="ascii") as log:
        log.write(f"{line}\n")
