"""What all ranks of a ``nccl`` group must have in common before NCCL is asked for anything.

Ranks with different versions of NCCL, or different ideas of a chunk, would wait for each other for ever.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_refit.communicators.base import GroupSpec
from elastic_refit.communicators.nccl_library import describe_version
from elastic_refit.errors import CommunicatorError, VersionMismatch

__all__ = ["Terms", "check_terms"]

_TERMS = struct.Struct("!IQ")


@dataclass(frozen=True, slots=True)
class Terms:
    nccl_version: int
    chunk_bytes: int

    def pack(self) -> bytes:
        return _TERMS.pack(self.nccl_version, self.chunk_bytes)

    @classmethod
    def unpack(cls, raw: bytes) -> Terms:
        return cls(*_TERMS.unpack(raw))


def check_terms(group: GroupSpec, terms: Sequence[Terms]) -> None:
    """Refuse a group that cannot work; every rank comes to the same conclusion.

    Raises:
        VersionMismatch: ``versions`` has what each rank loaded.
        CommunicatorError: they were not configured alike.
    """
    versions = tuple(describe_version(each.nccl_version) for each in terms)
    if len(set(versions)) > 1:
        raise VersionMismatch(
            f"the ranks of epoch {group.epoch} load different versions of NCCL: {_by_value(group, versions)}; "
            "every process of a group needs the same libnccl.so.2",
            epoch=group.epoch,
            versions=versions,
        )
    chunks = tuple(str(each.chunk_bytes) for each in terms)
    if len(set(chunks)) > 1:
        raise CommunicatorError(f"every rank of a group needs the same chunk_bytes: {_by_value(group, chunks)}")


def _by_value(group: GroupSpec, values: Sequence[str]) -> str:
    """``2.30.7 on rank 0 (trainer[0]/0), rank 1 (shard[0]/0); 2.29.7 on rank 2 (shard[1]/0)``."""
    holders: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(f"rank {rank} ({group.identities[rank]})")
    return "; ".join(f"{value} on {', '.join(ranks)}" for value, ranks in holders.items())
