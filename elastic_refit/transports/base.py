"""What a transport is: one way of getting every bucket of a version from the trainers into the engines.

The rank side. A transport moves and proves bytes; who takes part, when, and what follows a failure is the protocol's.
What must never happen here: a bucket applied that was not received whole, or a progress that is not reported.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from elastic_refit.beacon import ProgressRecorder
from elastic_refit.core.manifest import Manifest, TensorSpec, build_manifest
from elastic_refit.core.membership import Membership, should_rebuild
from elastic_refit.core.messages import TransferOrder
from elastic_refit.errors import StaleEpoch
from elastic_refit.transports.digests import digest_bucket
from elastic_refit.transports.packing import BucketUnpacker, byte_view, pack_bucket, tensor_specs

if TYPE_CHECKING:
    import torch

    from elastic_refit.communicators.base import Communicator, CommunicatorBackend, GroupSpec, PendingCommunicator

__all__ = [
    "Feed",
    "GroupTransport",
    "HeldWeights",
    "ManifestKeeper",
    "NamedTensors",
    "OpenUpdate",
    "Packing",
    "PinnedVersion",
    "RankContext",
    "WeightSource",
    "WeightTransport",
    "take_bucket",
]

logger = logging.getLogger(__name__)


NamedTensors = Sequence[tuple[str, "torch.Tensor"]]
"""Whole tensors by their checkpoint names."""
Feed = Callable[[NamedTensors], None]
"""Takes tensors whose memory is given away, in the manifest's order."""


class WeightSource(ABC):
    """The trainer's weights, as tensors of the checkpoint. One per trainer rank, asked for the same names in one order.

    After a broken attempt a retry begins anywhere: what it asks for, it asks of every trainer rank again.
    """

    @abstractmethod
    def specs(self) -> list[TensorSpec]:
        """Every tensor that a refit moves, in order; cheap, and no collective."""

    @abstractmethod
    def materialize(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """These tensors, whole. May be a collective over the trainer ranks (a sharded trainer gathers here).

        Restartable: a retry asks for names again and gets the same values as long as the version is pinned. What is
        returned is dropped once it is packed, so a sharded trainer holds little more than one bucket gathered. Called
        from another thread than the trainer's own. It must not wait for ever for a rank that does not come.

        Raises:
            CommunicatorError: ``abort`` freed it, or another rank did not come.
        """

    def abort(self, reason: str) -> None:  # noqa: B027 - a source that waits for nobody has nothing to free
        """Free a ``materialize`` that waits for another rank, and any that follows until ``restart``. Any thread."""

    def restart(self) -> None:  # noqa: B027
        """An attempt begins: an earlier ``abort`` is over."""


class HeldWeights(WeightSource):
    """Weights that this rank holds whole, by their checkpoint names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)

    def specs(self) -> list[TensorSpec]:
        return tensor_specs(self.tensors.items())

    def materialize(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        return {name: self.tensors[name] for name in names}


@dataclass(frozen=True, slots=True)
class Packing:
    """How a trainer cuts its weights: the largest bucket, in bytes, and the digest that proves each."""

    bucket_bytes: int
    digest: str = "xxh3"


class ManifestKeeper:
    """The manifest of the model as it is laid out; made anew only when that changes, and then it says so."""

    def __init__(self) -> None:
        self._manifest: Manifest | None = None
        self._packing: Packing | None = None

    def manifest_of(self, specs: Iterable[TensorSpec], packing: Packing) -> Manifest:
        tensors, known = tuple(specs), self._manifest
        if known is not None and (known.tensors, self._packing) == (tensors, packing):
            return known
        self._packing = packing
        self._manifest = made = build_manifest(tensors, packing.bucket_bytes, digest=packing.digest)
        event = "manifest_made" if known is None else "manifest_remade"
        logger.info(event, extra={"tensors": len(tensors), "buckets": made.num_buckets, "digest": made.digest})
        return made


@dataclass(slots=True)
class PinnedVersion:
    """The sender's side of one version: it lives from the first attempt until the refit has landed or ended."""

    version: int
    source: WeightSource
    manifest: Manifest
    digests: dict[int, int] = field(default_factory=dict)
    """By bucket, of what was packed; a retry completes it."""

    def tensors_of(self, bucket: int) -> Mapping[str, torch.Tensor]:
        """The tensors of which pieces lie in ``bucket``. Every trainer rank asks for the same ones, in one order."""
        pieces = self.manifest.buckets[bucket].pieces
        return self.source.materialize([self.manifest.tensors[piece.tensor].name for piece in pieces])

    def pack(self, bucket: int, out: torch.Tensor) -> None:
        """Pack ``bucket`` into ``out``, which is as large, and note its digest."""
        pack_bucket(self.manifest.buckets[bucket], self.manifest, tensors=self.tensors_of(bucket), out=out)
        self.digests[bucket] = digest_bucket(out, self.manifest.digest)

    def all_digests(self) -> tuple[int, ...]:
        return tuple(self.digests[bucket] for bucket in range(self.manifest.num_buckets))


@dataclass(slots=True)
class OpenUpdate:
    """The receiver's side of one version: what the engine has been fed, or what is kept for it, over all attempts."""

    version: int
    manifest: Manifest
    unpacker: BucketUnpacker
    digests: list[int] = field(default_factory=list)
    staged: deque[NamedTensors] = field(default_factory=deque)
    """What came and waits for the commit, in memory that nobody else writes to: one entry per bucket."""
    is_open: bool = False
    """The engine was told to begin, and neither to finish nor to roll back."""

    @property
    def applied_through(self) -> int:
        """The highest bucket that was fed or kept, -1 if none."""
        return len(self.digests) - 1


@dataclass(slots=True)
class RankContext:
    """What a transport needs of the process that runs it, for one attempt.

    ``tick`` says that there was progress; ``reach`` names the phase that the rank has come to. ``received`` is called
    with the bytes of a bucket that came whole, before anything is done with them; None as a rule.
    """

    progress: ProgressRecorder
    tick: Callable[[], None]
    reach: Callable[[str], None]
    received: Callable[[int, memoryview], None] | None = None


def take_bucket(context: RankContext, bucket: int, buffer: torch.Tensor, *, update: OpenUpdate, feed: Feed) -> None:
    """Digest a bucket that was received whole and feed it, unless ``update`` already holds it.

    ``buffer`` is given away: what is fed may be a view into it.
    """
    context.progress.completed = bucket
    if bucket <= update.applied_through:
        return
    context.progress.enter("applying", waiting_on="engine")
    if context.received is not None:
        context.received(bucket, byte_view(buffer))
    digest = digest_bucket(buffer, update.manifest.digest)
    feed(update.unpacker.unpack(bucket, buffer))
    update.digests.append(digest)
    context.progress.applied = bucket
    context.tick()


class WeightTransport(ABC):
    """One way of moving a version: ``prepare · reconcile_communicator · send · receive · close``.

    Made once per process, by its class and the process' ``CommunicatorBackend``. It owns whatever connects it with the
    other ranks, and keeps nothing of a version: what must outlive an attempt is in its arguments. One thread uses it;
    any thread may ``abort`` it.
    """

    name: ClassVar[str]
    has_links: ClassVar[bool] = False
    """Bytes travel along a chain in rank order, so that a verdict may name a link."""
    communicator: Communicator | None = None
    """The group that this rank has joined, if the transport has one: it knows whom the rank waits for."""

    def __init__(self, backend: CommunicatorBackend) -> None:
        self._backend = backend

    def listen(self) -> str:
        """Leave the group and bind for the next one; the address is for every other rank's ``GroupSpec``."""
        return ""

    @abstractmethod
    def reconcile_communicator(self, membership: Membership, group: GroupSpec, *, timeout_s: float) -> bool | None:
        """Have what connects this rank with ``membership``; blocks at most ``timeout_s``.

        True: it was built. False: nothing had changed. None: this transport owns no membership.

        Raises:
            CommunicatorError: the group did not come together, or was aborted.
        """

    @abstractmethod
    def prepare(self, pinned: PinnedVersion, start_bucket: int) -> None:
        """Trainer side: have the bucket that the attempt begins with ready; nobody waits for it in the collective."""

    @abstractmethod
    def send(self, context: RankContext, order: TransferOrder, pinned: PinnedVersion) -> tuple[int, ...]:
        """Trainer side; every trainer rank calls it. Returns the digests of all buckets on rank 0, else nothing."""

    @abstractmethod
    def receive(self, context: RankContext, order: TransferOrder, update: OpenUpdate, feed: Feed) -> tuple[int, ...]:
        """Shard side: give every bucket to :func:`take_bucket`; returns the digests of all of them as received."""

    def abort(self, reason: str) -> None:
        """Free every blocked call, from any thread. A transport that blocks on nobody has nothing to do."""
        if self.communicator is not None:
            self.communicator.abort(reason)

    @abstractmethod
    def close(self) -> None:
        """End of life: leave the group, free what is held. Idempotent; never blocks on a peer."""


class GroupTransport(WeightTransport):
    """A transport over one communicator of all ranks. The first build and every rebuild are the same call."""

    def __init__(self, backend: CommunicatorBackend) -> None:
        super().__init__(backend)
        self._pending: PendingCommunicator | None = None
        self._built: Membership | None = None

    def listen(self) -> str:
        self._leave()
        self._pending = self._backend.bind()
        return self._pending.address

    def reconcile_communicator(self, membership: Membership, group: GroupSpec, *, timeout_s: float) -> bool:
        is_broken = self.communicator is None or self.communicator.aborted is not None
        if not should_rebuild(membership, self._built, force=is_broken):
            return False
        self._build(membership, group, timeout_s)
        return True

    def abort(self, reason: str) -> None:
        if self._pending is not None:
            self._pending.abort(reason)
        super().abort(reason)

    def close(self) -> None:
        self._leave()

    def _build(self, membership: Membership, group: GroupSpec, timeout_s: float) -> None:
        if self._pending is None:
            raise StaleEpoch(f"told to join epoch {group.epoch} without having prepared it")
        self.communicator = self._pending.join(group, timeout_s=timeout_s)
        self._built = membership

    def _group(self) -> Communicator:
        """Raises StaleEpoch if this rank is in no group."""
        if self.communicator is None:
            raise StaleEpoch("told to move weights without having joined a group")
        return self.communicator

    def _leave(self) -> None:
        for target in (self._pending, self.communicator):
            if target is not None:
                target.close()
        self._pending = self.communicator = self._built = None
