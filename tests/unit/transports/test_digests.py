"""What a digest must tell apart, for every algorithm that a manifest may name."""

from __future__ import annotations

import pytest
import torch

from elastic_refit.errors import PlanMismatch
from elastic_refit.transports.digests import (
    _BLOCK_ROWS,
    _ROW_WORDS,
    DIGESTS,
    _keys,
    _row_sums,
    _sums_at_once,
    digest_bucket,
)

ROW_BYTES = 8 * _ROW_WORDS
SIZES = [1, 7, 8, 9, 4096, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 1, 2 * ROW_BYTES + 24]

each_digest = pytest.mark.parametrize("algorithm", DIGESTS)


def noise(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@each_digest
@pytest.mark.parametrize("size", SIZES)
def test_a_changed_byte_shows_wherever_it_is(algorithm: str, size: int) -> None:
    buffer = noise(size)
    digest = digest_bucket(buffer, algorithm)
    assert 0 <= digest < 2**64
    for place in {0, size // 2, size - 1, *range(0, size, 1 + size // 40)}:
        for change in (1, 128, 255):
            buffer[place] ^= change
            assert digest_bucket(buffer, algorithm) != digest, f"byte {place} ^ {change}"
            buffer[place] ^= change
    assert digest_bucket(buffer, algorithm) == digest


@each_digest
@pytest.mark.parametrize("unit", [1, 4, 8, 4096, ROW_BYTES])
def test_what_changes_places_shows(algorithm: str, unit: int) -> None:
    buffer = noise(3 * ROW_BYTES)
    swapped = buffer.clone()
    swapped[:unit], swapped[-unit:] = buffer[-unit:], buffer[:unit]
    assert digest_bucket(swapped, algorithm) != digest_bucket(buffer, algorithm)


@each_digest
def test_signs_that_flip_in_pairs_show(algorithm: str) -> None:
    """The sign of a float is the highest bit of a word, which arithmetic modulo 2**64 all but forgets."""
    weights = torch.randn(4 * ROW_BYTES // 4)
    digest = digest_bucket(weights.view(torch.uint8), algorithm)
    for one, other in ((1, 3), (1, 2 * _ROW_WORDS + 1), (0, 1), (2, len(weights) - 1)):
        flipped = weights.clone()
        flipped[[one, other]] *= -1
        assert digest_bucket(flipped.view(torch.uint8), algorithm) != digest


@each_digest
def test_a_bucket_that_was_never_written_or_came_short_shows(algorithm: str) -> None:
    buffer = noise(ROW_BYTES)
    digest = digest_bucket(buffer, algorithm)
    assert digest_bucket(torch.zeros_like(buffer), algorithm) != digest
    assert digest_bucket(torch.zeros(0, dtype=torch.uint8), algorithm) != digest
    assert digest_bucket(buffer[:-8], algorithm) != digest
    zeros = {digest_bucket(torch.zeros(size, dtype=torch.uint8), algorithm) for size in SIZES}
    assert len(zeros) == len(SIZES), "bytes of value zero count too"


@each_digest
def test_where_the_bucket_lies_in_memory_does_not_matter(algorithm: str) -> None:
    memory = noise(ROW_BYTES + 64)
    for offset in (0, 1, 4, 8):
        bucket = memory[offset : offset + ROW_BYTES]
        assert digest_bucket(bucket, algorithm) == digest_bucket(bucket.clone(), algorithm)


@each_digest
def test_the_value_is_the_same_on_every_machine(algorithm: str) -> None:
    known = {"xxh3": 10666956326096416113, "sum64": 12833761725430100752}
    assert digest_bucket(torch.arange(256, dtype=torch.uint8), algorithm) == known[algorithm]


@each_digest
def test_an_unknown_algorithm_is_a_mismatch_of_plans(algorithm: str) -> None:
    with pytest.raises(PlanMismatch, match=f"'{algorithm}2'; this rank knows xxh3, sum64"):
        digest_bucket(torch.zeros(8, dtype=torch.uint8), f"{algorithm}2")


def test_row_sums_are_the_same_in_the_way_that_suits_a_gpu() -> None:
    num_rows = 2 * _BLOCK_ROWS + 3  # the last block is not a whole one
    rows = noise(num_rows * ROW_BYTES).view(torch.int64).view(num_rows, -1)
    keys = _keys("words", rows.shape[1], rows.device)
    assert torch.equal(_row_sums(rows, keys), _sums_at_once(rows, keys))


def test_xxh3_of_a_bucket_that_is_not_on_a_cpu_is_refused_with_what_to_choose() -> None:
    with pytest.raises(PlanMismatch, match=r"choose refit\.digest: sum64"):
        digest_bucket(torch.empty(8, dtype=torch.uint8, device="meta"), "xxh3")
