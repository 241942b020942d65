"""The packed broadcast: trainer rank 0 packs buckets, a chain of all ranks passes them on, shards apply them.

What must never happen here: a buffer handed to an engine and written again, a bucket applied before it was received
whole, the sender one bucket ahead of a pack that has not finished.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from elastic_refit.communicators.base import CommunicatorBackend, Progress
from elastic_refit.core.messages import TransferOrder
from elastic_refit.transports.base import Feed, GroupTransport, OpenUpdate, PinnedVersion, RankContext, take_bucket
from elastic_refit.transports.packing import byte_view, fresh_buffer

__all__ = ["BroadcastTransport"]

_ROOT = 0


class BroadcastTransport(GroupTransport):
    """Double-buffered on the sender: bucket ``k + 1`` is packed while bucket ``k`` is sent."""

    name = "broadcast"
    has_links = True

    def __init__(self, backend: CommunicatorBackend) -> None:
        super().__init__(backend)
        self._packer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="refit-pack")
        self._buffers: list[torch.Tensor] = []

    def prepare(self, pinned: PinnedVersion, start_bucket: int) -> None:
        largest = max((bucket.size_bytes for bucket in pinned.manifest.buckets), default=0)
        if not self._buffers or self._buffers[0].numel() < largest:
            self._buffers = [torch.empty(largest, dtype=torch.uint8) for _ in range(2)]
        if start_bucket < pinned.manifest.num_buckets:
            self._ready(pinned, start_bucket)

    def send(self, context: RankContext, order: TransferOrder, pinned: PinnedVersion) -> tuple[int, ...]:
        """The next bucket is made ready while this one is sent, and that is finished even if the sending is not.

        So every trainer rank leaves a broken attempt after the same gather, and the retry finds them in step.
        """
        last = order.manifest.num_buckets - 1
        for bucket in range(order.start_bucket, last + 1):
            coming = self._packer.submit(self._ready, pinned, bucket + 1) if bucket < last else None
            try:
                self._broadcast(context, bucket, self._buffer_of(pinned, bucket))
                context.progress.completed = context.progress.applied = bucket
                context.progress.enter("packing", waiting_on="source")
            finally:
                if coming is not None:
                    coming.result()
        return pinned.all_digests() if self._is_root else ()

    def receive(self, context: RankContext, order: TransferOrder, update: OpenUpdate, feed: Feed) -> tuple[int, ...]:
        for bucket in range(order.start_bucket, order.manifest.num_buckets):
            buffer = fresh_buffer(order.manifest.buckets[bucket])
            self._broadcast(context, bucket, buffer)
            take_bucket(context, bucket, buffer, update=update, feed=feed)
            del buffer  # before the next one is allocated
        return tuple(update.digests)

    def close(self) -> None:
        super().close()
        self._packer.shutdown(wait=False, cancel_futures=True)
        self._buffers = []

    @property
    def _is_root(self) -> bool:
        return self._group().rank == _ROOT

    def _ready(self, pinned: PinnedVersion, bucket: int) -> None:
        """The root packs ``bucket``; every other trainer rank takes its part in gathering the tensors."""
        if self._is_root:
            pinned.pack(bucket, self._buffer_of(pinned, bucket))
        else:
            pinned.tensors_of(bucket)

    def _buffer_of(self, pinned: PinnedVersion, bucket: int) -> torch.Tensor:
        return self._buffers[bucket % 2][: pinned.manifest.buckets[bucket].size_bytes]

    def _broadcast(self, context: RankContext, bucket: int, buffer: torch.Tensor) -> None:
        context.progress.enter("in_collective")
        context.progress.entered = bucket
        self._group().broadcast(byte_view(buffer), _ROOT, progress=_ticking(context, bucket))


def _ticking(context: RankContext, bucket: int) -> Progress:
    """Ticks with every chunk, and names the bucket's phase once its middle has passed."""
    reach: Callable[[str], None] | None = context.reach

    def progressed(done: int, total: int) -> None:
        nonlocal reach
        context.tick()
        if reach is not None and 2 * done >= total:
            middle, reach = reach, None
            middle(f"bucket:{bucket}")

    return progressed
