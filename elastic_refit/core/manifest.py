"""The manifest: what one refit moves and how it is cut into buckets.

Trainer rank 0 makes it and gives it to everyone. Nobody recomputes boundaries: two ranks that disagree about one byte
would misalign every parameter after it, in silence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["ALIGNMENT_BYTES", "Bucket", "Manifest", "Piece", "TensorSpec", "build_manifest", "differing_buckets"]

ALIGNMENT_BYTES = 16
"""Every piece starts at a multiple of this, so that a tensor of any dtype can be viewed in place."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its name, its shape, its torch dtype without the ``torch.`` prefix, and its size."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """``size_bytes`` of tensor number ``tensor`` from ``tensor_offset``, lying at ``bucket_offset`` of its bucket."""

    tensor: int
    tensor_offset: int
    bucket_offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One packed buffer of the refit: the unit of transfer, progress, digest and resume."""

    size_bytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Names, shapes, dtypes and bucket boundaries of one model layout.

    ``digest`` names the 64-bit digest that proves each bucket; every rank of the group must know it.
    """

    tensors: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]
    digest: str = "xxh3"

    @property
    def num_buckets(self) -> int:
        return len(self.buckets)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, without the padding between pieces."""
        return sum(spec.size_bytes for spec in self.tensors)

    @property
    def transfer_bytes(self) -> int:
        """Bytes on the wire: all buckets, padding included."""
        return sum(bucket.size_bytes for bucket in self.buckets)

    @property
    def fingerprint(self) -> str:
        """Equal exactly when two manifests would move the same bytes to the same places (sha256, hex)."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        return {
            "digest": self.digest,
            "tensors": [[t.name, list(t.shape), t.dtype, t.size_bytes] for t in self.tensors],
            "buckets": [
                [b.size_bytes, [[p.tensor, p.tensor_offset, p.bucket_offset, p.size_bytes] for p in b.pieces]]
                for b in self.buckets
            ],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Manifest:
        return cls(
            tensors=tuple(TensorSpec(name, tuple(shape), dtype, size) for name, shape, dtype, size in data["tensors"]),
            buckets=tuple(Bucket(size, tuple(Piece(*piece) for piece in pieces)) for size, pieces in data["buckets"]),
            digest=data["digest"],
        )


def build_manifest(tensors: Iterable[TensorSpec], bucket_bytes: int, *, digest: str = "xxh3") -> Manifest:
    """Cut ``tensors``, in their order, into buckets of at most ``bucket_bytes``.

    A tensor that does not fit into the rest of a bucket is split over as many buckets as it needs; a tensor of zero
    bytes lies nowhere and is still named.

    Raises:
        ValueError: ``bucket_bytes`` is not a positive multiple of ``ALIGNMENT_BYTES``, or a name occurs twice.
    """
    if bucket_bytes <= 0 or bucket_bytes % ALIGNMENT_BYTES:
        raise ValueError(f"bucket_bytes must be a positive multiple of {ALIGNMENT_BYTES}, not {bucket_bytes}")
    specs = tuple(tensors)
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"a manifest names every tensor once; named twice: {', '.join(twice)}")
    return Manifest(tensors=specs, buckets=tuple(_cut(specs, bucket_bytes)), digest=digest)


def differing_buckets(sent: Sequence[int], received: Sequence[int]) -> list[int]:
    """The buckets whose digests differ, as far as both sides have one."""
    return [bucket for bucket, pair in enumerate(zip(sent, received, strict=False)) if pair[0] != pair[1]]


def _cut(specs: tuple[TensorSpec, ...], bucket_bytes: int) -> Iterable[Bucket]:
    pieces: list[Piece] = []
    used = 0
    for number, spec in enumerate(specs):
        done = 0
        while done < spec.size_bytes:
            start = -(-used // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            if start >= bucket_bytes:
                yield Bucket(used, tuple(pieces))
                pieces, used = [], 0
                continue
            size = min(spec.size_bytes - done, bucket_bytes - start)
            pieces.append(Piece(number, done, start, size))
            done, used = done + size, start + size
    if pieces:
        yield Bucket(used, tuple(pieces))
