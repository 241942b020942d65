"""The manifest: every byte of every tensor lies in exactly one place, aligned and inside its bucket."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_refit.core.manifest import ALIGNMENT_BYTES, Manifest, Piece, TensorSpec, build_manifest

sizes = st.lists(st.integers(min_value=0, max_value=700), max_size=12)
bucket_sizes = st.integers(min_value=1, max_value=16).map(lambda count: count * ALIGNMENT_BYTES)


def specs_of(sizes: list[int]) -> list[TensorSpec]:
    return [TensorSpec(f"layer.{number}", (size,), "uint8", size) for number, size in enumerate(sizes)]


def pieces_of(manifest: Manifest, tensor: int) -> list[Piece]:
    return [piece for bucket in manifest.buckets for piece in bucket.pieces if piece.tensor == tensor]


@given(sizes, bucket_sizes)
def test_the_pieces_of_a_tensor_cover_each_of_its_bytes_once_and_in_order(sizes: list[int], bucket_bytes: int) -> None:
    manifest = build_manifest(specs_of(sizes), bucket_bytes)
    for number, size in enumerate(sizes):
        covered = 0
        for piece in pieces_of(manifest, number):
            assert piece.tensor_offset == covered
            assert piece.size_bytes > 0
            covered += piece.size_bytes
        assert covered == size


@given(sizes, bucket_sizes)
def test_the_pieces_of_a_bucket_are_aligned_and_lie_inside_it_without_overlap(
    sizes: list[int], bucket_bytes: int
) -> None:
    for bucket in build_manifest(specs_of(sizes), bucket_bytes).buckets:
        assert bucket.pieces
        assert bucket.size_bytes <= bucket_bytes
        assert all(piece.bucket_offset % ALIGNMENT_BYTES == 0 for piece in bucket.pieces)
        for before, after in pairwise(bucket.pieces):
            assert before.bucket_offset + before.size_bytes <= after.bucket_offset
        last = bucket.pieces[-1]
        assert last.bucket_offset + last.size_bytes == bucket.size_bytes


@given(sizes, bucket_sizes)
def test_padding_is_less_than_one_alignment_for_each_piece(sizes: list[int], bucket_bytes: int) -> None:
    manifest = build_manifest(specs_of(sizes), bucket_bytes)
    padding = manifest.transfer_bytes - manifest.total_bytes
    assert manifest.total_bytes == sum(sizes)
    assert 0 <= padding <= sum((ALIGNMENT_BYTES - 1) * (len(bucket.pieces) - 1) for bucket in manifest.buckets)


@given(sizes, bucket_sizes)
def test_only_the_last_bucket_has_room_for_another_piece(sizes: list[int], bucket_bytes: int) -> None:
    buckets = build_manifest(specs_of(sizes), bucket_bytes).buckets
    assert all(bucket.size_bytes > bucket_bytes - ALIGNMENT_BYTES for bucket in buckets[:-1])


@given(sizes, bucket_sizes)
def test_a_manifest_survives_json_with_its_fingerprint(sizes: list[int], bucket_bytes: int) -> None:
    manifest = build_manifest(specs_of(sizes), bucket_bytes)
    restored = Manifest.from_dict(json.loads(json.dumps(manifest.to_dict())))
    assert restored == manifest
    assert restored.fingerprint == manifest.fingerprint


def test_the_fingerprint_changes_with_anything_that_moves_a_byte() -> None:
    specs = specs_of([100, 33, 64])
    manifest = build_manifest(specs, 64)
    others = [
        build_manifest(specs, 128),
        build_manifest(specs, 64, digest="sum64"),
        build_manifest(reversed(specs), 64),
        build_manifest([replace(specs[0], dtype="int8"), *specs[1:]], 64),
        build_manifest([replace(specs[0], shape=(50, 2)), *specs[1:]], 64),
        build_manifest([replace(specs[0], name="other"), *specs[1:]], 64),
    ]
    assert len({manifest.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(others)


def test_a_tensor_larger_than_a_bucket_is_split_over_several() -> None:
    manifest = build_manifest(specs_of([40]), 16)
    assert [bucket.size_bytes for bucket in manifest.buckets] == [16, 16, 8]
    assert pieces_of(manifest, 0) == [Piece(0, 0, 0, 16), Piece(0, 16, 0, 16), Piece(0, 32, 0, 8)]


def test_a_tensor_of_zero_bytes_is_named_and_lies_nowhere() -> None:
    manifest = build_manifest(specs_of([0]), 16)
    assert [spec.name for spec in manifest.tensors] == ["layer.0"]
    assert manifest.num_buckets == 0


@pytest.mark.parametrize("bucket_bytes", [0, -ALIGNMENT_BYTES, ALIGNMENT_BYTES + 1])
def test_a_bucket_size_that_breaks_the_alignment_is_refused(bucket_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"positive multiple of {ALIGNMENT_BYTES}, not {bucket_bytes}"):
        build_manifest([], bucket_bytes)


def test_a_name_that_occurs_twice_is_refused_by_name() -> None:
    twice = TensorSpec("lm_head.weight", (4,), "uint8", 4)
    with pytest.raises(ValueError, match=r"named twice: lm_head\.weight"):
        build_manifest([twice, TensorSpec("embed", (4,), "uint8", 4), twice], 64)
