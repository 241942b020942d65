"""What a transport is: one way of getting every bucket of a version from the trainers into the engines.

The rank side. A transport moves and proves bytes; who takes part, when, and what follows a failure is the protocol's.
What must never happen here: a bucket applied that was not received whole, or a progress that is not reported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elastic_refit.beacon import ProgressRecorder
from elastic_refit.core.manifest import Manifest, TensorSpec, build_manifest
from elastic_refit.core.messages import TransferOrder
from elastic_refit.transports.packing import BucketUnpacker

if TYPE_CHECKING:
    import torch

    from elastic_refit.communicators.base import Communicator
    from elastic_refit.engines.base import WeightReceiver

__all__ = ["OpenUpdate", "PinnedVersion", "RankContext", "WeightSource", "WeightTransport"]


class WeightSource(ABC):
    """The trainer's weights, as tensors of the checkpoint. One per trainer rank; all call it in one order."""

    @abstractmethod
    def specs(self) -> list[TensorSpec]:
        """Every tensor that a refit moves, in order; cheap, and no collective."""

    @abstractmethod
    def materialize(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """These tensors, whole. May be a collective over the trainer ranks (a sharded trainer gathers here).

        Restartable: a retry asks for names again and gets the same values as long as the version is pinned.
        """


@dataclass(slots=True)
class PinnedVersion:
    """The sender's side of one version: it lives from the first attempt until the refit has landed or ended."""

    version: int
    source: WeightSource
    manifest: Manifest
    digests: dict[int, int] = field(default_factory=dict)
    """By bucket, of what was packed; a retry completes it."""

    @classmethod
    def of(cls, version: int, source: WeightSource, bucket_bytes: int) -> PinnedVersion:
        return cls(version, source, build_manifest(source.specs(), bucket_bytes))


@dataclass(slots=True)
class OpenUpdate:
    """The receiver's side of one version: what the engine has been fed, over all attempts."""

    version: int
    manifest: Manifest
    unpacker: BucketUnpacker
    digests: list[int] = field(default_factory=list)
    is_open: bool = False
    """The engine was told to begin, and neither to finish nor to roll back."""

    @property
    def applied_through(self) -> int:
        """The highest bucket that the engine was fed, -1 if none."""
        return len(self.digests) - 1


@dataclass(slots=True)
class RankContext:
    """What a transport needs of the process that runs it, for one attempt.

    ``tick`` says that there was progress; ``reach`` names the phase that the rank has come to.
    """

    communicator: Communicator
    progress: ProgressRecorder
    tick: Callable[[], None]
    reach: Callable[[str], None]


class WeightTransport(ABC):
    """One way of moving a version. Stateless between refits: what must outlive an attempt is in its arguments."""

    name: str

    @abstractmethod
    def pack_first(self, pinned: PinnedVersion, start_bucket: int) -> None:
        """Have the bucket that the attempt begins with ready, so that nobody waits for it inside the collective."""

    @abstractmethod
    def send(self, context: RankContext, order: TransferOrder, pinned: PinnedVersion) -> tuple[int, ...]:
        """Trainer side; every trainer rank calls it. Returns the digests of all buckets on rank 0, else nothing."""

    @abstractmethod
    def receive(
        self, context: RankContext, order: TransferOrder, update: OpenUpdate, receiver: WeightReceiver
    ) -> tuple[int, ...]:
        """Shard side: receive, apply, and return the digests of all buckets as received.

        The caller has opened the update on ``receiver``. Buckets that the update already holds are discarded.
        """
