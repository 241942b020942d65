"""The 64-bit digests that prove a bucket: order-sensitive, over every byte, by the name that the manifest says.

``xxh3`` is the fastest on a CPU. ``sum64`` is arithmetic that every device does exactly, so that a bucket on a GPU and
its copy on a CPU have one digest. Both guard against accidents and not against an adversary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from elastic_refit.errors import PlanMismatch

__all__ = ["DIGESTS", "digest_bucket"]

_ROW_WORDS = 2048
"""Words of 8 bytes in a row."""
_BLOCK_ROWS = 8
"""Rows that a CPU takes at once: they, their keys and what is made of them stay in a core's cache."""


def digest_bucket(buffer: torch.Tensor, algorithm: str = "xxh3") -> int:
    """The digest of a contiguous uint8 bucket, in ``[0, 2**64)``; ``algorithm`` is the manifest's ``digest``.

    Raises:
        PlanMismatch: this rank does not know the algorithm, or cannot use it on the bucket's device.
    """
    if algorithm not in DIGESTS:
        raise PlanMismatch(
            f"the manifest asks for digest {algorithm!r}; this rank knows {', '.join(DIGESTS)}", digest=algorithm
        )
    return DIGESTS[algorithm](buffer)


def _xxh3(buffer: torch.Tensor) -> int:
    if buffer.device.type != "cpu":
        raise PlanMismatch(f"xxh3 is for buckets on a CPU, not on {buffer.device}; choose refit.digest: sum64")
    return xxhash.xxh3_64_intdigest(buffer.numpy().data)


def _sum64(buffer: torch.Tensor) -> int:
    """Multilinear hashing in two levels, modulo 2**64: each word times the key of its place, each row's sum likewise.

    Keys are odd, so a word that changes always shows in its sum. The upper half of a word is added to the lower half
    first: multiplied alone, the highest bit (the sign of a float) would be worth the same in every place.
    """
    if buffer.storage_offset() % 8:
        buffer = buffer.clone()  # words are read where they are aligned
    row_bytes = 8 * _ROW_WORDS
    whole = buffer.numel() // row_bytes * row_bytes
    keys = _keys("words", _ROW_WORDS, buffer.device)
    sums = [_row_sums(buffer[:whole].view(torch.int64).view(-1, _ROW_WORDS), keys)]
    if whole < buffer.numel():
        last = buffer.new_zeros(row_bytes)
        last[: buffer.numel() - whole].copy_(buffer[whole:])
        sums.append(_row_sums(last.view(torch.int64).view(1, -1), keys))
    sums.append(keys.new_tensor([buffer.numel()]))
    found = torch.cat(sums)
    return int((found * _keys("rows", found.numel(), buffer.device)).sum()) % 2**64


def _row_sums(rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """One sum for each row of int64 ``rows``; the same on every device, in the way that is fastest there."""
    if rows.device.type != "cpu":
        return _sums_at_once(rows, keys)
    return torch.from_numpy(_sums_by_blocks(rows.numpy(), keys.numpy()))


def _sums_by_blocks(rows: NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """NumPy's integer arithmetic uses the widest registers of the CPU; torch's was half as fast here."""
    sums, mixed = np.empty(len(rows), np.int64), np.empty((_BLOCK_ROWS, _ROW_WORDS), np.int64)
    for first in range(0, len(rows), _BLOCK_ROWS):
        block = rows[first : first + _BLOCK_ROWS]
        into = np.right_shift(block, 32, out=mixed[: len(block)])
        np.add(into, block, out=into)
        np.dot(into, keys, out=sums[first : first + len(block)])
    return sums


def _sums_at_once(rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return (rows >> 32).add_(rows).mul_(keys).sum(1)


@lru_cache(maxsize=64)
def _keys(kind: str, count: int, device: torch.device) -> torch.Tensor:
    """``count`` odd pseudo-random words, the same everywhere and for ever."""
    stream = bytearray(hashlib.shake_256(f"elastic-refit sum64 {kind}".encode()).digest(8 * count))
    return (torch.frombuffer(stream, dtype=torch.int64) | 1).to(device)


DIGESTS: dict[str, Callable[[torch.Tensor], int]] = {"xxh3": _xxh3, "sum64": _sum64}
