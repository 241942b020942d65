"""The packed broadcast: trainer rank 0 packs buckets, a chain of all ranks passes them on, shards apply them.

What must never happen here: a buffer handed to an engine and written again, a bucket applied before it was received
whole, the sender one bucket ahead of a pack that has not finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from elastic_refit.communicators.base import Progress
from elastic_refit.core.messages import TransferOrder
from elastic_refit.engines.base import WeightReceiver
from elastic_refit.transports.base import OpenUpdate, PinnedVersion, RankContext, WeightTransport
from elastic_refit.transports.packing import byte_view, digest_bucket, fresh_buffer, pack_bucket

__all__ = ["BroadcastTransport"]

_ROOT = 0


class BroadcastTransport(WeightTransport):
    """Double-buffered on the sender: bucket ``k + 1`` is packed while bucket ``k`` is sent."""

    name = "broadcast"

    def __init__(self) -> None:
        self._packer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="refit-pack")
        self._buffers: list[torch.Tensor] = []
        self._first: tuple[int, int, Future[torch.Tensor]] | None = None

    def pack_first(self, pinned: PinnedVersion, start_bucket: int) -> None:
        largest = max((bucket.size_bytes for bucket in pinned.manifest.buckets), default=0)
        if not self._buffers or self._buffers[0].numel() < largest:
            self._buffers = [torch.empty(largest, dtype=torch.uint8) for _ in range(2)]
        if start_bucket < pinned.manifest.num_buckets:
            packed: Future[torch.Tensor] = Future()
            packed.set_result(self._pack(pinned, start_bucket))
            self._first = (pinned.version, start_bucket, packed)

    def send(self, context: RankContext, order: TransferOrder, pinned: PinnedVersion) -> tuple[int, ...]:
        send = self._send_as_root if context.communicator.rank == _ROOT else self._pass_on
        send(context, order, pinned)
        if context.communicator.rank != _ROOT:
            return ()
        return tuple(pinned.digests[bucket] for bucket in range(order.manifest.num_buckets))

    def _send_as_root(self, context: RankContext, order: TransferOrder, pinned: PinnedVersion) -> None:
        for bucket, buffer in self._packed(order, pinned):
            context.progress.enter("in_collective")
            context.progress.entered = bucket
            context.communicator.broadcast(byte_view(buffer), _ROOT, progress=_ticking(context, bucket))
            context.progress.completed = context.progress.applied = bucket
            context.progress.enter("packing", waiting_on="source")

    def _packed(self, order: TransferOrder, pinned: PinnedVersion) -> Iterator[tuple[int, torch.Tensor]]:
        """Each bucket from ``start_bucket`` on, packed; the next one is in the making while the caller sends."""
        first, self._first = self._first, None
        last = order.manifest.num_buckets - 1
        coming: Future[torch.Tensor] | None = None
        if first is not None and first[:2] == (order.version, order.start_bucket):
            coming = first[2]
        for bucket in range(order.start_bucket, last + 1):
            buffer = (coming or self._packer.submit(self._pack, pinned, bucket)).result()
            coming = self._packer.submit(self._pack, pinned, bucket + 1) if bucket < last else None
            yield bucket, buffer

    def _pack(self, pinned: PinnedVersion, bucket: int) -> torch.Tensor:
        layout = pinned.manifest.buckets[bucket]
        names = [pinned.manifest.tensors[piece.tensor].name for piece in layout.pieces]
        buffer = self._buffers[bucket % 2][: layout.size_bytes]
        pack_bucket(layout, pinned.manifest, tensors=pinned.source.materialize(names), out=buffer)
        pinned.digests[bucket] = digest_bucket(buffer, pinned.manifest.digest)
        return buffer

    def _pass_on(self, context: RankContext, order: TransferOrder, pinned: PinnedVersion) -> None:
        """A trainer rank that is not the root: takes part in gathering the tensors, and forwards the bytes."""
        scratch = self._buffers[0]
        for bucket in range(order.start_bucket, order.manifest.num_buckets):
            layout = order.manifest.buckets[bucket]
            context.progress.enter("packing", waiting_on="source")
            pinned.source.materialize([order.manifest.tensors[piece.tensor].name for piece in layout.pieces])
            context.progress.enter("in_collective")
            context.progress.entered = bucket
            view = byte_view(scratch[: layout.size_bytes])
            context.communicator.broadcast(view, _ROOT, progress=_ticking(context, bucket))
            context.progress.completed = context.progress.applied = bucket

    def receive(
        self, context: RankContext, order: TransferOrder, update: OpenUpdate, receiver: WeightReceiver
    ) -> tuple[int, ...]:
        for bucket in range(order.start_bucket, order.manifest.num_buckets):
            buffer = fresh_buffer(order.manifest.buckets[bucket])
            context.progress.enter("in_collective")
            context.progress.entered = bucket
            context.communicator.broadcast(byte_view(buffer), _ROOT, progress=_ticking(context, bucket))
            context.progress.completed = bucket
            if bucket > update.applied_through:
                _apply(context, bucket, buffer, update, receiver)
        return tuple(update.digests)


def _apply(
    context: RankContext, bucket: int, buffer: torch.Tensor, update: OpenUpdate, receiver: WeightReceiver
) -> None:
    context.progress.enter("applying", waiting_on="engine")
    digest = digest_bucket(buffer, update.manifest.digest)
    receiver.feed(update.unpacker.unpack(bucket, buffer))
    update.digests.append(digest)
    context.progress.applied = bucket
    context.tick()


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
